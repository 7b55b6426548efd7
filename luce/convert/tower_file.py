"""What the files of all towers have in common (llama.cpp's mmproj), and how their tensors are found in a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence

import gguf

from luce.convert.safetensors_reader import Checkpoint, Source
from luce.errors import FileError


def add_tower_keys(
    w: gguf.GGUFWriter, name: str, file_type: int, sizes: dict[str, int], eps: float, mean: Sequence[float],
    std: Sequence[float],
) -> None:  # fmt: skip
    """Writes the keys of any tower, as llama.cpp's converter does, but for those of its projector. `sizes` are those of
    clip.vision."""
    w.add_type("mmproj")
    w.add_name(name)
    w.add_file_type(file_type)
    w.add_quantization_version(gguf.GGML_QUANT_VERSION)
    w.add_bool("clip.has_vision_encoder", True)
    for key, value in sizes.items():
        w.add_uint32(f"clip.vision.{key}", value)
    w.add_float32("clip.vision.attention.layer_norm_epsilon", eps)
    w.add_array("clip.vision.image_mean", list(mean))
    w.add_array("clip.vision.image_std", list(std))


def found_in(checkpoint: Checkpoint, prefixes: Sequence[str], called: str, *shapes: tuple[int, ...]) -> Source:
    """Returns the tensor behind the first of the prefixes that the checkpoint has it with. Raises FileError where it is
    not there, or has none of these shapes."""
    found = next((prefix + called for prefix in prefixes if prefix + called in checkpoint), prefixes[0] + called)
    source = checkpoint[found]
    if source.shape not in shapes:
        raise FileError(f"tensor {found} is of shape {list(source.shape)}, expected {list(shapes[0])}")
    return source
