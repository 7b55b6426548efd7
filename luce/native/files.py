"""Has a GGUF and the weights that are loaded from it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from luce.errors import ArgumentError
from luce.native.library import Handle, Library, default
from luce.native.metadata import Metadata
from luce.native.structs import (
    CHAINS,
    DeviceMemory,
    DrafterInfo,
    DrafterParams,
    EngineParams,
    FileInfo,
    Memory,
    ModelInfo,
    Tensor,
)

# The file of a drafter, and its kind: "nextn", "assistant", "dflash", or None for what the file holds.
DrafterFile = tuple["File", str | None]
Progress = Callable[[float], object]  # It is given the part that is done, in 0..1. A true result cancels.


def is_assistant(architecture: object) -> bool:
    """Says whether general.architecture is that of an assistant, which drafts chains with its target's K and V."""
    return isinstance(architecture, str) and architecture.endswith(("-assistant", "_assistant"))


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
        return Metadata(self, self.info.n_kv)

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
        drafters: Sequence[DrafterFile] = (),
        layers: Sequence[int] = (),
        copy_bytes: int = 0,
        draft_device: str | None = None,
        experts_at_home: bool = False,
    ) -> Memory:
        """Returns what a model and one engine of it need, in bytes. Raises what opening the model would
        raise: UnsupportedError or FileError where luce cannot run the files."""
        library = self.library
        listed = _listed(head, drafter, drafters)
        model = _model_params(library, device, draft_device, listed, cpu_experts, layers, copy_bytes, experts_at_home)
        engine = engine_params(library, params or EngineParams(), [kind for _, kind in listed])
        out = library.struct("luce_memory")
        library.check(library.lib.luce_plan_memory(self.handle, model.struct, engine.struct, out))

        devices = tuple(library.filled(DeviceMemory, each) for each in out.devices[0 : out.n_devices])
        return replace(library.filled(Memory, out), devices=devices)


@dataclass
class Params:
    """This is a C struct together with what it points to, which has to live as long."""

    struct: Any
    kept: tuple[Any, ...]


def _listed(head: File | None, drafter: File | None, more: Sequence[DrafterFile]) -> list[DrafterFile]:
    """Returns a model's list of drafters: a NextN head or an assistant, a DFlash drafter, and more."""
    chain = head is not None and is_assistant(head.kv.get("general.architecture"))
    named = [(head, "assistant" if chain else "nextn"), (drafter, "dflash")]
    return [(file, kind) for file, kind in named if file is not None] + list(more)


def _model_params(
    library: Library,
    device: str,
    draft_device: str | None,
    drafters: Sequence[DrafterFile],
    cpu_experts: int,
    layers: Sequence[int],
    copy_bytes: int,
    experts_at_home: bool,
    progress: Any = None,
) -> Params:
    new = library.ffi.new
    name, listed = new("char[]", device.encode()), new("luce_drafter_file[]", max(len(drafters), 1))
    drafts_on = library.ffi.NULL if draft_device is None else new("char[]", draft_device.encode())
    kinds = [library.ffi.NULL if kind is None else new("char[]", kind.encode()) for _, kind in drafters]
    for struct, (file, _), kind in zip(listed, drafters, kinds, strict=False):
        struct.file, struct.kind = file.handle, kind
    made = library.struct(
        "luce_model_params", device=name, draft_device=drafts_on, n_cpu_experts=cpu_experts, drafters=listed,
        n_drafters=len(drafters), copy_bytes=copy_bytes, experts_at_home=int(experts_at_home),
    )  # fmt: skip
    counts = new("uint32_t[]", list(layers) or 1)
    if layers:
        made.layers, made.n_layers = counts, len(layers)
    if progress is not None:
        made.progress = progress
    return Params(made, (name, drafts_on, listed, kinds, drafters, counts, progress))


def engine_params(library: Library, params: EngineParams, kinds: Sequence[str | None]) -> Params:
    """Returns `params` as luce_engine_params, for a model with drafters of these kinds."""
    fields: dict[str, Any] = dict(vars(params))
    asked = [*_asked(fields.pop("n_draft"), fields.pop("n_part"), fields.pop("blocks"), kinds), *params.drafters]
    kv_type = fields.pop("kv_type")
    name = library.ffi.NULL if kv_type is None else library.ffi.new("char[]", kv_type.encode())
    listed = library.ffi.new("luce_drafter_params[]", max(len(asked), 1))
    for struct, each in zip(listed, asked, strict=False):
        struct.drafter, struct.n_draft, struct.n_part = each.drafter, each.n_draft, each.n_part
    fields |= {"drafters": listed, "n_drafters": len(asked)}
    return Params(library.struct("luce_engine_params", kv_type=name, **fields), (name, listed))


def _asked(n_draft: int, n_part: int, blocks: int, kinds: Sequence[str | None]) -> list[DrafterParams]:
    """Returns the entries that EngineParams asks for by kinds."""
    chain = next((index for index, kind in enumerate(kinds) if kind in CHAINS), None)
    if n_draft and chain is None:
        raise ArgumentError(f"n_draft is {n_draft}, but the model was opened without a NextN head or an assistant")
    if n_part and not n_draft:
        raise ArgumentError(f"n_part is {n_part}, expected 0 where n_draft is 0")
    if blocks not in (0, 1):
        raise ArgumentError(f"blocks is {blocks}, expected 0 or 1")
    if blocks and "dflash" not in kinds:
        raise ArgumentError("blocks are to be drafted, but the model was opened without a DFlash drafter")
    sizes = (0, n_part)[: 1 + bool(n_part)] if n_draft else ()
    head = [DrafterParams(chain or 0, n_draft, n) for n in sizes]
    return head + ([DrafterParams(kinds.index("dflash"))] if blocks else [])


class Model(Handle):
    """Weights on a device, with a list of drafters: the NextN head that `head` holds (the model's own file or
    another) or the assistant that it is, the DFlash drafter of `drafter`, and those of `drafters`. Of several
    devices ("cuda:0,cuda:1") each has its number of `layers`, or as many as its memory has room for. The output and the
    drafters are where the last layers are, or on a `draft_device` without layers. Of the first
    `cpu_experts` layers the experts stay in host memory, where the CPU multiplies them. Each GPU keeps up to
    `copy_bytes` of F16 copies of its layers' matrices, which prompts read (luce_model_params). With `experts_at_home`
    all experts have their home in host memory, where the device reads those that have no slot on it. `progress` may
    cancel (Cancelled); what it raises is raised here."""

    def __init__(
        self,
        file: File,
        device: str = "auto",
        progress: Progress | None = None,
        head: File | None = None,
        drafter: File | None = None,
        cpu_experts: int = 0,
        drafters: Sequence[DrafterFile] = (),
        layers: Sequence[int] = (),
        copy_bytes: int = 0,
        draft_device: str | None = None,
        experts_at_home: bool = False,
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
        listed = _listed(head, drafter, drafters)
        params = _model_params(
            library, device, draft_device, listed, cpu_experts, layers, copy_bytes, experts_at_home, callback
        )
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
        lib, read = self.library.lib, self.library.read
        info = read(ModelInfo, lib.luce_model_get_info, self.handle)
        listed = (read(DrafterInfo, lib.luce_model_get_drafter, self.handle, n) for n in range(info.n_drafters))
        return replace(info, drafters=tuple(listed))
