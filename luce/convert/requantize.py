"""Writes a GGUF again with its matrices in another type: a model, a NextN head, an assistant or a block drafter."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import gguf
import numpy as np

from luce import native as _native
from luce.convert.gguf_output import Planned, Written, require_free, slabs, tensor_bytes, write
from luce.convert.gguf_tokenizer import copy_keys
from luce.convert.weight_types import DEFAULT, MIXES, choose, is_matrix
from luce.errors import FileError, UnsupportedError, about
from luce.files.probe import probe

# luce does not implement drafters with such tensors, nor Markov heads with more than two matrices.
_REFUSED = re.compile(r"markov(?!_w[12]\.weight$)|rope_freqs|post_.*norm|layer_output_scale|hc_")


def requantize(
    source: Path,
    out: Path,
    kind: str = DEFAULT,
    threads: int = 0,
    say: Callable[[str], None] = lambda text: None,
    replace: bool = False,
) -> Written:
    """Writes the GGUF with its matrices as `kind` of MIXES, and with all keys and names as they are. A file
    that is there is to `replace`, or an error."""
    if out.exists() and out.samefile(source):
        raise FileError(f"{out} is the input: give the output another name")
    require_free(out, replace)
    mix = MIXES[kind]
    with _native.File(source) as file:
        with about(source):
            facts = probe(file)
            what, arch = facts.kind, facts.architecture
            if not (facts.supported or what in ("head", "drafter", "assistant")):
                raise UnsupportedError("; ".join(facts.reasons))
            plan = [_stored(file, index, what == "drafter") for index in range(len(file.tensors))]
        names = {t.name for t in plan}
        matrices = [(t.name, t.shape) for t in plan if t.stored is None]
        types, fallbacks = choose(mix, matrices, tied=what != "drafter" and "output.weight" not in names)
        lossy = {t.type_name for t in file.tensors} - {"F32", "F16", "BF16", "I32", "I64"}
        if lossy:
            say(f"the source is {', '.join(sorted(lossy))} already: an unquantised one would lose less")
        for fallback in fallbacks:
            say(str(fallback))
        writer = gguf.GGUFWriter(None, arch)
        left_out = ("general.architecture", "general.file_type", "general.alignment")
        copy_keys(writer, file, lambda key: key not in left_out and not key.startswith("split."))
        writer.add_file_type(mix.file_type)
        return write(out, writer, plan, types, file.library, threads=threads, replace=replace)


def _stored(file: _native.File, index: int, of_drafter: bool) -> Planned:
    """Returns tensor `index` of the file: a matrix to be quantised anew, anything else as it is."""
    tensor = file.tensors[index]
    if of_drafter and _REFUSED.search(tensor.name):
        raise UnsupportedError(f"tensor {tensor.name}: luce does not implement drafters that have it")
    shape = tuple(reversed(tensor.shape))
    kind = gguf.GGMLQuantizationType(tensor.type)
    data = tensor_bytes(file, index).reshape(int(np.prod(shape[:-1])), -1)
    if not is_matrix(tensor.name, shape):
        return Planned(tensor.name, shape, (tensor.name,), lambda: iter(()), data, kind.name)

    def rows() -> Iterator[np.ndarray]:
        return slabs(data, lambda part: gguf.quants.dequantize(part, kind))

    return Planned(tensor.name, shape, (tensor.name,), rows)
