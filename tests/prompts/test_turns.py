"""Checks where prompts are cut and kept: little of a conversation is read again, and each turn has the
bits of a cold one, with chunks as long as a GPU's. Most models may be cut at any page; of some, whose n_cut is n_chunk,
cuts change bits."""

import queue

import numpy as np
import pytest
import tiny
from depth import deeper, examples
from drive import open_engine, open_model, read
from hypothesis import example, given
from hypothesis import strategies as st
from paper_engine import PaperEngine, PaperLine
from serving import HANG_S, until

from luce.bench.serve import Answered
from luce.bench.serve import conversation as conversation_of_bench
from luce.decode.engine import Engine
from luce.decode.events import Failed, Finished, Prefilled
from luce.decode.request import Request
from luce.decode.scheduler import Job, Scheduler, put_all
from luce.files.tokenizer import Tokenizer
from luce.native import File
from luce.native.structs import PAGE
from luce.planning.opened import Files
from luce.planning.plan import Options
from luce.prompts.cache import PrefixCache
from luce.prompts.turns import LOST, Turns, rule

CHUNK = 1024  # It is luce.model.defaults.GPU_CHUNK.
MARK = 0  # This token begins a message here.


class Marked:
    """The tiny model's tokenizer, with a token that begins messages."""

    def __init__(self, tokenizer):
        self.control = {"<|im_start|>": MARK}
        self.decode, self.encode = tokenizer.decode, tokenizer.encode
        self.eos_ids, self.bytes_of = tokenizer.eos_ids, tokenizer.bytes_of

    def message(self, role, n, seed):
        """A message of n tokens."""
        head = [MARK, *self.encode(f"{role}\n")]
        words = np.random.default_rng(seed).integers(33, 200, max(n - len(head), 0))
        return [*head, *(int(token) for token in words)]


@pytest.fixture(scope="module")
def long_gguf(tmp_path_factory):
    config = tiny.Config(n_ctx=10752)
    path = tmp_path_factory.mktemp("models") / "long.gguf"
    return tiny.write(path, config, tiny.layout(config, seed=1))


@pytest.fixture(scope="module")
def marked(native, long_gguf):
    with File(long_gguf, native) as file:
        return Marked(Tokenizer(file.kv))


def conversation(marked, turns, first, each):
    """Yields the prompts of an agent's turns: calls of tools, and what they answer."""
    prompt = marked.message("system", first - 60, 1) + marked.message("user", 60, 2)
    for turn in range(turns):
        head = marked.message("assistant", 0, 0)
        yield tuple(prompt + head)
        prompt = prompt + head + marked.message("user", each - len(head), 3 + turn)


LENGTHS = st.lists(st.tuples(st.sampled_from(["user", "assistant"]), st.integers(0, 900)), max_size=40)


@examples(40)
@given(LENGTHS, LENGTHS, LENGTHS, st.integers(0, 40), st.sampled_from([256, 768, 1024, 2048]))
def test_prompts_that_begin_alike_are_cut_alike_where_cuts_change_bits(marked, same, one, other, torn, n_chunk):
    turns = Turns(marked, n_chunk, max(n_chunk, 2 * PAGE))

    def prompt(messages, seed):
        return sum((marked.message(role, n, seed) for role, n in messages), [])

    begin = prompt(same, 1)
    begin = begin[: max(len(begin) - torn, 0)]  # They part within a message.
    first, second = begin + prompt(one, 2), begin + prompt(other, 3)
    (ends, kept), (others, _) = turns.cut(first), turns.cut(second)
    alike = next((at for at, pair in enumerate(zip(first, second)) if pair[0] != pair[1]),  # noqa: B905
                 min(len(first), len(second)))  # fmt: skip
    for end in {*ends} & {*others}:
        if end <= alike:
            assert [at for at in ends if at <= end] == [at for at in others if at <= end]
    assert kept <= {*ends} and all(end % PAGE == 0 for end in ends)
    assert {*range(n_chunk, len(first) + 1, n_chunk)} <= {*ends}


@examples(60)
@given(LENGTHS)
def test_little_is_read_again_of_a_turn(marked, messages):
    """The next prompt of a conversation goes on where the answer begins."""
    head = marked.message("assistant", 0, 0)
    prompt = sum((marked.message(role, n, 1) for role, n in messages), []) + head
    ends, kept = Turns(marked, CHUNK, 64).cut(prompt)
    assert len(prompt) - max(kept, default=0) < 64
    assert ends == sorted(kept) and all(end % 64 == 0 for end in ends)
    _, kept = Turns(marked, CHUNK, CHUNK).cut(prompt)
    assert len(prompt) - max(kept, default=0) <= max(len(prompt) / LOST, PAGE) + len(head)


