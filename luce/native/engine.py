"""Has the working memory of a model, its timelines, and the positions that they can start from."""

from __future__ import annotations

import collections.abc
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from luce.errors import ArgumentError, NumericError, StateError
from luce.native.files import Model, engine_params
from luce.native.library import Handle, IntArray, Library, Lists
from luce.native.structs import (
    CheckpointInfo,
    Cost,
    DrafterInfo,
    EngineInfo,
    EngineParams,
    Form,
    Logprobs,
    Penalties,
    Sampling,
    SequenceInfo,
    Source,
    first,
)

if TYPE_CHECKING:
    import numpy as np


class Drafts(NamedTuple):
    """Asks for n drafts after the anchor of a sequence: a chain, or the first n of a block. `source` is a drafter's
    index in the engine's list, or what it is: the first one there that is this."""

    sequence: Sequence
    anchor: int
    n: int
    source: Source | int = Source.NEXTN


class ExpertMove(NamedTuple):
    """Expert `expert` of the layer-th of n_expert_layers is to have this slot."""

    layer: int
    expert: int
    slot: int


# What the anchor of Rows without tokens may be, beside a token: that of the sequence's last draft, whose first
# n - 1 drafts follow it, or what the round ahead chooses.
DRAFTED, CHOSEN = -2, -1


class Rows(NamedTuple):
    """The rows of one sequence in a round: `tokens` with their `parents` (None for a chain). Where tokens is
    None they are the `anchor` and n - 1 drafts, which never left the device: `source`, as in Drafts, drafts them
    after a token or CHOSEN."""

    sequence: Sequence
    tokens: IntArray | None = None
    parents: IntArray | None = None
    n: int = 0
    anchor: int = DRAFTED
    source: Source | int = Source.NEXTN

    @property
    def width(self) -> int:
        """Returns the number of rows."""
        return max(self.n, 0) if self.tokens is None else len(self.tokens)


class ImageSpan(NamedTuple):
    """`rows` F32 (n, n_embd) of an image of `height` x `width` rows, from its row `first` on, which stand for the
    tokens `at`, .. `at` + n - 1 of a prompt (luce.h: luce_image_span)."""

    rows: np.ndarray
    at: int
    first: int
    height: int
    width: int


class Prompt(NamedTuple):
    """The next `tokens` (n,) of a sequence's prompt, n >= 1, at most a chunk: the `last` ones, or more follow. Those
    below -1 are names of rows of `images`. Of each (at, n) of `gaps` n positions are left out ahead of token `at`, in
    engines of such params."""

    sequence: Sequence
    tokens: IntArray
    last: bool = True
    images: tuple[ImageSpan, ...] = ()
    gaps: tuple[tuple[int, int], ...] = ()


class Verified(NamedTuple):
    """These are the results of a sequence's n rows: their own `tokens` (n,), of which -1 is a draft whose
    drafter's logits were not finite, and the target's `choices` after each of them (n,)."""

    tokens: list[int]
    choices: list[int]


class _Results:
    """What the core writes of a round whose items have `widths` rows."""

    def __init__(self, library: Library, widths: list[int]):
        new, self.library, self.widths = library.ffi.new, library, widths
        self.rows = sum(widths)
        self.choices, self.tokens = new("int32_t[]", self.rows), new("int32_t[]", self.rows)
        self.statuses = new("luce_status[]", len(widths))

    def read(self, status: int) -> list[Verified | NumericError]:
        """Returns the results of each item, of a call that returned `status`. Raises what failed all of it."""
        failed, unpack = status == NumericError.code, self.library.ffi.unpack
        if not failed:
            self.library.check(status)
        message = self.library.text(self.library.lib.luce_last_error()) if failed else ""
        choices, tokens, at = unpack(self.choices, self.rows), unpack(self.tokens, self.rows), 0
        results: list[Verified | NumericError] = []
        for n, own in zip(self.widths, self.statuses, strict=True):
            done = slice(at, at + n)
            results.append(Verified(tokens[done], choices[done]) if own == 0 else NumericError(message))
            at += n
        return results


