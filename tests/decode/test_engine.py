"""Opens engines on real models: one generation and many, with the same tokens."""

import ast
from dataclasses import replace

import pytest
import tiny
from box_model import GGUF, PROMPTS
from checkout import ROOT

from luce import native as _native
from luce.decode.engine import Engine
from luce.decode.events import Failed, Finished, Started, Tokens
from luce.decode.request import Request
from luce.errors import Cancelled, ContextFull, NumericError, OutOfMemory, StateError, UnsupportedError
from luce.native import File
from luce.native.structs import Cost, Sampling
from luce.planning.opened import Files
from luce.planning.plan import MAX_GAMMA, Options

OPTIONS = Options(ctx=128, threads=1)
CONFIG = tiny.Config(n_nextn=1)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """Makes a tiny model with a head."""
    return tiny.write(tmp_path_factory.mktemp("engine") / "x.gguf", CONFIG, tiny.layout(CONFIG, 1))


@pytest.fixture(scope="module")
def files(native, path, device):
    with Files(path, device=device) as files:
        yield files


def ask(at, n=24, **more):
    return Request(tuple(range(20 + at, 24 + 3 * at)), n, ignore_eos=True, **more)


def tokens(engine, request):
    last = list(engine.generate(request))[-1]
    assert isinstance(last, Finished), last
    return last.tokens


def test_a_path_is_enough(native, path, device):
    with Engine.open(path, replace(OPTIONS, device=device)) as engine:
        events = list(engine.generate(Request((1, 2, 3), 5)))
    assert events[0] == Started(3) and isinstance(events[-1], Finished)
    with pytest.raises(StateError):
        engine.native.sequence()


def test_costs_are_of_all_widths_that_a_round_may_have(files):
    with Engine.open(files, replace(OPTIONS, spec="mtp", gamma=3)) as engine:
        assert all(engine.costs.verify(rows) > 0 for rows in range(1, 5)) and engine.costs.draft() > 0
    with Engine.open(files, replace(OPTIONS, spec="off")) as engine:
        assert engine.costs.verify(1) > 0 and engine.costs.draft() == 0


@pytest.mark.parametrize(("dear", "mode"), [(3.0, "plain"), (1.05, "auto")])
def test_auto_is_plain_where_no_draft_can_pay(files, monkeypatch, dear, mode):
    """A plain engine keeps no head's caches, so it is opened without where steps of two rows are too dear."""
    steps = [Cost(1, 0, 1.0), Cost(2, 0, dear), Cost(1, 1, 0.1)]
    monkeypatch.setattr(_native.Engine, "costs", lambda self: steps)
    first = files.plan(Options(spec="auto", ctx=512))
    with Engine.open(files, first) as engine:
        assert first.draft.mode == "auto" and (engine.plan is first) == (mode == "auto")
        assert engine.plan.draft.mode == mode
        assert engine.info.n_draft == (0 if mode == "plain" else MAX_GAMMA)
        assert ("no draft can pay" in engine.plan.reasons["draft"]) == (mode == "plain")


@pytest.mark.parametrize("ahead", [False, True], ids=["in turn", "ahead"])
@pytest.mark.parametrize("asked", [{"spec": "off"}, {"gamma": 2}, {"spec": "auto"}], ids=str)
def test_many_give_the_tokens_that_each_gives_alone(files, asked, ahead):
    """There are more of them than sequences, greedy and sampled. Rounds are begun ahead, as on a GPU."""
    requests = [ask(at, 12 + 3 * at) for at in range(4)]
    requests += [ask(at, 16, sampling=Sampling(temperature=1.5, seed=at)) for at in range(3)]
    with Engine.open(files, replace(OPTIONS, spec="off")) as engine:
        alone = [tokens(engine, request) for request in requests]
    with Engine.open(files, replace(OPTIONS, sequences=3, **asked)) as engine:
        engine.native.ahead = ahead
        found = {}
        emitted = {at: [] for at in range(len(requests))}
        for at, event in engine.run(requests):
            assert at not in found, "nothing comes after the end"
            if isinstance(event, Tokens):
                emitted[at] += event.ids
            if isinstance(event, Finished | Failed):
                found[at] = event
        assert engine.native.info.sequences_free == 3
        assert engine.native.info.pages_free == engine.native.info.n_pages
    assert [len(found[at].tokens) for at in range(7)] == [request.max_tokens for request in requests]
    assert [list(found[at].tokens) for at in range(7)] == list(emitted.values())
    assert [found[at].tokens for at in range(7)] == alone


@pytest.fixture
def ahead(monkeypatch):
    """Lets engines begin steps ahead on every device."""
    opened = _native.Engine.__init__

    def init(self, *args):
        opened(self, *args)
        self.ahead = True

    monkeypatch.setattr(_native.Engine, "__init__", init)


@pytest.mark.parametrize("failing", ["prefill", "begin", "wait", "verify"])
def test_an_engine_that_auto_drafts_in_decodes_nothing_until_it_is_asked(files, ahead, failing, monkeypatch):
    """What rounds take is seen in the rounds of texts, so the opening cannot fail in a round of its own."""

    def fail(*_):
        raise NumericError("not finite")

    with monkeypatch.context() as patch:
        patch.setattr(_native.Engine, failing, fail)
        engine = Engine.open(files, replace(OPTIONS, spec="auto"), keep_drafters=True)
    with engine:
        assert engine.native.info.sequences_free == engine.native.info.n_sequences
        assert engine.native.info.pages_free == engine.native.info.n_pages
        assert len(tokens(engine, ask(1))) == 24