@pytest.mark.parametrize(("n_cut", "anywhere"), [(64, True), (128, True), (256, True), (512, False), (1024, False)])
def test_a_prompt_goes_on_anywhere_where_no_cut_changes_a_bit(marked, n_cut, anywhere):
    turns, prompt = Turns(marked, 1024, n_cut), PART[3] * 3
    ends, _ = turns.cut(prompt)
    assert ends == ([2430 // n_cut * n_cut] if anywhere else [1024, 2048])
    assert [turns.goes_on(at, ends) for at in (256, 512, 1024, 1280)] == [anywhere, anywhere, True, anywhere]
    assert bool(rule(n_cut)) is not anywhere, "files depend on where prompts are cut"


@pytest.mark.parametrize("n_cut", [64, 1024])
def test_no_place_is_within_an_image_that_is_read_whole(marked, n_cut):
    """It is one ahead of that, or behind it; within images that may be cut it stays where it is."""
    image = list(range(-2, -702, -1))
    prompt = [*PART[3][:300], *image, *marked.message("assistant", 0, 0), *PART[3][:200], *PART[3]]
    inside = range(301, 1000)
    for end in (600, 1050, 1300, len(prompt)):
        ends, kept = Turns(marked, 1024, n_cut, whole_images=True).cut(prompt[:end])
        assert not any(at in inside for at in (*ends, *kept)) and kept <= set(ends)
    cut, _ = Turns(marked, 1024, 64).cut(prompt[:600])
    assert cut == [576] and Turns(marked, 1024, 64, whole_images=True).cut(prompt[:600])[0] == [256]


class Replayed:
    """Is a client of `luce bench serve` that asks nobody and keeps the prompts that it would ask."""

    def __init__(self, marked, seed):
        self._rng, self.turn = np.random.default_rng(seed), [MARK, *marked.encode("assistant\n")]
        self.prompts = []

    def tokens(self, n):
        return self._rng.integers(33, 200, n).tolist()

    def complete(self, prompt, n):
        self.prompts.append(tuple(prompt))
        return Answered(0, 0, 0, n, 0, 0, 0)


def replayed(scheduler, talks, new=1):
    """Asks all conversations at once, each turn when the one before has ended. Returns for each turn after
    the first how many tokens of the prompt before were not read again, and how many that had."""
    events: queue.Queue = queue.Queue()
    talks, before, found = [iter(talk) for talk in talks], [0] * len(talks), []

    def go_on(n):
        if prompt := next(talks[n], ()):
            was, before[n] = before[n], len(prompt)
            request = Request(prompt, new, ignore_eos=True)
            scheduler.submit(Job(request, lambda happened: events.put((n, was, happened[-1]))))
        return bool(prompt)

    running = sum([go_on(n) for n in range(len(talks))])
    while running:
        n, was, last = events.get(timeout=HANG_S)
        assert not isinstance(last, Failed), last
        if isinstance(last, Finished):
            found += [(last.cached, was)] if was else []
            running -= not go_on(n)
    return found


@pytest.mark.parametrize(
    ("n_chunk", "slots", "talks", "how"),
    [
        (1024, 4, 4, {}),  # luce serve takes these on a GPU.
        *deeper((1024, 4, 4, {"n_cut": 1024})),  # Its weights are of types that ggml multiplies.
        *deeper((2048, 4, 4, {})),
        (4096, 1, 1, {"n_pages": 119}),  # There is no page more than the longest prompt has, and one.
        *deeper((2048, 4, 8, {"host_bytes": 1 << 40})),  # Half of them have room on the device.
    ],
    ids=str,
)
def test_benchmarks_conversations_read_little_of_a_turn_again(marked, n_chunk, slots, talks, how):
    """They have 20 turns, up to 30000 tokens. Where cuts change bits a twentieth may be read again. What is not
    computed here has the bits of a cold prompt, as the last test says."""
    prompts = []
    for seed in range(talks):
        client = Replayed(marked, seed)
        assert len(list(conversation_of_bench(client, "", 20, 30000, 1))) == 21
        prompts.append(client.prompts)
    engine = PaperEngine(marked, 32768, slots, 16, n_chunk, how.get("n_pages"), how.get("n_cut", 128))
    cache = PrefixCache(engine, marked, how.get("host_bytes", 0))
    scheduler = Scheduler(engine, cache)
    found = replayed(scheduler, prompts)
    assert len(found) == 19 * talks
    most = (lambda was: was / LOST) if "n_cut" in how else (lambda was: 127)
    assert all(was - cached <= most(was) for cached, was in found)
    scheduler.close()
    assert not any(line.is_open and not line.is_checkpoint for line in engine.lines)
    cache.close()
    assert engine.info.pages_free == engine.info.n_pages


@pytest.fixture
def copied(monkeypatch):
    """Gives the numbers of tokens that checkpoints had as they were copied to host memory."""
    found, to_host = [], PaperLine.to_host

    def counted(line):
        found.append(line.n_past)
        to_host(line)

    monkeypatch.setattr(PaperLine, "to_host", counted)
    return found


def test_a_conversation_behind_long_prompts_copies_little_to_the_host(marked, copied):
    """Two prompts fill the pages before it. What is copied is their last beginnings, and hardly any of its own."""
    client, engine = Replayed(marked, 1), PaperEngine(marked, 30976, 1, 8, 2048, 242)
    assert len(list(conversation_of_bench(client, "", 20, 30000, 1))) == 21
    cache = PrefixCache(engine, marked, 1 << 40)
    scheduler, rng = Scheduler(engine, cache), np.random.default_rng(5)
    before = [tuple(int(token) for token in rng.integers(33, 90, n)) for n in (30000, 30720)]
    replayed(scheduler, [before])
    first = sum(copied)
    assert first < 4 * 30720
    found = replayed(scheduler, [client.prompts])
    assert all(was - cached <= 127 for cached, was in found)
    assert sum(copied) - first < 2.5 * 30720
    scheduler.close()
    cache.close()


def test_what_leaves_for_the_next_prompt_leaves_behind_an_answer(marked, copied):
    """A prompt that finds pages takes them. What the last one had stays, however little it saves."""
    engine = PaperEngine(marked, 30976, 1, 8, 2048, 246)
    cache = PrefixCache(engine, marked, 1 << 40)
    scheduler, rng = Scheduler(engine, cache), np.random.default_rng(6)
    long, last = (tuple(int(token) for token in rng.integers(33, 90, n)) for n in (30000, 30720))
    replayed(scheduler, [[long, last]])
    until(lambda: engine.info.pages_free >= 2 * 2048 // PAGE, "pages are free for two passes over the next prompt")
    assert any(len(kept.tokens) == 30720 and kept.on_device for kept in cache._kept)
    scheduler.close()
    cache.close()


def test_a_turn_is_read_in_one_pass_and_its_tail(marked, monkeypatch):
    """It goes on behind what the last turn kept, and is cut at its own end alone."""
    client, engine = Replayed(marked, 1), PaperEngine(marked, 32768, 1, 16, 2048, n_cut=128)
    assert len(list(conversation_of_bench(client, "", 20, 30000, 1))) == 21
    cache, read, sizes = PrefixCache(engine, marked), engine.prefill, list[int]()

    def counted(items):
        sizes.extend(len(item.tokens) for item in items)
        return read(items)

    monkeypatch.setattr(engine, "prefill", counted)
    scheduler = Scheduler(engine, cache)
    replayed(scheduler, [client.prompts])
    scheduler.close()
    cache.close()
    tails = [len(prompt) % 128 for prompt in client.prompts]
    assert [size for size in sizes if size % 128] == tails, "each has one"
    assert len(sizes) == 6000 // 2048 + 1 + 19 + 20


def test_an_answers_end_is_told_ahead_of_all_that_waits_for_its_last_round(marked, monkeypatch):
    """To say what is free the core waits for a GPU's round that was begun for who has ended meanwhile."""
    happened, close = list[str](), PaperLine.close

    class Asked(PaperEngine):
        @property
        def info(self):
            happened.append("asked")
            return super().info

    monkeypatch.setattr(PaperLine, "close", lambda line: (happened.append("closed"), close(line)))
    engine = Asked(marked, 1024, 1, 0, 512)
    scheduler = Scheduler(engine, hand_over=lambda jobs: (happened.append("told"), put_all(jobs)))
    replayed(scheduler, [[tuple(range(33, 133))]], new=3)
    scheduler.close()
    assert happened[happened.index("closed") :][:3] == ["closed", "told", "asked"]


def test_nothing_leaves_for_the_next_checkpoint_ahead_of_a_first_token(marked, monkeypatch):
    """All places on the device are taken. A first token is told before a beginning leaves for the next prompt's."""
    engine, happened = PaperEngine(marked, 8192, 1, 8, 2048), list[str]()
    cache, to_host = PrefixCache(engine, marked, 1 << 40), PaperLine.to_host
    monkeypatch.setattr(PaperLine, "to_host", lambda line: (happened.append("left"), to_host(line)))
    monkeypatch.setattr(cache, "fetch", lambda prompt, wait: (happened.append("begun"), True)[1])

    def tell(jobs):
        events = sum(jobs.values(), [])
        happened.extend("first" for each in events if isinstance(each, Prefilled) and each.done == each.total)
        put_all(jobs)

    scheduler = Scheduler(engine, cache, hand_over=tell)
    prompts = [(33 + n, *range(33, 133)) * 4 for n in range(12)]
    replayed(scheduler, [prompts])
    scheduler.close()
    cache.close()
    each = " ".join(happened).split("begun")[1:]
    assert [prompt.split() for prompt in each] == [["first"]] * 7 + [["first", "left"]] * 5


# Prompts that begin alike, by the parts that they are made of.
TREE = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=5), min_size=1, max_size=14)
SMALL = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=3), min_size=1, max_size=6)
PART = [np.random.default_rng(n).integers(33, 200, 300 + 170 * n).tolist() for n in range(4)]


