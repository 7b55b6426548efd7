"""One generation: the round of luce.h as a state machine of one sequence.

  IDLE     begin    check the request, empty the timeline
  PREFILL  landed   go on behind the chunk of the prompt that was read; the choice after the last is the first anchor
  DRAFT    offer    ask the draft source for candidates that may follow the anchor
  VERIFY            its rows are in a round, or wait for one
  COMMIT            walk along the target's own choices, append what was accepted, emit it
  DONE, FAILED      one terminal event, Finished or Failed, and nothing after it

Each call leaves a state by the table in _move(), and returns what happened. It runs no step itself: each `chunk` of its
prompt is read, its `drafts` are made, and its `rows` verified together with those of others (loop.py, pipeline.py). Its
next round may have begun before it is told of the last one, of which the accepted rows are then committed already.

Between rounds: `committed` tokens are the prompt and all emitted tokens but the last, which is the anchor.
Where an end of text or a stop string cuts a round, no more is committed than was emitted, unless the next one
has begun. Its sequence is closed then, and that round is dropped.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Items
from typing import TYPE_CHECKING, Protocol

from luce.decode.choosing import Chooser
from luce.decode.events import Event, Failed, Finished, Prefilled, Started, State, Warned
from luce.decode.output import Output
from luce.decode.pipeline import NOTHING_DONE, Decision, Landed, Read
from luce.decode.request import Request
from luce.decode.stats import Tally
from luce.errors import ArgumentError, Cancelled, ContextFull
from luce.files.tokenizer import Tokenizer
from luce.native import Drafts, Prompt, Rows, Sequence
from luce.speculate.drafting import NOTHING, Draft, DraftSource, Limits, Round

if TYPE_CHECKING:
    import numpy as np

Came = None | Limits | Read | Landed | Exception


class Prefixes(Protocol):
    """Keeps beginnings of prompts, so that other prompts can start from them."""

    def resume(self, sequence: Sequence, prompt: np.ndarray) -> int:
        """Brings the sequence to the end of the longest kept beginning of `prompt`, int32 (n,), or empties it. Returns
        the number of tokens that it then has, less than the prompt's."""

    def again(self, sequence: Sequence) -> int:
        """Returns how many tokens of that prompt an earlier one began with too, and have to be read again."""

    def ends(self, sequence: Sequence) -> Items[int]:
        """Returns where chunks of that prompt have to end besides at its own end, ascending. Between them they are as
        long as pays."""

    def reached(self, sequence: Sequence) -> None:
        """Says that the sequence is where a chunk of its prompt had to end, so that a checkpoint can be made."""


class Sizes(Protocol):
    """This is what a generation has to know of its engine (EngineInfo has it)."""

    @property
    def n_ctx(self) -> int: ...
    @property
    def n_rows(self) -> int: ...
    @property
    def n_cut(self) -> int: ...
    @property
    def n_chunk(self) -> int: ...
    @property
    def whole_images(self) -> bool: ...


