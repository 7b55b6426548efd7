"""Gives the model in the box as the tests see it: its files, its hyperparameters, the same weights in F32."""

from __future__ import annotations

from pathlib import Path

import ref
import tiny

import luce

DATA = Path(luce.__file__).resolve().parent / "data"
GGUF, DRAFTER = DATA / "box.gguf", DATA / "box-dflash.gguf"
CONFIG = tiny.Config(
    n_layer=12, interval=4, n_embd=256, n_ff=1024, n_head=4, n_head_kv=2, head_dim=64, rope_dim=64,
    n_k_head=4, n_v_head=8, state_size=64, n_vocab=4096, rope_base=1e6, tied=True, n_nextn=1,
)  # fmt: skip

PROMPTS = (
    "import unittest\n\n\nclass TestQueue(unittest.TestCase):\n    def setUp(self):\n",
    "class Point:\n    def __init__(self, x, y):\n        self.x = x\n        self.y = y\n\n",
    "import os\n\n\ndef read_lines(path):\n",
    "import argparse\n\n\ndef main():\n    parser = argparse.ArgumentParser()\n",
    "from dataclasses import dataclass\n\n\n@dataclass\nclass User:\n",
    "def merge(left, right):\n    result = []\n    while left and right:\n",
    "class Counter:\n    def __init__(self):\n        self.counts = {}\n\n    def add(self, key):\n",
    "def fibonacci(n: int) -> int",
)


def write_f32(path: Path) -> Path:
    """Writes box.gguf's weights, dequantised, as an F32 file (with a test tokenizer)."""
    return tiny.write(path, CONFIG, ref.read_gguf(str(GGUF)))