def prompts_of(parts, talk=0):
    return [tuple([MARK, 33 + talk, *(token for part in each for token in PART[part])]) for each in parts]


@examples(40)
@given(
    parts=TREE,
    checkpoints=st.integers(1, 5),
    host_bytes=st.sampled_from([0, 100_000, 1 << 30]),
    n_pages=st.integers(16, 40),  # The longest prompt has 16.
)
@example(parts=[[0, 1], [0, 1, 2], [0, 1, 2, 3], [0, 1, 3]], checkpoints=3, host_bytes=0, n_pages=40)
def test_each_beginning_knows_the_one_before(marked, parts, checkpoints, host_bytes, n_pages):
    """Whatever is kept, moved and evicted, the beginnings form a tree, its pages are counted and its
    bytes are bounded."""
    engine = PaperEngine(marked, 8192, 1, checkpoints, 512, n_pages)
    cache = PrefixCache(engine, marked, host_bytes)
    for prompt in prompts_of(parts):
        line, tokens = PaperLine(engine), np.asarray(prompt, np.int32)
        at = cache.resume(line, prompt)
        assert at == line.n_past < len(prompt)
        while at < len(prompt):
            end = min(next((end for end in cache.ends(line) if at < end), len(prompt)), at + 512)
            cache.free_pages(-(-end // PAGE) - len(line.pages))
            line.prefill(tokens[at:end])
            if end in cache.ends(line):
                cache.reached(line)
            at = end
        kept = cache._kept
        for one in kept:
            begun = [each for each in kept if tuple(one.tokens[: len(each.tokens)]) == tuple(each.tokens)]
            begun.sort(key=lambda each: len(each.tokens))
            assert begun[-1] is one and one.shorter is (begun[-2] if begun[1:] else None)
            assert one.checkpoint.on_device == one.on_device
            below = {id(each) for each in kept if each.shorter is one}
            assert len(below) == len(one.longer) and below == {*map(id, one.longer)}
        sizes = cache.sizes()
        assert sizes["device"][0] <= checkpoints and sizes["host"][1] <= host_bytes
        line.close()
    cache.close()
    assert not engine.lines


@pytest.mark.long
@examples(12)
@given(
    st.lists(SMALL, min_size=1, max_size=4), st.integers(1, 3), st.sampled_from([0, 1, 300, None]),
    st.sampled_from([512, 2048]), st.sampled_from([0, 1 << 30]), st.integers(0, 12),
)  # fmt: skip
def test_a_request_that_runs_never_lacks_a_page(marked, talks, slots, new, n_chunk, host_bytes, spare):
    """There is room for one request's longest text and a few pages, and each request ends well."""
    engine = PaperEngine(marked, 2560, slots, 4, n_chunk, 2560 // PAGE + spare)
    cache = PrefixCache(engine, marked, host_bytes)
    scheduler = Scheduler(engine, cache)
    replayed(scheduler, [prompts_of(parts, n) for n, parts in enumerate(talks)], new)
    scheduler.close()
    cache.close()
    assert not engine.lines


@pytest.mark.long
def test_the_core_keeps_what_was_counted(long_gguf, marked):
    options = Options(device="cpu", threads=1, spec="off", ctx=10752, chunk=CHUNK, checkpoints=4)
    with Engine.open(long_gguf, options) as engine:
        cache = PrefixCache(engine.native, marked)
        scheduler = Scheduler(engine, cache)
        found = replayed(scheduler, [conversation(marked, 8, 5200, 260)])
        assert len(found) == 7 and all(was - cached < 128 for cached, was in found)
        scheduler.close()
        cache.close()


def test_a_turn_that_is_resumed_has_the_bits_of_a_cold_one(native, long_gguf, marked):
    sizes = {"n_ctx": 4096, "n_sequences": 2, "n_checkpoints": 4, "n_chunk": CHUNK}
    with open_model(native, long_gguf) as model, open_engine(model, **sizes) as engine:
        warm, resumed = PrefixCache(engine, marked), []
        with engine.sequence() as one, engine.sequence() as other:
            for prompt in conversation(marked, 5, 1500, 330):
                resumed.append(read(warm, one, prompt))
                cold = PrefixCache(engine, marked)
                assert read(cold, other, prompt) == 0
                assert one.dump() == other.dump()
                cold.close()
        assert resumed[0] == 0 and any(at % CHUNK for at in resumed)
        warm.close()


def test_a_prompts_end_is_kept_behind_its_first_token_and_ahead_of_its_next_round(marked, monkeypatch):
    """A checkpoint holds up who waits for the first token by 1 ms on an H200. Also where that is the last one."""
    engine, happened = PaperEngine(marked, 8192, 1, 8, 2048, n_cut=128), list[str]()
    cache, checkpoint, verified = PrefixCache(engine, marked), PaperLine.checkpoint, engine.verified
    monkeypatch.setattr(PaperLine, "checkpoint", lambda line: (happened.append("kept"), checkpoint(line))[1])
    monkeypatch.setattr(engine, "verified", lambda rows: (happened.append("round"), verified(rows))[1])

    def tell(jobs):
        events = sum(jobs.values(), [])
        happened.extend("first" for each in events if isinstance(each, Prefilled) and each.done == each.total)
        put_all(jobs)

    scheduler = Scheduler(engine, cache, hand_over=tell)
    replayed(scheduler, [[tuple(range(33, 161)) * 2]], new=3)
    assert happened[:3] == ["first", "kept", "round"]
    happened.clear()
    replayed(scheduler, [[tuple(range(34, 162)) * 2]], new=1)
    assert sorted(happened) == ["first", "kept"] and cache.sizes()["device"][0] == 2
    scheduler.close()
    cache.close()


def test_who_is_admitted_behind_a_first_token_starts_from_what_is_kept_there(marked):
    engine, cached = PaperEngine(marked, 8192, 2, 8, 2048, n_cut=128), queue.Queue()
    cache, prompt = PrefixCache(engine, marked), tuple(range(33, 161)) * 2

    def job(number):
        return Job(
            Request(prompt * number, 9, ignore_eos=True),
            lambda events: [cached.put((number, each.cached)) for each in events if isinstance(each, Finished)],
        )

    def tell(jobs):
        put_all(jobs)
        if any(isinstance(each, Prefilled) for each in sum(jobs.values(), [])) and not second:
            second.append(job(2))
            scheduler.submit(second[0])

    second: list[Job] = []
    scheduler = Scheduler(engine, cache, hand_over=tell)
    scheduler.submit(job(1))
    assert dict(cached.get(timeout=HANG_S) for _ in range(2)) == {1: 0, 2: 256}
    scheduler.close()
    cache.close()


def test_an_engine_by_itself_keeps_a_prompts_end_too(native, long_gguf):
    options, prompt = Options(ctx=2048, spec="off", checkpoints=2, threads=1), tuple(range(33, 161)) * 2
    with Files(long_gguf, device="cpu") as files, Engine.open(files, options) as engine:
        cache = PrefixCache(engine.native, engine.tokenizer)
        for tokens, cached in ((prompt, 0), (prompt * 2, 256)):
            *_, last = engine.generate(Request(tokens, 3, ignore_eos=True), prefixes=cache)
            assert last.cached == cached
        cache.close()
