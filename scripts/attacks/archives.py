"""Containers closed again after what they hold was changed, so that a reader looks inside."""

from __future__ import annotations

import io
import random
import struct
import zipfile
import zlib

from scripts.attacks.mutate import mutated

_PNG = b"\x89PNG\r\n\x1a\n"


def changed_zip(rng: random.Random, data: bytes, other: bytes) -> bytes:
    """An .npz: in every other case a member is changed and the archive's sums are right again."""
    if rng.random() < 0.5:
        return mutated(rng, data, other)
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    name = rng.choice(list(members))
    members[name] = mutated(rng, members[name], rng.choice(list(members.values())))
    if rng.random() < 0.2:
        members[str(mutated(rng, name.encode(), b"0.x.npy")[:999], "utf-8", "replace")] = (
            members.pop(name)
        )
    buffer = io.BytesIO()
    way = rng.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED))
    with zipfile.ZipFile(buffer, "w", way) as archive:
        for name, held in members.items():
            archive.writestr(zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0)), held, way)
    return buffer.getvalue()


def changed_png(rng: random.Random, data: bytes, other: bytes) -> bytes:
    """A PNG: in every other case the sums of its chunks are right again."""
    data = mutated(rng, data, other)
    return data if rng.random() < 0.5 else _summed(data)


def _summed(data: bytes) -> bytes:
    place = len(_PNG)
    pieces = [data[:place]]
    while place + 12 <= len(data):
        (length,) = struct.unpack(">I", data[place : place + 4])
        body = data[place + 4 : place + 8 + length]
        pieces.append(data[place : place + 4] + body + struct.pack(">I", zlib.crc32(body)))
        place += 12 + length
    return b"".join(pieces) + data[place:]
