"""Writes GGUF files whose tensors are a hole in them: shapes and types of real models, on no disk space."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

import gguf
import numpy as np

QType = gguf.GGMLQuantizationType


def write_without_weights(
    w: gguf.GGUFWriter, shapes: Mapping[str, tuple[int, ...]], type_of: Callable[[str], str]
) -> None:
    """Ends a file with tensors that are a hole in it."""
    total = 0
    for name, shape in shapes.items():
        kind = QType.I64 if name == "d2t" else QType[type_of(name)]
        values, size = gguf.GGML_QUANT_SIZES[kind]
        n_bytes = int(np.prod(shape, dtype=np.int64)) // values * size
        w.add_tensor_info(name, shape, np.dtype(np.float32), n_bytes, raw_dtype=kind)
        total += gguf.GGUFWriter.ggml_pad(n_bytes, w.data_alignment)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_ti_data_to_file()
    path = Path(w.path)
    w.close()
    os.truncate(path, path.stat().st_size + w.data_alignment + total)
