"""Sight of a model: the tower beside it, names for the rows of its images, and the rows themselves.

A row of an image stands in a prompt as a name below -1. Rows have the same name where their image has the same pixels,
size, processor and tower, so that whatever compares prompts by their tokens, as the cache of beginnings does, compares
images. Names are of this process alone.
"""

from __future__ import annotations

import hashlib
import re
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, NamedTuple

from luce.errors import ArgumentError, FileError, OutOfMemory, UnsupportedError, about
from luce.files.gemma4 import PROJECTOR, UNIFIED
from luce.files.probe import fact
from luce.images.gemma4 import BudgetProcessor, budget_of
from luce.images.opening import pillow
from luce.images.pixels import Picture, Processor
from luce.native import File, ImageSpan, Model, Progress, Tower
from luce.planning.split import names_of

if TYPE_CHECKING:
    import numpy as np

ROW_BYTES = 1 << 30  # Rows that were encoded are kept within so many bytes,
PIXEL_BYTES = 256 << 20  # and stretched pixels of images that were opened.
FEWEST_TOKENS, MOST_TOKENS = 64, 16384  # Of an image: transformers' bounds.
FIRST_NAME = -2  # -1 is no token in too many places.
MOST_NAMES = 2**31 - 2


class Shown(NamedTuple):
    """An image of a prompt: its `rows` F32 (n, n_embd) stand for the tokens from `at` on. It has `height` x `width` of
    them. `fresh` says that it was encoded for this prompt."""

    at: int
    rows: np.ndarray
    height: int
    width: int
    fresh: bool = False

    @property
    def end(self) -> int:
        return self.at + len(self.rows)

    def span(self, begin: int, end: int) -> ImageSpan | None:
        """Returns what of it stands among the tokens begin .. end - 1 of the prompt."""
        first, last = max(begin, self.at), min(end, self.end)
        if first >= last:
            return None
        rows = self.rows[first - self.at : last - self.at]
        return ImageSpan(rows, first - begin, first - self.at, self.height, self.width)


class Placed(NamedTuple):
    """A prompt's tokens, in which names stand for rows of images, and where each image begins."""

    tokens: list[int]
    at: list[tuple[int, Picture]]


