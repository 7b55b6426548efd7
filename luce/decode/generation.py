"""Has one generation: the round of luce.h as a state machine of one sequence, driven in turn with others.

  IDLE     begin    check the request, empty the timeline
  PREFILL  prefill  commit a chunk of the prompt; after the last one its choice is the first anchor
  DRAFT    propose  ask the draft source for candidates that may follow the anchor
  VERIFY   verify   one forward over [anchor, candidates], which may never have left the device
  COMMIT   commit   walk along the target's own choices, append what was accepted, emit it
  DONE, FAILED      one terminal event, Finished or Failed, and nothing after it

It runs no step of the engine itself: it says what it wants next (a chunk of the prompt, its turn to draft, a
chain of drafts, a verify of rows) and is told the result, so that who drives it can put the wants of many
generations into one step (loop.py). Its own calls are those of its sequence that wait for nothing. Its next
round may begin before it is told of the last one (next_draft, begun), of which the accepted rows are then
appended already.

Between rounds: `committed` tokens are the prompt and all emitted tokens but the last, which is the anchor.
Where an end of text or a stop string cuts a round, no more is committed than was emitted, unless the next one
has begun. Its sequence is closed then, and that round is dropped.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator
from collections.abc import Sequence as Items
from functools import partial
from typing import Any, Protocol

from luce.decode.choosing import Chooser
from luce.decode.events import Event, Failed, Finished, Item, Prefilled, Started, State, Tokens, Warned
from luce.decode.request import Request
from luce.decode.stats import Tally
from luce.decode.wants import WANTS, Chunk, Proposed, Share, Turn, Want
from luce.errors import ArgumentError, Cancelled, ContextFull, OutOfMemory, StateError
from luce.files.tokenizer import Detokenizer, StopStrings, Tokenizer
from luce.native import Drafts, Rows, Sequence
from luce.native.structs import Logprobs
from luce.speculate.drafting import NOTHING, Draft, DraftSource, Limits, Round

# A call that did nothing raises one of these. Without the drafts that it was asked for, it may be asked
# again.
NOTHING_DONE = (ArgumentError, ContextFull, StateError, OutOfMemory)

Verb = Generator[Item | Want, Any, State]  # A verb yields items, and wants whose results it is sent.


class Prefixes(Protocol):
    """Keeps beginnings of prompts, so that other prompts can start from them."""

    def resume(self, sequence: Sequence, prompt: tuple[int, ...]) -> int:
        """Brings the sequence to the end of the longest kept beginning of `prompt`, or empties it. Returns
        the number of tokens that it then has, which is the end of a chunk and less than the prompt's."""

    def ends(self, sequence: Sequence) -> Items[int]:
        """Returns where chunks end at the end of a page, ascending, of the prompt that the sequence was resumed
        for: at all multiples of n_chunk, and where a shorter chunk was cut. The rest of the prompt is not among
        them."""

    def reached(self, sequence: Sequence, prompt: tuple[int, ...]) -> None:
        """Says that the sequence is at the end of a whole chunk of `prompt`, so that a checkpoint can be
        made."""


class Sizes(Protocol):
    """This is what a generation has to know of its engine (EngineInfo has it)."""

    @property
    def n_ctx(self) -> int: ...
    @property
    def n_rows(self) -> int: ...
    @property
    def n_chunk(self) -> int: ...


