"""Has a vision tower, which makes rows of a prompt out of an image."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING, Any

from luce.native.files import File, Model, Progress
from luce.native.library import Handle
from luce.native.structs import TowerInfo

if TYPE_CHECKING:
    import numpy as np


class Tower(Handle):
    """The vision tower of a file, on a device. An image has at most `max_rows` rows, whose memory a GPU takes at once;
    with 0 it is what a part of the device's memory has room for. Raises FileError and UnsupportedError where luce does
    not run it there, and OutOfMemory."""

    def __init__(self, file: File, device: str = "cpu", max_rows: int = 0):
        library = file.library
        out, name = library.ffi.new("luce_tower **"), library.ffi.new("char[]", device.encode())
        params = library.struct("luce_tower_params", device=name, max_rows=max_rows)
        library.check(library.lib.luce_tower_open(out, file.handle, params))
        super().__init__(library, out[0], library.lib.luce_tower_close)
        self.path = file.path

    def require_fit(self, model: Model) -> None:
        """Raises FileError where its rows have another width than the model's, and UnsupportedError where the model
        takes no images."""
        self.library.check(self.library.lib.luce_tower_check(self.handle, model.handle))

    @cached_property
    def info(self) -> TowerInfo:
        return self.library.read(TowerInfo, self.library.lib.luce_tower_get_info, self.handle)

    def encode(
        self, patches: np.ndarray, grid: tuple[int, int], threads: int = 0, progress: Progress | None = None
    ) -> np.ndarray:
        """Returns the rows F32 (n, n_out) of one image, whose patches F32 (rows * columns, 3 * patch * patch) are in
        the order of luce.h (luce_tower_encode). `progress` may cancel (Cancelled); what it raises is raised here."""
        import numpy as np

        info, library = self.info, self.library
        rows, columns = grid
        given = np.ascontiguousarray(patches, np.float32)
        if given.shape != (rows * columns, 3 * info.patch**2):
            raise ValueError(f"patches are of shape {given.shape}, the grid is {rows} x {columns}")
        out = np.empty((rows * columns // info.merge**2, info.n_out), np.float32)
        raised: list[BaseException] = []
        callback: Any = library.ffi.NULL
        if progress is not None:
            callback = library.ffi.callback("luce_progress_fn", _asked(progress), error=1, onerror=_keep(raised))
        status = library.lib.luce_tower_encode(
            self.handle, library.ffi.from_buffer("float[]", given), rows, columns, threads, callback, library.ffi.NULL,
            library.ffi.from_buffer("float[]", out), out.size,
        )  # fmt: skip
        if raised:
            raise raised[0]
        library.check(status)
        return out


def _asked(progress: Progress) -> Callable[[float, Any], int]:
    return lambda fraction, _: 1 if progress(fraction) else 0


def _keep(raised: list[BaseException]) -> Callable[[Any, BaseException, Any], None]:
    return lambda kind, error, trace: raised.append(error)