class Sight:
    """The tower of a file, on a device, and of several on the first: on a GPU it takes its memory at once, ahead of the
    model that it is opened for. Images of more than `tokens` tokens are reduced to that. Without it they are not, and
    those that have too many for memory are refused. `say` is told what whoever runs this should know. It is a context
    manager, and any thread may use it. Raises what opening the file and the tower raises, and ArgumentError where
    `tokens` are too few or many."""

    def __init__(
        self,
        path: str | Path,
        threads: int = 0,
        device: str = "cpu",
        tokens: int | None = None,
        say: Callable[[str], None] = lambda line: None,
    ):
        pillow()  # Where it is missing, that is said before an image comes.
        if tokens is not None and not FEWEST_TOKENS <= tokens <= MOST_TOKENS:
            raise ArgumentError(f"images of {tokens} tokens: expected {FEWEST_TOKENS} to {MOST_TOKENS}")
        self._file, self._say, self._said = File(path), say, False
        device = names_of(device)[0]  # Rows of images enter the model on its first one.
        try:
            with about(self._file.path):
                budget = budget_of(tokens) if _has_budget(self._file) else None
                try:
                    self.tower = Tower(self._file, device, budget or tokens or 0)
                except OutOfMemory as error:  # It names what the tower needs and what is free.
                    raise OutOfMemory(str(error), "image_tokens") from error
                self.processor = _processor(self._file, self.tower, tokens, budget)
        except BaseException:
            self._file.close()
            raise
        self.at_once = budget or 0  # Some models read an image at once, which has at most so many tokens.
        self.name: str | None = fact(self._file.kv, "general.name", str, None)
        self._threads, self._lock = threads, Lock()
        self.on_gpu = self._file.library.devices()[0].is_gpu if device == "auto" else device != "cpu"
        self._names: dict[bytes, int] = {}
        self._next = FIRST_NAME
        self._rows: OrderedDict[bytes, np.ndarray] = OrderedDict()
        self._pictures: OrderedDict[bytes, Picture] = OrderedDict()  # by the hash of a file's bytes

    @contextmanager
    def beside(self) -> Iterator[None]:
        """A lack of memory that a model meets within is told with what the tower holds of it."""
        try:
            yield
        except OutOfMemory as error:
            if not self.on_gpu:
                raise
            info = self.tower.info
            held = f"the vision tower holds {(info.weight_bytes + info.scratch_bytes) / 1e9:.1f} GB beside it"
            said = f"{error}; {held}, for images of up to {info.max_rows} tokens"
            raise OutOfMemory(said, "image_tokens") from error

    def require_fit(self, model: Model) -> None:
        """Raises FileError where the tower's rows do not fit the model, and UnsupportedError where it takes none."""
        self.tower.require_fit(model)

    def misnamed(self, model: str | None) -> str | None:
        """Says so where the tower's name is of another model than this one: it may fit, and show it nonsense."""
        ours, theirs = (re.sub(r"mmproj|[^a-z0-9.]", "", (name or "").lower()) for name in (model, self.name))
        if not ours or not theirs or ours in theirs or theirs in ours:
            return None
        named = f"{self._file.path} is named {self.name}, and the model {model}"
        return f"{named}: a tower of another model may fit it, and show it nonsense"

    def picture(self, data: bytes) -> Picture:
        """Returns the stretched pixels of an image, which is opened once while they are kept: it comes again with each
        turn of a conversation. Raises what Processor.picture raises."""
        known = hashlib.sha256(data).digest()
        with self._lock:
            if known in self._pictures:
                self._pictures.move_to_end(known)
                return self._pictures[known]
        found = self.processor.picture(data)
        with self._lock:
            self._pictures[known] = found
            while sum(each.rgb.nbytes for each in self._pictures.values()) > PIXEL_BYTES:
                self._pictures.popitem(last=False)
        return found

    def placed(self, tokens: Sequence[int], pad: int, pictures: Sequence[Picture]) -> Placed:
        """Returns the tokens with names in the place of each `pad`, one for each picture. Raises ArgumentError where
        they are not as many."""
        pads = sum(token == pad for token in tokens)
        if pads != len(pictures):
            raise ArgumentError(f"the prompt has places for {pads} images, and {len(pictures)} were given")
        made, left = Placed([], []), iter(pictures)
        for token in tokens:
            if token != pad:
                made.tokens.append(token)
                continue
            picture = next(left)
            made.at.append((len(made.tokens), picture))
            name = self._name_of(picture)
            made.tokens.extend(range(name, name - picture.rows, -1))
        return made

    def shown(self, placed: Placed, progress: Progress | None = None) -> tuple[Shown, ...]:
        """Returns the images of a prompt, of which those are encoded whose rows are not kept. `progress` is asked
        meanwhile, and may cancel (Cancelled)."""
        merge, needed = self.processor.merge, {self._key(picture) for _, picture in placed.at}

        def show(at: int, picture: Picture) -> Shown:
            rows, fresh = self._encoded(picture, needed, progress)
            return Shown(at, rows, picture.grid[0] // merge, picture.grid[1] // merge, fresh)

        return tuple(show(at, picture) for at, picture in placed.at)

    def kept(self, placed: Placed) -> tuple[Shown, ...] | None:
        """Returns the images of a prompt where the rows of all are kept, and None where one has to be encoded."""
        keys = {self._key(picture) for _, picture in placed.at}
        with self._lock:
            if not keys <= self._rows.keys():
                return None
        return self.shown(placed)

    def _key(self, picture: Picture) -> bytes:
        return picture.key(self.tower.info.identity.to_bytes(8, "little"))

    def _name_of(self, picture: Picture) -> int:
        """Returns the name of a picture's first row; those of the others follow downwards."""
        key = self._key(picture)
        with self._lock:
            if key not in self._names:
                if picture.rows > MOST_NAMES + self._next:
                    raise ArgumentError("too many images were seen: open the model again")
                self._names[key] = self._next
                self._next -= picture.rows
            return self._names[key]

    def _encoded(
        self, picture: Picture, needed: set[bytes], progress: Progress | None
    ) -> tuple[np.ndarray, bool]:
        """Returns an image's rows, of a prompt that has the images `needed`, and whether they were not kept. These all
        stay, also where they alone are more than ROW_BYTES: the next turn of a conversation has them again."""
        key = self._key(picture)
        with self._lock:
            if key in self._rows:
                self._rows.move_to_end(key)
                return self._rows[key], False
        rows = self.tower.encode(picture.patches(), picture.grid, self._threads, progress)
        with self._lock:
            self._rows[key] = rows
            over = sum(each.nbytes for each in self._rows.values()) - ROW_BYTES
            for other in [other for other in self._rows if other not in needed]:
                if over <= 0:
                    break
                over -= self._rows.pop(other).nbytes
        if over > 0 and not self._said:
            self._said = True
            held = f"{(ROW_BYTES + over) / 2**30:.1f} GiB of memory"
            self._say(f"the images of one request take {held}, where {ROW_BYTES >> 30} GiB are kept")
        return rows, True

    def close(self) -> None:
        self.tower.close()
        self._file.close()

    def __enter__(self) -> Sight:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _has_budget(file: File) -> bool:
    """Says whether the tower's images have a budget of rows, by its kind."""
    return _is(file, PROJECTOR) or _is(file, UNIFIED)


def _is(file: File, projector: str) -> bool:
    return any(file.kv.get(f"clip.{key}projector_type") == projector for key in ("vision.", ""))


def _processor(file: File, tower: Tower, tokens: int | None, budget: int | None) -> Processor:
    def three(key: str) -> Any:
        values = fact(file.kv, f"clip.vision.{key}", memoryview).tolist()
        if len(values) != 3 or not all(isinstance(value, float) and abs(value) < 100 for value in values):
            raise FileError(f"key clip.vision.{key}: expected three numbers, found {values!r:.80}")
        return tuple(values)

    mean, std = three("image_mean"), three("image_std")
    if min(std) <= 0:
        raise FileError(f"key clip.vision.image_std: expected numbers above 0, found {list(std)}")
    if budget is not None:
        if _is(file, PROJECTOR):  # The tower itself turns pixels of 0 to 1 into -1 to 1.
            mean, std = (tuple(m + s / 2 for m, s in zip(mean, std, strict=True)), tuple(s / 2 for s in std))
        sides = tower.info.patch, tower.info.merge
        return BudgetProcessor(*sides, mean, std, most_rows=tower.info.max_rows, budget=budget)
    made = Processor(tower.info.patch, tower.info.merge, mean, std, most_rows=tower.info.max_rows)
    return made if tokens is None else replace(made, max_pixels=tokens * made.side**2, reduced_to=tokens)


MARKS = (("<|vision_start|>", "<|image_pad|>", "<|vision_end|>"), ("<|image>", "<|image|>", "<image|>"))


def marks_of(control: Callable[[str], int | None]) -> tuple[int, int, int]:
    """Returns the tokens that begin an image, stand for a row of it, and end it; `control` gives the id of a control
    token. Raises UnsupportedError where the model has none."""
    for marks in MARKS:
        begin, row, end = map(control, marks)
        if begin is not None and row is not None and end is not None:
            return begin, row, end
    named = " and no ".join(row for _, row, _ in MARKS)
    raise UnsupportedError(f"the model's tokenizer has no {named}: it takes no images")


def with_places(ids: list[int], n: int, image: tuple[int, int, int], bos: int | None) -> list[int]:
    """Returns a raw prompt's tokens with places for n images: its own, or else n before it. `image` are the tokens of
    marks_of. Raises ArgumentError where it has other places than images."""
    places = ids.count(image[1])
    if places == n:
        return ids
    if places:
        said = f"the prompt spells the mark of an image {places} times, and {n} images are given: give one for each"
        raise ArgumentError(said)
    first = 1 if bos is not None and ids[:1] == [bos] else 0
    return [*ids[:first], *image * n, *ids[first:]]
