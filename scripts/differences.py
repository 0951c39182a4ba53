"""The first difference of two files, in words."""

from __future__ import annotations

import math
import re
import struct
from pathlib import Path
from typing import Any

_CACHE_LINE = re.compile(r"(.*): ([0-9a-f]{1,8})")
_NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")


def difference(old: Path, new: Path) -> str | None:
    """None where the files are equal byte for byte, else where they first differ, and how far."""
    a, b = old.read_bytes(), new.read_bytes()
    if a == b:
        return None
    if old.suffix == ".onnx":
        return models(old, new)
    try:
        return texts(a.decode(), b.decode())
    except UnicodeDecodeError:
        at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), len(a))
        return f"byte {at} of {len(a)} and {len(b)}"


def texts(old: str, new: str) -> str:
    """The first line that differs, its numbers compared, and how many do."""
    a, b = old.splitlines(), new.splitlines()
    pairs = [(n, x, y) for n, (x, y) in enumerate(zip(a, b, strict=False), 1) if x != y]
    sizes = "" if len(a) == len(b) else f"; {len(a)} lines became {len(b)}"
    if not pairs:
        return f"the line ends{sizes}" if not sizes else sizes[2:]
    number, x, y = pairs[0]
    return f"{len(pairs)} lines, first {number}: {_line(x, y)}{sizes}"


def _line(old: str, new: str) -> str:
    cached = _CACHE_LINE.fullmatch(old), _CACHE_LINE.fullmatch(new)
    if cached[0] and cached[1] and cached[0][1] == cached[1][1]:
        a, b = (struct.unpack("!f", bytes.fromhex(m[2].zfill(8)))[0] for m in cached if m)
        return f"scale of {cached[0][1]}: {_change(a, b)}"
    if _NUMBER.sub("#", old) == _NUMBER.sub("#", new):
        for a_text, b_text in zip(_NUMBER.findall(old), _NUMBER.findall(new), strict=True):
            if a_text != b_text:
                label = old.split(a_text)[0].strip(" \t:\"',=[{") or "a number"
                return f"{label}: {_change(float(a_text), float(b_text))}"
    return f"{_short(old)} became {_short(new)}"


def _change(old: float, new: float) -> str:
    if old and math.isfinite(old) and math.isfinite(new):
        return f"{old:.7g} became {new:.7g} ({new / old - 1:+.2%})"
    return f"{old:.7g} became {new:.7g}"


def _short(text: str) -> str:
    return repr(text.strip()[:60])


def models(old: Path, new: Path) -> str:
    """Which initializers and nodes of two ONNX models differ."""
    import onnx

    a, b = onnx.load(old), onnx.load(new)
    said = [
        _named("initializers", _by_name(a.graph.initializer), _by_name(b.graph.initializer)),
        _named("nodes", _numbered(a.graph.node), _numbered(b.graph.node)),
        _named("inputs", _by_name(a.graph.input), _by_name(b.graph.input)),
        _named("outputs", _by_name(a.graph.output), _by_name(b.graph.output)),
        _named("value infos", _by_name(a.graph.value_info), _by_name(b.graph.value_info)),
    ]
    said = [one for one in said if one]
    for model in (a, b):
        del model.graph.initializer[:], model.graph.node[:], model.graph.value_info[:]
        del model.graph.input[:], model.graph.output[:]
    if a != b:
        said.append("the header (producer, opset or metadata)")
    return "; ".join(said) or "the same model in other bytes: the order of its parts"


def _by_name(parts: Any) -> dict[str, Any]:
    return {part.name: part for part in parts}


def _numbered(nodes: Any) -> dict[str, Any]:
    return {node.name or f"{node.op_type} of {','.join(node.output)}": node for node in nodes}


def _named(what: str, old: dict[str, Any], new: dict[str, Any]) -> str:
    """How many parts of one kind differ, and the first of them."""
    changed = [name for name in old if name in new and old[name] != new[name]]
    said = []
    if changed:
        first = changed[0]
        values = _values(old[first], new[first]) if what == "initializers" else ""
        said.append(f"{len(changed)} {what} differ, first {first}{values}")
    for verb, here, there in (("gone", old, new), ("added", new, old)):
        names = [name for name in here if name not in there]
        said += [f"{len(names)} {what} {verb}, first {names[0]}"] if names else []
    if not said and list(old) != list(new):
        said.append(f"the order of the {what}")
    return "; ".join(said)


def _values(old: Any, new: Any) -> str:
    import numpy as np
    from onnx import numpy_helper

    a, b = numpy_helper.to_array(old), numpy_helper.to_array(new)
    if a.shape != b.shape or a.dtype != b.dtype:
        return f": {a.dtype}{list(a.shape)} became {b.dtype}{list(b.shape)}"
    if a.size == 1:
        return f": {_change(float(a.ravel()[0]), float(b.ravel()[0]))}"
    off = np.abs(a.astype(np.float64) - b.astype(np.float64))
    return f": {int((off > 0).sum())} of {a.size} values, by up to {off.max():.3g}"