class Engine(Handle):
    """This is the working memory of a model: KV pages, recurrent slots, buffers and ready graphs. Calls on
    one engine, its sequences and its checkpoints wait for each other, but for cancel() and for saving and
    loading checkpoints."""

    def __init__(self, model: Model, params: EngineParams | None = None):
        library = model.library
        made = engine_params(library, params or EngineParams(), [each.kind for each in model.info.drafters])
        out = library.ffi.new("luce_engine **")
        library.check(library.lib.luce_engine_open(out, model.handle, made.struct))
        super().__init__(library, out[0], library.lib.luce_engine_close)
        self.n_vocab, self.n_embd = model.info.n_vocab, model.info.n_embd
        # The device works while the host does something else, where that computes no experts.
        self.ahead = not model.info.device.startswith("cpu") and not model.cpu_experts
        self._begun: list[list[int]] = []  # The rows of the rounds that were begun, by item.
        # It is looked up now, since cffi locks to do it, and a signal handler may have interrupted who holds
        # that lock.
        self._cancel = library.lib.luce_engine_cancel

    @property
    def info(self) -> EngineInfo:
        get_info = self.library.lib.luce_engine_get_info
        return self.library.read(EngineInfo, get_info, self.handle, drafters=self.drafters)

    @cached_property
    def drafters(self) -> tuple[DrafterInfo, ...]:
        """Returns the engine's list of drafters."""
        lib, read = self.library.lib, self.library.read
        n = read(EngineInfo, lib.luce_engine_get_info, self.handle).n_drafters
        return tuple(read(DrafterInfo, lib.luce_engine_get_drafter, self.handle, index) for index in range(n))

    def _index(self, source: Source | int) -> int:
        if not isinstance(source, Source):
            return source
        if (index := first(self.drafters, source)) is None:
            lacks = {Source.NEXTN: "n_draft", Source.DFLASH: "blocks", Source.PART: "n_part"}[source]
            raise StateError(f"the engine was opened without drafts of this source ({lacks} 0)")
        return index

    def costs(self) -> list[Cost]:
        """Returns what steps took when the engine was opened, of the first drafter of each Source."""
        costs, n = self.library.lib.luce_engine_costs, self.library.ffi.new("uint32_t *")
        self.library.check(costs(self.handle, self.library.ffi.NULL, n))
        listed = self.library.ffi.new("luce_cost[]", n[0])
        self.library.check(costs(self.handle, listed, n))
        steps = {0: 0, 1 + len(self.drafters): 1 + len(Source)}  # To the numbers of Cost.
        steps |= {1 + at: 1 + source for source in Source if (at := first(self.drafters, source)) is not None}
        return [Cost(cost.rows, steps[cost.step], cost.seconds) for cost in listed[0 : n[0]] if cost.step in steps]

    def experts(self) -> list[tuple[list[int], list[int]]]:
        """Returns for each of n_expert_layers, of each expert, how often rows of steps have had it, modulo 2**32, and
        its slot, or -1 where it is read in host memory."""
        layers, each = self._experts
        counts, slots = (self.library.ffi.new("int32_t[]", layers * each or 1) for _ in range(2))
        self.library.check(self.library.lib.luce_engine_get_experts(self.handle, counts, slots, layers * each))
        return [(list(counts[at : at + each]), list(slots[at : at + each])) for at in range(0, layers * each, each)]

    def move_experts(self, moves: collections.abc.Sequence[ExpertMove]) -> None:
        """Gives slots to experts that have none, in place of those that had them. No bit of any step depends on it.
        Raises DeviceError where a copy failed: an expert of the moves has its new slot or is read in host memory, and
        who had such a slot is read there."""
        made = self.library.ffi.new("luce_expert_move[]", [tuple(move) for move in moves] or 1)
        self.library.check(self.library.lib.luce_engine_move_experts(self.handle, made, len(moves)))

    @cached_property
    def _experts(self) -> tuple[int, int]:
        info = self.info
        return info.n_expert_layers, info.n_experts

    def cancel(self) -> None:
        """Makes the prefill, draft or verify that runs now, or else the next one, raise Cancelled. It may be
        called from any thread and from a signal handler; a closed engine ignores it."""
        if self.is_open:
            self._cancel(self._pointer)

    def sequence(self) -> Sequence:
        """Opens an empty timeline. Raises OutOfMemory where n_sequences are open."""
        return Sequence(self)

    def prefill(self, items: collections.abc.Sequence[Prompt]) -> list[int | None | NumericError]:
        """Commits the next tokens of several sequences' prompts, in as few steps as they fit: LUCE_MAX_ROWS sequences.
        Returns for each item the choice after the last ones of its prompt, None where more follow, or the error of a
        sequence whose logits were not finite. Other errors name the first item that is to blame, and did nothing."""
        new, tokens = self.library.ffi.new, [self.library.ints(item.tokens) for item in items]
        made = new("luce_prompt_item[]", max(len(items), 1))
        for struct, item, rows in zip(made, items, tokens, strict=False):
            struct.sequence, struct.tokens, struct.n, struct.last = item.sequence.handle, rows, len(rows), item.last
        kept = [self._spans(struct, item.images) for struct, item in zip(made, items, strict=False) if item.images]
        for struct, item in zip(made, items, strict=False):
            if item.gaps:
                kept.append(gaps := new("luce_gap[]", item.gaps))
                struct.gaps, struct.n_gaps = gaps, len(item.gaps)
        choices, statuses = new("int32_t[]", len(items)), new("luce_status[]", len(items))
        status = self.library.lib.luce_engine_prefill(self.handle, made, len(items), choices, statuses)
        del kept
        done = [choice if item.last else None for item, choice in zip(items, choices, strict=True)]
        if status != NumericError.code:
            self.library.check(status)
            return list(done)
        message = self.library.text(self.library.lib.luce_last_error())
        return [NumericError(message) if own else choice for own, choice in zip(statuses, done, strict=True)]

    def finish_prompts(self) -> None:
        """Waits for passes over prompts that a GPU may still work on: prefill() waits for those alone that
        end a prompt. Raises DeviceError where one of them failed."""
        self.library.check(self.library.lib.luce_engine_finish_prompts(self.handle))

    def _spans(self, struct: Any, images: tuple[ImageSpan, ...]) -> Any:
        """Writes a prompt item's images, and returns what they point to."""
        import numpy as np

        made = self.library.ffi.new("luce_image_span[]", len(images))
        rows = [np.ascontiguousarray(image.rows, np.float32) for image in images]
        buffers = [self.library.ffi.from_buffer("float[]", each) for each in rows]
        for span, image, each, buffer in zip(made, images, rows, buffers, strict=True):
            span.rows, (span.n, span.n_embd) = buffer, each.shape
            span.at, span.first, span.height, span.width = image[1:]
        struct.images, struct.n_images = made, len(images)
        return made, rows, buffers

    def draft(self, items: collections.abc.Sequence[Drafts]) -> None:
        """Drafts a chain after the anchor of each of several sequences, all with one source. The drafts stay
        on the device: Rows without tokens verify them, and Sequence.drafted reads them. What is committed
        does not change."""
        indexes = {self._index(item.source) for item in items} or {0}
        if len(indexes) > 1:
            raise ArgumentError("the drafts of one call come from one source")
        made = self.library.ffi.new("luce_draft_item[]", max(len(items), 1))
        for struct, item in zip(made, items, strict=False):
            struct.sequence, struct.n = item.sequence.handle, max(item.n, 0)
            try:
                struct.anchor = item.anchor
            except OverflowError:
                raise ArgumentError(f"{item.anchor} does not fit into 32 bits") from None
        self.library.check(self.library.lib.luce_engine_draft(self.handle, indexes.pop(), made, len(items)))

    def verify(self, items: collections.abc.Sequence[Rows]) -> list[list[int] | NumericError]:
        """Runs one forward over the rows of several sequences, LUCE_MAX_ROWS in all. Returns for each item
        the target's choice after each row (n,), or the error of a sequence whose logits were not finite."""
        return [each.choices if isinstance(each, Verified) else each for each in self.verified(items)]

    def verified(self, items: collections.abc.Sequence[Rows]) -> list[Verified | NumericError]:
        """Runs the same step, and returns the tokens of its rows too."""
        widths = [item.width for item in items]
        made, _kept = self._made(items, widths)
        results, verify = _Results(self.library, widths), self.library.lib.luce_engine_verify
        self._begun = []
        status = verify(self.handle, made, len(items), results.choices, results.tokens, results.rows, results.statuses)
        return results.read(status)

    def begin(self, items: collections.abc.Sequence[Rows]) -> None:
        """Begins a round, whose results wait() returns. Those of earlier ones are dropped.

        Where all anchors are CHOSEN, in the order of the round ahead, it goes on from that one instead: it
        commits the rows that the choices there accept. It is on the device at once where both rounds have one row
        of each sequence. Else the wait for the round ahead begins it, unless something stands in the way, such as
        logits that are not finite, pages or a context that run out, or a cancel: under_way then tells that it is
        gone."""
        widths = [item.width for item in items]
        made, _kept = self._made(items, widths)
        if not any(item.tokens is None and item.anchor == CHOSEN for item in items):
            self._begun = []
        self.library.check(self.library.lib.luce_engine_begin(self.handle, made, len(items)))
        self._begun.append(widths)

    @property
    def under_way(self) -> int:
        """Returns how many rounds can be waited for."""
        return len(self._begun)

    def wait(self) -> list[Verified | NumericError]:
        """Returns the results of the first round that was begun, as verified() does."""
        if not self._begun:
            raise StateError("there is nothing to wait for: begin a round")
        results, left = _Results(self.library, self._begun.pop(0)), self.library.ffi.new("uint32_t *")
        status = self.library.lib.luce_engine_wait(
            self.handle, results.choices, results.tokens, results.rows, results.statuses, len(results.widths), left
        )
        del self._begun[left[0] :]  # What was to go on from this one may be dropped.
        return results.read(status)

    def _made(self, items: collections.abc.Sequence[Rows], widths: list[int]) -> tuple[Any, list[Any]]:
        """Returns items as luce_round_item[], and what they point to."""
        made = self.library.ffi.new("luce_round_item[]", max(len(items), 1))
        kept: list[Any] = []
        for struct, item, n in zip(made, items, widths, strict=False):
            if item.parents is not None:
                if len(item.parents) != n:
                    raise ArgumentError(f"{n} rows, but {len(item.parents)} parents")
                struct.parents = parents = self.library.ints(item.parents)
                kept.append(parents)
            if item.tokens is not None:
                struct.tokens = tokens = self.library.ints(item.tokens)
                kept.append(tokens)
            else:
                if n > 1 and item.anchor != DRAFTED:
                    struct.drafter = self._index(item.source)
                try:
                    struct.anchor = item.anchor
                except OverflowError:
                    raise ArgumentError(f"{item.anchor} does not fit into 32 bits") from None
            struct.n = n
            if item.tokens is not None or item.anchor != CHOSEN:  # Else the round ahead has it.
                struct.sequence = item.sequence.handle
        return made, kept

    def load_checkpoint(self, data: bytes | memoryview) -> Checkpoint:
        """Loads what Checkpoint.save returned, in this or another engine of the same model, kv_type, n_cut
        and kinds of drafters, by the same build on the same kind of device. The checkpoint is then in host
        memory. ArgumentError names what does not fit. The engine's steps go on beside it, in other threads.
        """
        buffer = self.library.ffi.from_buffer("char[]", data)
        out = self.library.ffi.new("luce_checkpoint **")
        self.library.check(self.library.lib.luce_checkpoint_load(out, self.handle, buffer, len(data)))
        return Checkpoint(self, out[0])