class Generation:
    """One request on a sequence, which it empties first. Who drives it asks `cancelled` between its calls. `clock`
    gives seconds."""

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
        self.sequence, self.cancelled = sequence, cancelled
        self._sizes, self._request, self._source, self._clock, self._prefixes = sizes, request, source, clock, prefixes
        self._chooser, self._output = Chooser(sequence, request), Output(request, tokenizer, sizes.n_ctx)
        self._tally = Tally(source.name if source else "plain")
        self._cached = self._read = 0  # So many tokens of the prompt a checkpoint held, and are committed.
        self._chunk_end = 0  # The chunk that is being read ends there.
        self._gaps = request.gaps
        self._ends: Items[int] = ()  # Chunks have to end there, and at the prompt's end.
        self._reached = False  # The last chunk ended at one of these, and keep() was not asked yet.
        self._events = list[Event]()  # They are of the call that runs.
        self._limits = Limits(0, 0)
        self._decision, self._draft_s = Decision(), 0.0  # They are of the round that comes, or is in flight.
        self._last = Landed()
        self._counted: tuple[Draft, Round] | None = None  # emit() counts this round.

    # ---- what it waits for

    @property
    def over(self) -> bool:
        return self.state in (State.DONE, State.FAILED)

    @property
    def unread(self) -> int:
        """Returns how many tokens of the prompt are left to read."""
        return len(self._request.prompt) - self._read

    def chunk(self, most: int) -> Prompt | None:
        """Returns the next chunk of the prompt, of at most so many tokens, or None where no chunk is that short: where
        none of the places is near enough at which one has to end, it ends at a multiple of n_cut. An image that is read
        whole is not cut: the chunk ends ahead of it, or where it begins with one, behind that, however long it is."""
        prompt, begin = self._request.prompt, self._read
        self._chunk_end = min(next((end for end in self._ends if begin < end), len(prompt)), len(prompt))
        if self._chunk_end - begin > most:
            self._chunk_end = (begin + most) // self._sizes.n_cut * self._sizes.n_cut
        if self._chunk_end <= begin:
            return None
        for image in self._request.images if self._sizes.whole_images else ():
            if image.at < self._chunk_end < image.end:
                self._chunk_end = image.at if image.at > begin else image.end
        tokens = prompt[begin : self._chunk_end]
        spans = (image.span(begin, self._chunk_end) for image in self._request.images)
        gaps = tuple((at - begin, n) for at, n in self._gaps if begin <= at < self._chunk_end)
        return Prompt(self.sequence, tokens, self._chunk_end == len(prompt), tuple(filter(None, spans)), gaps)

    @property
    def drafts(self) -> Drafts | None:
        """Returns what the device has to draft for it before its rows can be verified."""
        draft = self._decision.now
        if self.state is not State.DRAFT or not draft.on_device or self._last.begun is not None:
            return None
        return Drafts(self.sequence, self._output.tokens[-1], draft.on_device, draft.by)

    @property
    def rows(self) -> Rows:
        """Returns what is verified of it in VERIFY."""
        draft = self._decision.now
        if draft.on_device:
            return Rows(self.sequence, n=draft.on_device + 1)
        return Rows(self.sequence, (self._output.tokens[-1], *draft.tokens), draft.parents)

    @property
    def decision(self) -> Decision:
        """Returns what is decided of its round in VERIFY and of the next one."""
        now, following, _ = self._decision
        # The next one has so much room, where all of `now` is right.
        if following is not None and following.size > self._output.room - 1 - now.depth:
            following = None
        ahead = self.state is State.VERIFY and self._chooser.by_step and self._output.room > 0
        return Decision(now, following, ahead)

    # ---- driven from outside

    def begin(self) -> list[Event]:
        """Checks the request and empties the timeline. It is called once, before all else."""
        return self._go(None)

    def propose(self, rows: int, sequences: int) -> list[Event]:
        """Says that a round comes, in which it may have so many rows, its anchor's among them, and which so many
        sequences share. All of these are told before one of them offers."""
        most, began = min(rows, self._sizes.n_rows) - 1, self._clock()
        self._limits = Limits(most, self._output.room, sequences, self._last.begun)
        if self._source and min(most, self._limits.depth) > 0:
            try:
                self._source.propose(self._output.tokens[-1], self._limits)
            except Exception as error:
                return self.fail(error)
        self._draft_s = self._clock() - began
        return []

    def offer(self) -> list[Event]:
        """Asks the draft source. It has `drafts` to be made then, or its `rows` are ready."""
        return self._go(self._limits)

    def landed(self, landed: Landed | Read) -> list[Event]:
        """Takes what its chunk, its drafts or its round gave."""
        return self._go(landed)

    def emit(self) -> list[Event]:
        """Makes text of the tokens that came, and counts their round. Where the device works beside the host, the
        next round is under way by then."""
        if self._counted:
            self._tally.add(*self._counted)
            self._counted = None
        return [*self._output.say()]

    def keep(self) -> None:
        """Has the beginning kept at whose end the last chunk ended, if it is to be. Of a prompt's end that comes
        behind its first token, which somebody waits for, and ahead of its next round."""
        if self._prefixes and self._reached:
            self._prefixes.reached(self.sequence)
        self._reached = False

    def fail(self, error: Exception) -> list[Event]:
        """Says that what it waits for raised `error`. It goes on where that was its drafts' fault."""
        return self._go(error)

    def cancel(self) -> list[Event]:
        """Ends the generation with what it has emitted."""
        return self._go(Cancelled("cancelled"))

    # ---- the states

    def _move(self, came: Came) -> State:
        """Leaves a state by what came, for the one that is returned in the end."""
        match self.state, came:
            case State.IDLE, None:
                return self._begin()  # PREFILL
            case State.PREFILL, Read():
                return self._go_on(came.choice)  # PREFILL, DRAFT or VERIFY, DONE
            case State.DRAFT, Limits():
                return self._offer(came)  # DRAFT where the device drafts, else VERIFY
            case State.DRAFT, Landed():
                return self._grow(came.seconds)  # VERIFY
            case State.VERIFY, Landed():
                return self._commit(came)  # COMMIT, DRAFT or VERIFY, DONE
            case _, Cancelled():
                return self._end("cancelled")  # DONE
            case State.DRAFT, Exception():
                return self._plain(came)  # VERIFY
            case State.VERIFY, Exception() if self._decision.now.size and isinstance(came, NOTHING_DONE):
                return self._plain(came)  # VERIFY
            case _, Exception():
                raise came  # FAILED
        raise AssertionError(f"{came} came in {self.state}")

    def _go(self, came: Came) -> list[Event]:
        if isinstance(came, Exception):
            self._events += self.emit()
        try:
            self.state = self._move(came)
            if self.over:
                self._events += [*self.emit(), self._finished()]
        except Cancelled:
            raise  # The core did nothing.
        except Exception as error:
            self._events.append(Failed(error, self.state))
            self.state = State.FAILED
        events, self._events = self._events, []
        return events

    def _begin(self) -> State:
        prompt, n_ctx = self._request.prompt, self._sizes.n_ctx
        if not prompt:
            raise ArgumentError("the prompt is empty: at least one token is needed")
        if len(prompt) > n_ctx:
            raise ContextFull(f"a prompt of {len(prompt)} tokens, a context of {n_ctx}")
        longest = max((image.end - image.at for image in self._request.images), default=0)
        if self._sizes.whole_images and longest > self._sizes.n_chunk:
            read = f"this model reads one at once, in a chunk of {self._sizes.n_chunk}"
            raise ArgumentError(f"an image has {longest} tokens, and {read}, so reduce it", "image_tokens")
        self._tally.began = self._clock()
        if self._prefixes:
            self._cached = self._read = self._prefixes.resume(self.sequence, self._request.key)
        else:
            self.sequence.reset()
        self._chooser.begin()
        again = self._prefixes.again(self.sequence) if self._prefixes else 0
        self._events.append(Started(len(prompt), self._cached, again))
        if self._source:
            try:
                self._source.begin(self._output.budget)
            except Exception as error:
                self._drop_source(error)
        self._ends = self._prefixes.ends(self.sequence) if self._prefixes else ()
        return State.PREFILL

    def _go_on(self, choice: int | None) -> State:
        prompt, end = self._request.prompt, self._chunk_end
        self._read = end
        self._reached = end in self._ends
        if end < len(prompt):
            self.keep()
        self._events.append(Prefilled(end, len(prompt)))
        if end < len(prompt):
            return State.PREFILL
        assert choice is not None
        self._tally.first = self._clock()
        if self._request.max_tokens == 0:
            return self._end("length", "max_tokens")
        self._take([self._chooser.first(choice)], [0])
        return self._next()

    def _take(self, tokens: list[int], path: list[int]) -> list[int]:
        """Emits tokens that were chosen after the rows of `path`, up to the first that ends the text."""
        kept = self._output.take(tokens, self._chooser.stopped)
        self._output.logprobs = self._chooser.logprobs(path, kept)
        return kept

    def _next(self) -> State:
        """Goes on to the next round, if there is one."""
        if self._output.reason:
            return State.DONE
        if self._output.room < 0:
            return self._end("length", "context")
        self._decision, self._draft_s = Decision(self._last.begun or NOTHING), 0.0
        return State.DRAFT if self._source else State.VERIFY

    def _offer(self, limits: Limits) -> State:
        if self._source and min(limits.candidates, limits.depth) > 0:
            began = self._clock()
            try:
                draft = self._source.draft(self._output.tokens[-1], limits)
                if limits.begun is None:
                    _require_within(draft, limits)
                else:
                    draft = limits.begun  # It was only told what comes.
                self._decision = Decision(draft, self._source.follows())
                self._draft_s += self._clock() - began
            except Exception as error:
                return self._plain(error)
        if limits.begun is None and self._decision.now.on_device:
            return State.DRAFT
        return self._grow(0.0)

    def _grow(self, seconds: float) -> State:
        now, following, _ = self._decision
        self._draft_s += seconds
        if now.grow and self._limits.begun is None:
            began = self._clock()
            try:
                now = now.grow()
                _require_within(now, self._limits)
                self._decision = Decision(now, following)
                self._draft_s += self._clock() - began
            except Exception as error:
                return self._plain(error)
        return State.VERIFY

    def _plain(self, error: Exception) -> State:
        """Has the round verify the anchor alone after drafts that failed, unless it has begun meanwhile."""
        begun = self._last.begun if self.state is State.DRAFT else None
        self._drop_source(error)
        self._decision = Decision(begun or NOTHING)
        return State.VERIFY

    def _commit(self, landed: Landed) -> State:
        self.state = State.COMMIT
        draft, rows, choices = self._decision.now, landed.tokens, landed.choices
        last, self._last = self._last, landed
        if min(rows) < 0:
            try:
                self.sequence.drafted(draft.on_device)  # This says what is wrong.
            except Exception as error:  # The anchor's row is right whatever the others are.
                draft, rows, choices = NOTHING, rows[:1], choices[:1]
                self._drop_source(error)
        path, anchor = self._chooser.accept(rows, draft.parents, choices)
        kept = self._take([*(rows[row] for row in path[1:]), anchor], path)
        began = self._clock()
        if landed.begun is None:
            self.sequence.commit(path[: len(kept)])
        accepted, commit_s = min(len(path) - 1, len(kept)), self._clock() - began
        took = self._draft_s, landed.seconds, commit_s
        done = Round(draft.size, accepted, *took, tuple(kept), last.begun is not None, last.behind, landed.period)
        self._events.append(done)
        if self._source:
            try:
                self._source.learn(done)
            except Exception as error:
                self._drop_source(error)
        self._counted = draft, done
        return self._next()

    def _end(self, reason: str, truncated_by: str | None = None) -> State:
        self._output.reason, self._output.truncated_by = reason, truncated_by
        return State.DONE

    def _drop_source(self, error: Exception) -> None:
        """Drops the draft source and goes on without drafts. Raises `error` where it made the sequence fail
        too."""
        if isinstance(error, Cancelled) or self.sequence.info.failed:
            raise error
        self._source, self._decision = None, Decision(self._decision.now)
        self._events.append(Warned(f"{self._tally.mode} drafting failed and is off: {error}"))

    def _finished(self) -> Finished:
        output, prompt = self._output, len(self._request.prompt)
        stats = self._tally.stats(self._clock(), max(len(output.tokens) - 1, 0))
        tokens = tuple(output.tokens)
        ended = output.reason, output.text, tokens, prompt, stats, output.truncated_by
        return Finished(*ended, self._cached, self._request.compressed)


def _require_within(draft: Draft, limits: Limits) -> None:
    """Refuses a draft that is larger than the round's limits, which would make the whole step fail."""
    if not draft.size:
        return
    most, depth = limits.candidates, limits.depth
    most = max(most, depth) if draft.grow else most  # What it grows into is verified too.
    if draft.size > most or draft.depth > depth:
        raise ArgumentError(f"{draft.size} drafts to a depth of {draft.depth}: {most} to {depth} fit")
