"""The models that come with luce: a small Qwen3.5 that writes Python (CARD.md), and a DFlash drafter for it."""

from pathlib import Path

BOX = Path(__file__).with_name("box.gguf")
BOX_DRAFTER = Path(__file__).with_name("box-dflash.gguf")