class Sequence(Handle):
    """This is one timeline in an engine: a committed prefix of tokens in the caches."""

    def __init__(self, engine: Engine):
        library = engine.library
        out = library.ffi.new("luce_sequence **")
        library.check(library.lib.luce_sequence_open(out, engine.handle))
        super().__init__(library, out[0], library.lib.luce_sequence_close)
        self.engine = engine
        new = library.ffi.new
        self._anchor_alone = new("int32_t[]", 1)  # It is the path of a round without accepted candidates.
        self._lookup = new("int32_t[]", library.lib.LUCE_MAX_ROWS), new("uint32_t *"), new("uint32_t *")

    @property
    def info(self) -> SequenceInfo:
        return self.library.read(SequenceInfo, self.library.lib.luce_sequence_get_info, self.handle)

    def reset(self) -> None:
        """Empties the timeline; this also heals a failed sequence."""
        self.library.check(self.library.lib.luce_sequence_reset(self.handle))

    def set_sampling(self, sampling: Sampling) -> None:
        """Sets how choices are made after this call."""
        struct = self.library.sampling(sampling)
        self.library.check(self.library.lib.luce_sequence_set_sampling(self.handle, struct))

    def set_penalties(self, penalties: Penalties, n_prompt: int) -> None:
        """Sets what choose() does to logits after this call. Tokens from position n_prompt on count as
        generated."""
        struct = self.library.penalties(penalties, n_prompt)
        self.library.check(self.library.lib.luce_sequence_set_penalties(self.handle, struct))

    def prefill(self, tokens: IntArray, last: bool = True) -> int | None:
        """Commits the next tokens (n,) of a prompt, n >= 1, which may not pass the end of a chunk. Returns
        the choice after them where they are the last ones of the prompt, else None."""
        choice = self.library.ffi.new("int32_t *") if last else self.library.ffi.NULL
        rows = self.library.ints(tokens)
        self.library.check(self.library.lib.luce_sequence_prefill(self.handle, rows, len(rows), choice))
        return int(choice[0]) if last else None

    def drafted(self, n: int) -> list[int]:
        """Returns the n tokens of the last draft. Raises NumericError where the drafter's logits were not
        finite; the sequence can go on."""
        tokens = self.library.ffi.new("int32_t[]", max(n, 1))
        self.library.check(self.library.lib.luce_sequence_get_draft(self.handle, tokens, n))
        drafted: list[int] = self.library.ffi.unpack(tokens, n)
        return drafted

    def lists(self, depth: int, k: int, form: Form = Form.CHAIN) -> Lists:
        """Returns the k best candidates of each of the first `depth` drafts of the last draft, for tree(); its drafter
        has lists of this form. With k = 1 these are the drafts themselves, with scores of 0. Raises NumericError as
        drafted() does."""
        if k == 1:
            made = Lists(self.library, depth, k, Form.CHAIN)
            made.ids[0:depth] = self.drafted(depth)
            return made
        made = Lists(self.library, depth, k, form)
        self.library.check(self.library.lib.luce_sequence_get_lists(self.handle, made.struct))
        return made

    def tree(self, anchor: int, lists: Lists, budget: int) -> tuple[list[int], list[int]]:
        """Calls Library.tree."""
        return self.library.tree(anchor, lists, budget)

    def lookup(self, anchor: int, most: int) -> tuple[list[int], int]:
        """Looks for the last place where the text stood as it does after the committed tokens and `anchor`.
        Returns the tokens that followed there, none or `most`, and how many tokens the two places have in
        common."""
        tokens, n, matched = self._lookup
        n[0] = min(max(most, 0), len(tokens))
        find = self.library.lib.luce_sequence_lookup
        try:
            self.library.check(find(self.handle, anchor, tokens, n, matched))
        except OverflowError:
            raise ArgumentError(f"{anchor} does not fit into 32 bits") from None
        found = n[0]
        return list(tokens[0:found]) if found else [], int(matched[0])

    def accept(self, tokens: IntArray, parents: IntArray | None, choices: IntArray) -> tuple[list[int], int]:
        """Calls Library.accept."""
        return self.library.accept(tokens, parents, choices)

    def commit(self, path: IntArray) -> None:
        """Appends the rows path (n,) of the last verify. path[0] is 0, and each row is a child of the one
        before."""
        rows = self._anchor_alone if len(path) == 1 and path[0] == 0 else self.library.ints(path)
        self.library.check(self.library.lib.luce_sequence_commit(self.handle, rows, len(path)))

    def logits(self, row: int = 0) -> np.ndarray:
        """Returns the logits F32 (n_vocab,) of a row of the engine's last verify, or of row 0 of its last
        prefill with a choice. Raises StateError where the engine has run another step since."""
        import numpy as np

        out = np.empty(self.engine.n_vocab, np.float32)
        data = self.library.ffi.from_buffer("float[]", out)
        self.library.check(self.library.lib.luce_sequence_get_logits(self.handle, row, data, out.size))
        return out

    def hidden(self, row: int = 0) -> np.ndarray:
        """Returns the hidden state F32 (n_embd,) of a row of the engine's last verify, after the output norm.
        Raises StateError where the engine has run another step since."""
        import numpy as np

        out = np.empty(self.engine.n_embd, np.float32)
        data = self.library.ffi.from_buffer("float[]", out)
        self.library.check(self.library.lib.luce_sequence_get_hidden(self.handle, row, data, out.size))
        return out

    def scores(self, n: int, n_best: int = 0) -> np.ndarray:
        """Returns F32 (n,) how much of the attention of the last verify's rows each of the first n positions had: the
        mean of the `n_best` layers and heads that gave it most, or with 0 of all. ArgumentError: the engine has no
        `scores`. Raises StateError where the engine has run another step since."""
        import numpy as np

        out = np.empty(n, np.float32)
        data = self.library.ffi.from_buffer("float[]", out)
        self.library.check(self.library.lib.luce_sequence_get_scores(self.handle, n_best, data, n))
        return out

    def choose(self, row: int = 0, mask: bytes | None = None) -> int:
        """Returns the choice after a row that logits() has, with the penalties over the tokens before it.
        Only tokens that the mask allows are chosen: token i where bit i % 8 of byte i // 8 is set. Raises
        ArgumentError where it allows none."""
        token = self.library.ffi.new("int32_t *")
        bits = self.library.ffi.NULL if mask is None else self.library.ffi.from_buffer("uint8_t[]", mask)
        size = 0 if mask is None else len(mask)
        self.library.check(self.library.lib.luce_sequence_choose(self.handle, row, bits, size, token))
        return int(token[0])

    def logprobs(self, row: int, token: int, top: int = 0) -> Logprobs:
        """Returns the log-probabilities of `token` and of the `top` most probable tokens after a row that
        logits() has."""
        import numpy as np

        logits = self.logits(row)
        if not 0 <= token < logits.size or not 0 <= top <= logits.size:
            raise ArgumentError(f"token {token} and the best {top}: there are {logits.size}")
        shifted = logits.astype(np.float64) - logits.max()
        all_of_them = shifted - np.log(np.exp(shifted).sum())
        least = -np.partition(-logits, top - 1)[top - 1] if top else np.inf
        best = np.flatnonzero(logits >= least)
        best = best[np.argsort(-logits[best], kind="stable")][:top]  # On a tie the lowest id comes first.
        return Logprobs(float(all_of_them[token]), tuple((int(id), float(all_of_them[id])) for id in best))

    def dump(self) -> bytes:
        """Returns the committed state as bytes. They are equal for sequences with the same committed tokens,
        however their rounds went. Verified rows that are not committed are rejected."""
        return bytes(self.library.bytes_of(self.library.lib.luce_sequence_dump, self.handle))

    def checkpoint(self) -> Checkpoint:
        """Makes a checkpoint of the present position, which must be a multiple of n_cut, or of a page where that is
        no multiple of n_cut, that only prefill has reached, in parts that began at such multiples (StateError
        otherwise). Raises OutOfMemory where n_checkpoints are on the device, or no page is free."""
        out = self.library.ffi.new("luce_checkpoint **")
        self.library.check(self.library.lib.luce_checkpoint_make(out, self.handle))
        return Checkpoint(self.engine, out[0])

    def resume(self, checkpoint: Checkpoint) -> None:
        """Goes to the position of a checkpoint of the same engine; this also heals a failed sequence. A call
        that raises changes nothing."""
        self.library.check(self.library.lib.luce_sequence_resume(self.handle, checkpoint.handle))


