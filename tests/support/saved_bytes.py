"""Changes saved checkpoints under a checksum that is right, as another build of luce, or who knows the
layout, would write them."""

from __future__ import annotations

import struct

HEADER = 320  # A saved checkpoint has so many bytes before its tokens.
# The header's fields begin at these bytes. The last two are text.
VERSION, KV_TYPE, MODEL, CHECKSUM, N_PAST, N_CUT, LAG, BUILD, ARITHMETIC = 8, 12, 16, 32, 40, 44, 52, 56, 80


def total(data: bytes) -> int:
    """Sums bytes as the core's Checksum does: words of 64 bits, the last one filled up with zeros."""
    value = 0x9E3779B97F4A7C15 ^ len(data)
    for at in range(0, len(data), 8):
        value = (value ^ int.from_bytes(data[at : at + 8], "little")) * 0xFF51AFD7ED558CCD % 2**64
        value ^= value >> 32
    return value


def lag(data: bytes) -> int:
    """Returns how far positions of RoPE are ahead of indices, by a sequence's checkpoint or dump: less than 0 behind an
    image."""
    return int.from_bytes(data[LAG : LAG + 4], "little", signed=True)


def changed(saved: bytes, at: int, value: int) -> bytes:
    """Returns the bytes with 32 of their bits replaced."""
    data = bytearray(saved)
    data[at : at + 4] = value.to_bytes(4, "little")
    data[CHECKSUM : CHECKSUM + 8] = bytes(8)
    checksum = total(bytes(data[:HEADER])) ^ total(bytes(data[HEADER:]))
    data[CHECKSUM : CHECKSUM + 8] = checksum.to_bytes(8, "little")
    return bytes(data)


def former(saved: bytes, version: int, n_chunk: int) -> bytes:
    """Returns the checkpoint with a header as luce wrote it before: in version 6 without how far positions lag behind
    images, in version 5 with the engine's n_chunk in the place of n_cut, and in version 4 also with two numbers that
    said whether there was a NextN head and a DFlash drafter, where bits name the model's drafters since. What follows
    the header lay layer by layer up to version 7, and is not read."""
    magic, now, kv_type, model, size, _, n_past, _, drafters, _ = struct.unpack_from("<8sIIQQQIIII", saved)
    assert (magic, now) == (b"LUCECHKP", 8)
    heads = (drafters, 0) if version > 4 else (drafters & 1, drafters >> 1 & 1)
    head = struct.pack("<8sIIQQQIIII", magic, version, kv_type, model, size, 0, n_past, n_chunk, *heads)
    return changed(head + saved[len(head) :], VERSION, version)
