"""Has the core through its flat C ABI (native/include/luce.h).

Each handle is a context manager; closing twice is harmless, a closed handle raises StateError. Handles may be
closed in any order. Every failed call raises the Error subclass of its luce_status with the core's
one-line message.
"""

from luce.native.engine import CHOSEN, DRAFTED, Checkpoint, Drafts, Engine, ImageSpan, Prompt, Rows, Sequence, Verified
from luce.native.files import File, Model, Progress
from luce.native.library import Handle, IntArray, Library, Lists, OpArray, default, load, use
from luce.native.structs import Form, Source
from luce.native.tower import Tower

__all__ = [
    "CHOSEN",
    "DRAFTED",
    "Checkpoint",
    "Drafts",
    "Engine",
    "File",
    "Form",
    "Handle",
    "ImageSpan",
    "IntArray",
    "Library",
    "Lists",
    "Model",
    "OpArray",
    "Progress",
    "Prompt",
    "Rows",
    "Sequence",
    "Source",
    "Tower",
    "Verified",
    "default",
    "load",
    "use",
]
