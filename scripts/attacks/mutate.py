"""Seeded changes of an input: bits, bytes, slices, tokens that break parsers, splices of two."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from typing import Any

Change = Callable[[random.Random, bytes, bytes], bytes]

TOKENS = (
    *(b"nan", b"NaN", b"Infinity", b"-inf", b"1e999", b"-1", b"0", b"1e-45", b"0x7fffffff", b"1_0"),
    *(b"2147483648", b"4294967295", b"18446744073709551616", b"9" * 400, b"9" * 5000, b"0.1" * 99),
    *(b"\x1b[2J", b"\x1b]0;x\x07", b"\x9b1m", b"\x00", b"\r", b"\n", b"\r\n", b"\x0b", b"\x7f"),
    *("\u2028".encode(), "\u202e".encode(), "\u2066".encode(), "\u200b".encode(), b"\xef\xbb\xbf"),
    *(b"\xff", b"\xed\xa0\x80", b"\xc0\x80", b"\xf4\x90\x80\x80", "\U0001f600".encode()),
    *(b"[" * 5000, b'{"a":' * 5000, b"(" * 999, b"a.b." * 999, b"A" * 5000),
    *(b'"', b"'", b"\\", b"\\u0000", b"\\ud800", b"#", b"=", b":", b": ", b",", b" ", b"\t", b"-"),
    *(b"null", b"true", b"{}", b"[]", b"[[]]", b'""', b"''", b"..", b"/dev/zero", b"../" * 50),
    *(b"$(x)", b"`x`", b"; x", b"| x", b"<script>", b"%s%n", b"*", b"[!]", b"@", b"op:", b"~"),
    *(b"\x80" * 9 + b"\x01", b"\xff" * 8, b"\x00" * 8, b"\xff\xff\xff\x7f", b"PK\x03\x04"),
)  # fmt: skip
_NUMBER = re.compile(rb"-?[0-9]+(?:[.][0-9]+)?(?:[eE][-+]?[0-9]+)?")
_MOST = 1 << 20  # bytes; a slice that doubles itself again and again stops here


def mutated(rng: random.Random, data: bytes, other: bytes) -> bytes:
    """`data` after one to six changes; `other` is what it may be spliced with."""
    for _ in range(min(1 + int(rng.expovariate(0.7)), 6)):
        data = rng.choice(CHANGES)(rng, data, other)
    return data[:_MOST]


def _flip(rng: random.Random, data: bytes, other: bytes) -> bytes:
    return _at(rng, data, lambda byte: byte ^ (1 << rng.randrange(8)))


def _set(rng: random.Random, data: bytes, other: bytes) -> bytes:
    return _at(rng, data, lambda byte: rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256))))


def _at(rng: random.Random, data: bytes, change: Callable[[int], int]) -> bytes:
    if not data:
        return data
    changed = bytearray(data)
    place = rng.randrange(len(data))
    changed[place] = change(changed[place])
    return bytes(changed)


def _slice(rng: random.Random, data: bytes) -> tuple[int, int]:
    """Places of a slice; short ones are likelier."""
    start = rng.randrange(len(data) + 1)
    length = int(rng.random() ** 4 * len(data)) + 1
    return start, min(start + length, len(data))


def _remove(rng: random.Random, data: bytes, other: bytes) -> bytes:
    start, end = _slice(rng, data)
    return data[:start] + data[end:]


def _repeat(rng: random.Random, data: bytes, other: bytes) -> bytes:
    start, end = _slice(rng, data)
    times = rng.choice((2, 2, 3, 50))
    return (data[:start] + data[start:end] * times + data[end:])[:_MOST]


def _swap(rng: random.Random, data: bytes, other: bytes) -> bytes:
    a, b, c, d = sorted((*_slice(rng, data), *_slice(rng, data)))
    return data[:a] + data[c:d] + data[b:c] + data[a:b] + data[d:]


def _cut(rng: random.Random, data: bytes, other: bytes) -> bytes:
    return data[: rng.randrange(len(data) + 1)]


def _insert(rng: random.Random, data: bytes, other: bytes) -> bytes:
    place = rng.randrange(len(data) + 1)
    return data[:place] + rng.choice(TOKENS) + data[place:]


def _overwrite(rng: random.Random, data: bytes, other: bytes) -> bytes:
    token = rng.choice(TOKENS)
    place = rng.randrange(len(data) + 1)
    return data[:place] + token + data[place + len(token) :]


def _number(rng: random.Random, data: bytes, other: bytes) -> bytes:
    """Another token in place of a number."""
    found = list(_NUMBER.finditer(data))
    if not found:
        return data
    one = rng.choice(found)
    return data[: one.start()] + rng.choice(TOKENS) + data[one.end() :]


def _splice(rng: random.Random, data: bytes, other: bytes) -> bytes:
    return data[: rng.randrange(len(data) + 1)] + other[rng.randrange(len(other) + 1) :]


CHANGES: tuple[Change, ...] = (
    _flip, _flip, _set, _set, _remove, _repeat, _swap, _cut, _insert, _insert, _overwrite, _number,
    _number, _splice,
)  # fmt: skip


VALUES: tuple[Any, ...] = (
    *(3, -1, 0, 10**400, 2.5, float("nan"), float("inf"), "", "3", "a\ud800", None, True, [], {}),
    *([[]], [None], [3], {"id": 3}, {"a": {}}, ["a", 1]),
)


def retyped(rng: random.Random, data: bytes, other: bytes) -> bytes:
    """JSON or TOML whose values are of other types, in every second case; else as `mutated`."""
    if rng.random() < 0.5:
        return mutated(rng, data, other)
    for _ in range(rng.choice((1, 1, 2, 3))):
        data = _retype(rng, data)
    return data


def _retype(rng: random.Random, data: bytes) -> bytes:
    value = rng.choice(VALUES)
    try:
        document = json.loads(data)
    except ValueError:
        return _retype_line(rng, data, json.dumps(value).encode())
    if not isinstance(document, dict | list):
        return json.dumps([value]).encode()
    places: list[tuple[Any, Any]] = []
    pending = [document]
    while pending:
        parent = pending.pop()
        keys = list(parent) if isinstance(parent, dict) else range(len(parent))
        places += [(parent, key) for key in keys]
        pending += [parent[key] for key in keys if isinstance(parent[key], dict | list)]
    if not places:
        return json.dumps(value).encode()
    parent, key = rng.choice(places)
    parent[key] = value
    return json.dumps(document).encode()


_LINE = re.compile(rb"(?m)^([^=\n]+ = ).*$")


def _retype_line(rng: random.Random, data: bytes, value: bytes) -> bytes:
    """Another value on one line of TOML."""
    lines = list(_LINE.finditer(data))
    if not lines:
        return data
    line = rng.choice(lines)
    return data[: line.end(1)] + value + data[line.end() :]