@pytest.mark.parametrize("ahead", [False, True], ids=["in turn", "ahead"])
@pytest.mark.parametrize("gamma", [0, 2])
def test_an_engine_is_usable_after_any_end(files, gamma, ahead):
    with Engine.open(files, replace(OPTIONS, gamma=gamma)) as engine:
        engine.native.ahead, request = ahead, ask(1)
        expected = tokens(engine, request)
        too_long = list(engine.generate(Request((1,) * 129, 5)))
        assert isinstance(too_long[-1].error, ContextFull)
        assert list(engine.generate(request, lambda: True))[-1].reason == "cancelled"
        abandoned = engine.generate(request)
        next(abandoned)
        abandoned.close()
        engine.cancel()
        assert tokens(engine, request) == expected
        running = engine.generate(request)
        while not isinstance(next(running), Tokens):
            pass
        engine.cancel()
        assert list(running)[-1].reason == "cancelled"
        assert tokens(engine, request) == expected


def test_sequences_that_are_all_in_use_are_one_failed_event(files):
    with Engine.open(files, OPTIONS) as engine:
        running = engine.generate(ask(0))
        next(running)
        (failed,) = engine.generate(ask(1))
        assert isinstance(failed.error, OutOfMemory)
        assert isinstance(list(running)[-1], Finished)


def test_a_full_context_says_so(files):
    with Engine.open(files, OPTIONS) as engine:
        last = list(engine.generate(replace(ask(0), max_tokens=None)))[-1]
    assert (last.reason, last.truncated_by, len(last.tokens)) == ("length", "context", 128 - 4 + 1)


def test_what_cannot_be_opened_leaves_nothing_open(files, path, tiny_gguf, device):
    with pytest.raises(UnsupportedError):
        Engine.open(tiny_gguf, replace(OPTIONS, spec="mtp", device=device))
    with pytest.raises(Cancelled):
        Engine.open(files, OPTIONS, lambda part: True)
    with Engine.open(files, OPTIONS) as engine:
        assert len(tokens(engine, ask(0))) == 24
    with File(path) as file:
        assert file.info.n_tensors > 0


def test_a_head_of_another_file(files, path, tiny_gguf, device, tmp_path):
    head = tiny.write(tmp_path / "head.gguf", CONFIG, tiny.head_only(CONFIG, tiny.layout(CONFIG, 1)))
    with Engine.open(files, replace(OPTIONS, gamma=2)) as engine:
        embedded = [event for event in engine.generate(ask(2))][-1]
    with Files(path, head, device) as both, Engine.open(both, replace(OPTIONS, gamma=2)) as engine:
        assert engine.plan.draft.head == "separate"
        separate = [event for event in engine.generate(ask(2))][-1]
        assert separate.tokens == embedded.tokens
        assert separate.stats.rounds_by_drafts == embedded.stats.rounds_by_drafts
    with Engine.open(Files(tiny_gguf, device=device), OPTIONS) as engine:
        assert engine.info.n_draft == 0


def test_drafts_of_the_box_are_accepted(native, device):
    options = Options(ctx=256, threads=1, gamma=2, sequences=4)
    with Files(GGUF, device=device) as files, Engine.open(files, options) as engine:
        requests = [Request(tuple(files.tokenizer.encode(text)), 40) for text in PROMPTS[:6]]
        ended = [event for _, event in engine.run(requests) if isinstance(event, Finished)]
    assert len(ended) == 6
    drafted, accepted = (sum(getattr(e.stats, name) for e in ended) for name in ("drafted", "accepted"))
    assert accepted > 0.3 * drafted > 0


def test_engines_of_one_loaded_model_are_opened_alike(files):
    """Each pays for what its own plan needs: plain steps beside a drafting engine keep no head's caches."""
    drafting, plain = (files.plan(replace(OPTIONS, spec=spec, rows=9)) for spec in ("mtp", "off"))
    with files.load([plain, drafting]) as model:
        one = Engine.open(files, drafting, model=model)
        with one, Engine.open(files, plain, model=model) as other:
            assert one.plan == drafting and other.plan == plain
            assert (one.info.n_rows, other.info.n_rows) == (9, 9)
            assert tokens(one, ask(1)) == tokens(other, ask(1))
            assert one.costs.draft() > 0 and other.costs.draft() == 0
        assert model.info.n_vocab > 0  # Closing engines leaves the model open that they shared.


def test_every_engine_is_opened_through_engine_open():
    """One place of the package loads weights, and one makes engines. `luce doctor` holds the core itself to account."""
    calls = set()
    for path in (path for folder in ("luce", "bench") for path in (ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())) if "doctor" not in path.parts else ():
            called = node.func if isinstance(node, ast.Call) else None
            name = getattr(called, "id", getattr(called, "attr", ""))
            if name == "Engine" or (name == "Model" and path.is_relative_to(ROOT / "luce")):
                calls.add((name, path.relative_to(ROOT).as_posix()))
    calls.remove(("Model", "luce/model/model.py"))  # That is the public Model, on what is opened.
    assert calls == {("Engine", "luce/decode/engine.py"), ("Model", "luce/planning/opened.py")}
