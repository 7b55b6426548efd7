"""Writes GGUF files whose tensors are a hole in them: shapes and types of real models, on no disk space. The order of a
vocabulary alone is there, since the core checks it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

import gguf
import numpy as np

from luce.convert.gemma4_layout import ORDERING

QType = gguf.GGMLQuantizationType
IDS = {"d2t": QType.I64, ORDERING: QType.I32}


def write_without_weights(
    w: gguf.GGUFWriter, shapes: Mapping[str, tuple[int, ...]], type_of: Callable[[str], str]
) -> None:
    """Ends a file with tensors that are a hole in it."""
    total, orders = 0, dict[int, int]()
    for name, shape in shapes.items():
        kind = IDS[name] if name in IDS else QType[type_of(name)]
        if name == ORDERING:
            orders[total] = shape[0]
        values, size = gguf.GGML_QUANT_SIZES[kind]
        n_bytes = int(np.prod(shape, dtype=np.int64)) // values * size
        w.add_tensor_info(name, shape, np.dtype(np.float32), n_bytes, raw_dtype=kind)
        total += gguf.GGUFWriter.ggml_pad(n_bytes, w.data_alignment)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_ti_data_to_file()
    path = Path(w.path)
    w.close()
    begin = gguf.GGUFWriter.ggml_pad(path.stat().st_size, w.data_alignment)
    os.truncate(path, begin + w.data_alignment + total)
    with path.open("r+b") as file:
        for at, n in orders.items():
            file.seek(begin + at)
            file.write(np.arange(n, dtype="<i4").tobytes())
