"""Has a GGUF and the weights that are loaded from it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from luce.native.library import Handle, Library, default
from luce.native.metadata import Metadata
from luce.native.structs import EngineParams, FileInfo, Memory, ModelInfo, Tensor

Progress = Callable[[float], object]  # It is given the part that is done, in 0..1. A true result cancels.


class File(Handle):
    """This is a GGUF, with all parts of a split one, mapped into memory. It gives facts and loads no
    weights."""

    def __init__(self, path: str | Path, library: Library | None = None):
        library = library or default()
        out = library.ffi.new("luce_file **")
        library.check(library.lib.luce_file_open(out, str(path).encode("utf-8", "surrogateescape")))
        super().__init__(library, out[0], library.lib.luce_file_close)
        self.path = Path(path)

    @cached_property
    def info(self) -> FileInfo:
        return self.library.read(FileInfo, self.library.lib.luce_file_get_info, self.handle)

    @cached_property
    def kv(self) -> Metadata:
        return Metadata(self)

    @cached_property
    def tensors(self) -> list[Tensor]:
        return [self._tensor(index) for index in range(self.info.n_tensors)]

    def _tensor(self, index: int) -> Tensor:
        tensor = self.library.struct("luce_tensor_info")
        self.library.check(self.library.lib.luce_file_get_tensor(self.handle, index, tensor))
        shape = tuple(tensor.ne[0 : tensor.n_dims])
        name, type_name = self.library.text(tensor.name), self.library.text(tensor.type_name)
        return Tensor(name, type_name, tensor.type, shape, tensor.size_bytes)

    def plan_memory(
        self,
        device: str = "auto",
        params: EngineParams | None = None,
        head: File | None = None,
        drafter: File | None = None,
        cpu_experts: int = 0,
    ) -> Memory:
        """Returns what a model and one engine of it need, in bytes. Raises what opening the model would
        raise: UnsupportedError or FileError where luce cannot run the files."""
        library = self.library
        model = _model_params(library, device, head, drafter, cpu_experts)
        engine = engine_params(library, params or EngineParams())
        return library.read(
            Memory, library.lib.luce_plan_memory, self.handle, model.struct, engine.struct
        )


@dataclass
class Params:
    """This is a C struct together with what it points to, which has to live as long."""

    struct: Any
    kept: tuple[Any, ...]


def _model_params(
    library: Library,
    device: str,
    head: File | None,
    drafter: File | None,
    cpu_experts: int,
    progress: Any = None,
) -> Params:
    name = library.ffi.new("char[]", device.encode())
    struct = library.struct("luce_model_params", device=name, n_cpu_experts=cpu_experts)
    if head is not None:
        struct.head = head.handle
    if drafter is not None:
        struct.drafter = drafter.handle
    if progress is not None:
        struct.progress = progress
    return Params(struct, (name, head, drafter, progress))


def engine_params(library: Library, params: EngineParams) -> Params:
    """Returns `params` as luce_engine_params."""
    fields: dict[str, Any] = dict(vars(params))
    kv_type = fields.pop("kv_type")
    name = library.ffi.NULL if kv_type is None else library.ffi.new("char[]", kv_type.encode())
    return Params(library.struct("luce_engine_params", kv_type=name, **fields), (name,))


class Model(Handle):
    """Weights on a device, with the NextN head that `head` holds (the model's own file or another) and the
    DFlash drafter of `drafter`. Of the first `cpu_experts` layers the experts stay in host memory, where the
    CPU multiplies them. `progress` may cancel (Cancelled); what it raises is raised here."""

    def __init__(
        self,
        file: File,
        device: str = "auto",
        progress: Progress | None = None,
        head: File | None = None,
        drafter: File | None = None,
        cpu_experts: int = 0,
    ):
        library = file.library
        raised: list[BaseException] = []
        callback = None
        if progress is not None:
            callback = library.ffi.callback(
                "luce_progress_fn",
                lambda fraction, _: 1 if progress(fraction) else 0,
                error=1,
                onerror=lambda kind, error, trace: raised.append(error),
            )
        params = _model_params(library, device, head, drafter, cpu_experts, callback)
        self.cpu_experts = cpu_experts
        out = library.ffi.new("luce_model **")
        status = library.lib.luce_model_open(out, file.handle, params.struct)
        if status == 0:
            super().__init__(library, out[0], library.lib.luce_model_close)
        if raised:
            self.close() if status == 0 else None
            raise raised[0]
        library.check(status)

    @cached_property
    def info(self) -> ModelInfo:
        return self.library.read(ModelInfo, self.library.lib.luce_model_get_info, self.handle)