class Checkpoint(Handle):
    """This is a position that any sequence of its engine can start from. Sequence.checkpoint and
    Engine.load_checkpoint make them."""

    def __init__(self, engine: Engine, pointer: Any):
        super().__init__(engine.library, pointer, engine.library.lib.luce_checkpoint_close)

    @property
    def info(self) -> CheckpointInfo:
        return self._info(self.library.ffi.NULL, 0)

    @cached_property
    def tokens(self) -> list[int]:
        """Returns the committed tokens (n_past,)."""
        n = self.info.n_past
        tokens = self.library.ffi.new("int32_t[]", n)
        self._info(tokens, n)
        found: list[int] = self.library.ffi.unpack(tokens, n)
        return found

    def _info(self, tokens: Any, n: int) -> CheckpointInfo:
        get_info = self.library.lib.luce_checkpoint_get_info
        return self.library.read(CheckpointInfo, lambda out: get_info(self.handle, out, tokens, n))

    def to_host(self) -> None:
        """Moves the checkpoint to host memory, beside the engine's steps. Raises OutOfMemory where the host lacks it.
        Where the copy fails later, all calls raise StateError."""
        self.library.check(self.library.lib.luce_checkpoint_move(self.handle, 0))

    def to_device(self) -> None:
        """Moves the checkpoint to the device. Raises OutOfMemory where pages or slots lack."""
        self.library.check(self.library.lib.luce_checkpoint_move(self.handle, 1))

    def save(self) -> memoryview:
        """Returns the whole checkpoint as bytes, for Engine.load_checkpoint. They say which model, build and
        device they are of, and carry a checksum. The engine's steps go on beside it, in other threads;
        Error where one of them closes the checkpoint meanwhile."""
        return self.library.bytes_of(self.library.lib.luce_checkpoint_save, self.handle)