class Generation:
    """This is one generation of one request on a sequence, which it empties first. `want` is what it waits
    for, and None once it has ended. Who drives it asks `cancelled` between steps. `clock` gives seconds."""

    def __init__(
        self,
        sequence: Sequence,
        sizes: Sizes,
        tokenizer: Tokenizer,
        request: Request,
        source: DraftSource | None = None,
        cancelled: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.perf_counter,
        prefixes: Prefixes | None = None,
    ):
        self.state = State.IDLE
        self.want: Want | None = None
        self.sequence, self.cancelled = sequence, cancelled
        self._clock, self._sizes, self._request = clock, sizes, request
        self._source, self._mode = source, source.name if source else "plain"
        # `_cached` counts the prompt's tokens that a checkpoint held.
        self._prefixes, self._cached = prefixes, 0
        self._chooser = Chooser(sequence, request)
        self._eos = frozenset[int]() if request.ignore_eos else tokenizer.eos_ids
        self._detokenizer = Detokenizer(tokenizer)
        self._stops = StopStrings(request.stops)
        most = max(sizes.n_ctx - len(request.prompt) + 1, 0)  # The last token needs no position.
        self._budget = most if request.max_tokens is None else min(request.max_tokens, most)
        self._tokens: list[int] = []  # These were emitted, and the last one is the anchor.
        self._text: list[str] = []
        self._draft = NOTHING
        self._rows: list[int] = []  # These are the tokens of this round's rows.
        self._choices: list[int] = []  # The target chose these after each row of this round.
        self._reason = ""
        self._truncated_by: str | None = None
        self._tally = Tally()
        # Its choices are those of the steps, so that a round can begin before the host knows its token.
        self._by_itself = request.logprobs is None and not request.penalties.any and not request.grammar
        self._next: Draft | None = None  # The round after this one has begun, with this draft.
        self._next_behind = False  # It is begun later than a plain one would be: once this one has ended.
        self._begun_ahead = self._begun_behind = False  # These say it of this round.
        self._follows: Draft | None = NOTHING  # The source says that the next round may begin with it.
        self._step_s = 0.0  # The last result told so many seconds.
        self._round_s: float | None = None  # The last round ended so long after the one before it.
        self._draft_s = self._verify_s = 0.0  # These are the seconds of this round.
        self._began, self._first_token = 0.0, math.nan  # Both are times of the clock.
        self._routine = self._run()

    # ---- driven from outside

    def start(self) -> list[Item]:
        """Returns what happens up to the first want. It is called once, before all else."""
        return self._go_on(self._routine.send, None)

    def tell(self, result: Any, seconds: float = 0.0) -> list[Item]:
        """Gives the generation the result of what it wanted, and the seconds of the step. Returns what
        happens up to the next want. What is to be called is called once, in its order, before the next call
        of the generation."""
        self._step_s = seconds
        return self._go_on(self._routine.send, result)

    def fail(self, error: Exception) -> list[Item]:
        """Says that what it wanted raised `error`. Returns what happens up to the next want."""
        return self._go_on(self._routine.throw, error)

    def cancel(self) -> list[Item]:
        """Ends the generation with what it has emitted."""
        return self.fail(Cancelled("cancelled"))

    def next_draft(self) -> Draft | None:
        """Returns the draft that the next round can be begun with before the tokens of this one are known, of
        which the step is wanted or under way. Returns None where it has to wait for them."""
        draft = self._follows
        if draft is None or not self.could_go_on():
            return None
        if draft.size or self._draft.size:  # Else could_go_on() says it.
            tokens = len(self._tokens) + self._draft.depth + 1  # This round gives so many at most.
            room = self._sizes.n_ctx - len(self._request.prompt) - tokens
            if draft.size > min(room, self._budget - tokens - 1):
                return None
        return draft

    def could_go_on(self) -> bool:
        """Says whether the next round could be begun before the tokens of this one are known, if neither had
        drafts."""
        return self._by_itself and len(self._tokens) + 2 <= self._budget

    def landed(self, seconds: float | None) -> None:
        """Says how long after the round before it the round ended whose result is told next; None where
        something else came between them."""
        self._round_s = seconds

    def begun(self, draft: Draft) -> None:
        """Says that the next round has begun with a draft, which commits the accepted rows of this one."""
        self._next = draft

    def behind(self) -> None:
        """Says that the next round is begun once this one has ended. If none that decode had drafts, it would be
        begun now: what they draft has to make up for the wait."""
        self._next_behind = True

    def _go_on(self, resume: Callable[[Any], Item | Want], result: Any) -> list[Item]:
        events: list[Item] = []
        self.want = None
        try:
            item = resume(result)
            while not isinstance(item, WANTS):
                events.append(item)
                item = next(self._routine)
            self.want = item
        except StopIteration:
            pass
        return events

    # ---- the states

    def _run(self) -> Generator[Item | Want, Any, None]:
        """Yields events and wants, up to exactly one Finished or Failed."""
        verbs = {
            State.IDLE: self._begin,
            State.PREFILL: self._prefill,
            State.DRAFT: self._propose,
            State.VERIFY: self._verify,
            State.COMMIT: self._commit,
        }
        try:
            while self.state is not State.DONE:
                try:
                    self.state = yield from verbs[self.state]()
                except Cancelled:
                    self.state = yield from self._end("cancelled")
            finished = self._finished()
        except Exception as error:
            failed_in, self.state = self.state, State.FAILED
            yield Failed(error, failed_in)
        else:
            yield finished

    def _begin(self) -> Verb:
        prompt, n_ctx = self._request.prompt, self._sizes.n_ctx
        if not prompt:
            raise ArgumentError("the prompt is empty: at least one token is needed")
        if len(prompt) > n_ctx:
            raise ContextFull(f"a prompt of {len(prompt)} tokens, a context of {n_ctx}")
        self._began = self._clock()
        if self._prefixes:
            self._cached = self._prefixes.resume(self.sequence, prompt)
        else:
            self.sequence.reset()
        self._chooser.begin()
        yield Started(len(prompt), self._cached)
        if self._source:
            try:
                self._source.begin(self._budget)
            except Exception as error:
                yield self._without_source(error)
        return State.PREFILL

    def _prefill(self) -> Verb:
        prompt, n_chunk = self._request.prompt, self._sizes.n_chunk
        whole = range(n_chunk, len(prompt) + 1, n_chunk)
        ends = self._prefixes.ends(self.sequence) if self._prefixes else whole
        begin, choice = self._cached, -1
        for end in [*(end for end in ends if begin < end < len(prompt)), len(prompt)]:
            choice = yield Chunk(prompt[begin:end], end == len(prompt), len(prompt) - end)
            if self._prefixes and end in ends:
                self._prefixes.reached(self.sequence, prompt)
            yield Prefilled(end, len(prompt))
            begin = end
        self._first_token = self._clock()
        if self._request.max_tokens == 0:
            return (yield from self._end("length", "max_tokens"))
        kept, text = self._take([self._chooser.first(choice)])
        return (yield from self._emit(kept, text, self._chooser.logprobs([0], kept)))

    def _propose(self) -> Verb:
        # So many positions are left after the anchor.
        room = self._sizes.n_ctx - len(self._request.prompt) - len(self._tokens)
        if room < 0:
            return (yield from self._end("length", "context"))
        begun, self._begun_behind = self._next, self._next_behind
        self._next, self._next_behind, self._follows = None, False, NOTHING
        self._draft, self._draft_s = NOTHING if begun is None else begun, 0.0
        self._begun_ahead = begun is not None
        if not self._source:
            return State.VERIFY
        share: Share = yield Turn()
        if not self._source:  # It failed after its last round, while this waited for its turn.
            return State.VERIFY
        began, most = self._clock(), min(share.rows, self._sizes.n_rows) - 1  # The anchor has a row too.
        depth = min(room, self._budget - len(self._tokens) - 1)
        if min(most, depth) > 0:
            try:
                limits = Limits(most, depth, share.sequences, begun)
                self._source.propose(self._tokens[-1], limits)
                yield Proposed()
                draft = self._source.draft(self._tokens[-1], limits)
                self._follows = self._source.follows()
                self._draft_s = self._clock() - began
                if begun is None:  # Else it was only told what came.
                    yield from self._make(draft, most, depth)
            except Cancelled:
                raise
            except Exception as error:
                yield self._without_source(error)
        return State.VERIFY

    def _make(self, draft: Draft, most: int, depth: int) -> Generator[Item | Want, Any, None]:
        """Has the device draft what it is to, and has the draft grow."""
        _require_within(draft, most, depth)
        if draft.on_device:
            yield Drafts(self.sequence, self._tokens[-1], draft.on_device, draft.by)
            self._draft_s += self._step_s
        if draft.grow:
            began = self._clock()
            draft = draft.grow()
            _require_within(draft, most, depth)
            self._draft_s += self._clock() - began
        self._draft = draft

    def _verify(self) -> Verb:
        draft, anchor = self._draft, self._tokens[-1]
        try:
            if draft.on_device:
                self._rows, self._choices = yield Rows(self.sequence, n=draft.on_device + 1)
            else:
                rows = Rows(self.sequence, (anchor, *draft.tokens), draft.parents)
                self._rows, self._choices = yield rows
        except NOTHING_DONE as error:
            if not draft.size:
                raise
            self._draft = NOTHING
            yield self._without_source(error)
            return State.VERIFY
        self._verify_s = self._step_s
        return State.COMMIT

    def _commit(self) -> Verb:
        rows = self._rows
        if min(rows) < 0:
            try:
                self.sequence.drafted(self._draft.on_device)  # This says what is wrong.
            except Exception as error:  # The anchor's row is right whatever the others are.
                self._draft, rows, self._choices = NOTHING, rows[:1], self._choices[:1]
                yield self._without_source(error)
        path, anchor = self._chooser.accept(rows, self._draft.parents, self._choices)
        kept, text = [*(rows[row] for row in path[1:]), anchor], ""
        goes_on = self._is_no_end(kept)
        if not goes_on:
            kept, text = self._take(kept)
        logprobs = self._chooser.logprobs(path, kept)
        began = self._clock()
        if self._next is None:
            self.sequence.commit(path[: len(kept)])
        accepted, commit_s = min(len(path) - 1, len(kept)), self._clock() - began
        took, begun = (self._draft_s, self._verify_s, commit_s), (self._begun_ahead, self._begun_behind)
        done = Round(self._draft.size, accepted, *took, tuple(kept), *begun, self._round_s)
        self._round_s = None
        count = partial(self._tally.add, self._draft, done, path[1 : 1 + accepted], self._mode)
        yield done
        if self._source:
            try:
                self._source.learn(done)
            except Exception as error:
                yield self._without_source(error)
        if goes_on:
            self._tokens += kept
            yield partial(self._print, kept, count)
            return State.DRAFT
        count()
        return (yield from self._emit(kept, text, logprobs))

    # ---- tokens and text

    def _is_no_end(self, tokens: list[int]) -> bool:
        """Says that the text goes on after these tokens, which can be told without the text of them."""
        fits = len(self._tokens) + len(tokens) < self._budget
        return fits and self._by_itself and not self._request.stops and self._eos.isdisjoint(tokens)

    def _print(self, tokens: list[int], count: Callable[[], None]) -> list[Event]:
        """Makes text of tokens while the next step is under way, and counts their round."""
        count()
        text = "".join(map(self._detokenizer.push, tokens))
        self._text.append(text)
        return [Tokens(tuple(tokens), text)]

    def _take(self, tokens: list[int]) -> tuple[list[int], str]:
        """Returns the tokens up to the first that ends the text, and the text that is certain with them."""
        text = ""
        for count, token in enumerate(tokens, start=1):
            if token in self._eos:
                self._reason = "stop"
            else:
                piece, met = self._stops.push(self._detokenizer.push(token))
                text += piece
                if met:
                    self._reason = "stop"
                    return tokens[:count], text
                if self._chooser.stopped and count == len(tokens):
                    self._reason = "stop"
                elif len(self._tokens) + count == self._request.max_tokens:
                    self._reason, self._truncated_by = "length", "max_tokens"
            if self._reason:
                return tokens[:count], text + self._held()
        return tokens, text

    def _held(self) -> str:
        """Returns the text that was held back and turned out to be neither half a character nor a stop
        string."""
        text, met = self._stops.push(self._detokenizer.flush())
        return text if met else text + self._stops.flush()

    def _emit(self, ids: list[int], text: str, logprobs: tuple[Logprobs, ...]) -> Verb:
        self._tokens += ids
        self._text.append(text)
        yield Tokens(tuple(ids), text, logprobs)
        return State.DONE if self._reason else State.DRAFT

    def _end(self, reason: str, truncated_by: str | None = None) -> Verb:
        """Ends the generation between rounds, with the text that is still held back."""
        self._reason, self._truncated_by = reason, truncated_by
        if text := self._held():
            self._text.append(text)
            yield Tokens((), text)
        return State.DONE

    def _without_source(self, error: Exception) -> Warned:
        """Drops the draft source and goes on without drafts. Raises `error` where it made the sequence fail
        too."""
        if self.sequence.info.failed:
            raise error
        return self._dropped(error)

    def _dropped(self, error: Exception) -> Warned:
        self._source, self._follows = None, NOTHING
        return Warned(f"{self._mode} drafting failed and is off: {error}")

    def _finished(self) -> Finished:
        now = self._clock()
        first = now if math.isnan(self._first_token) else self._first_token
        decoded = max(len(self._tokens) - 1, 0)
        stats = self._tally.stats(self._mode, first - self._began, now - first, decoded)
        text, prompt = "".join(self._text), len(self._request.prompt)
        ended_by, cached = self._truncated_by, self._cached
        return Finished(self._reason, text, tuple(self._tokens), prompt, stats, ended_by, cached)


def _require_within(draft: Draft, most: int, depth: int) -> None:
    """Refuses a draft that is larger than the round's limits, which would make the whole step fail."""
    if not draft.size:
        return
    most = max(most, depth) if draft.grow else most  # What it grows into is verified too.
    if draft.size > most or draft.depth > depth:
        raise ArgumentError(f"{draft.size} drafts to a depth of {draft.depth}: {most} to {depth} fit")
