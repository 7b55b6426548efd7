"""Makes C++ of CUDA source, for what stands in for a device (emulated/, graphs/)."""

from __future__ import annotations

import re
from pathlib import Path


def as_cpp(text: str) -> str:
    """Launches and dynamic shared memory in C++; what else CUDA adds are macros."""
    shared = r"extern __shared__ (?:__align__\(\d+\) )?(\w+) (\w+)\[\];"
    text = re.sub(shared, r"\1 *\2 = reinterpret_cast<\1 *>(emulated::dynamic_shared);", text)
    text = re.sub(r"^( *)__shared__ (.*);(?: //.*)?$", counted, text, flags=re.M)
    return re.sub(
        r"(\w+(?:<[\w, ]+>)?)\s*<<<(.*?),(.*?),([^,]*?),\s*([^,]*?)>>>\((.*?)\);",
        r"emulated::launch(\2, \3, \4, [&] { \1(\6); });",
        text,
        flags=re.S,
    )


def counted(found: re.Match[str]) -> str:
    """What a kernel declares as shared, with its bytes told to the emulated device."""
    names = re.findall(r"(\w+)(?:\[[^\]]*\])*(?=,|$)", re.sub(r"<.*?>", "", found[2]))
    told = "".join(f" emulated::declares(&{name}, sizeof({name}));" for name in names)
    return f"{found[1]}static {found[2]};{told}"


def copy(text: str, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
