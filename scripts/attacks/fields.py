"""Seeded changes of an ONNX model field by field: a protobuf that parses, of another meaning.

::

    number    an extreme, its neighbour, its double, its negative
    text      what stands in the same field elsewhere, a name of the model, a token that breaks
              parsers; an operator's type also any operator of the standard
    message   one of the same type from elsewhere in this model or in another, or none
    list      one element less, twice, changed, or from elsewhere; two swapped; another order

First a type of message is chosen, then a message of it, so that many weights hide no Loop.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator
from functools import cache
from typing import Any

import onnx
from google.protobuf.descriptor import FieldDescriptor as Field

from scripts.attacks.mutate import CHANGES, TOKENS

_INTEGERS = (
    *(0, 1, 2, 3, 4, 5, 7, 8, 13, 16, 28, 64, 100, 255, 65535, 1000000007, -1, -2, -5),
    *(2**31 - 1, 2**31, 2**40, 2**62, 2**63 - 1, -(2**31), -(2**63)),
)  # fmt: skip
_FLOATS = (0.0, -0.0, 1e-45, 1e-38, 0.5, -1.0, 1e9, 1e30, 3.4e38, *map(float, ("inf", "nan")))
_OFTEN = {"NodeProto": 6, "AttributeProto": 6, "TensorProto": 6, "GraphProto": 3}
_MOST = 1 << 20  # bytes; a graph that is copied into itself again and again stops here


def changed_fields(rng: random.Random, data: bytes, other: bytes) -> bytes:
    """`data` with one to three fields changed; messages and texts may come from `other`."""
    model, donor = (onnx.ModelProto.FromString(one) for one in (data, other))
    for _ in range(rng.choice((1, 1, 2, 3))):
        if model.ByteSize() < _MOST:
            _change(rng, model, donor)
    return model.SerializeToString()


def _change(rng: random.Random, model: onnx.ModelProto, donor: onnx.ModelProto) -> None:
    kinds: dict[str, list[Any]] = {}
    for one in _messages(model):
        kinds.setdefault(one.DESCRIPTOR.name, []).append(one)
    (kind,) = rng.choices(list(kinds), [_OFTEN.get(name, 1) for name in kinds])
    message = rng.choice(kinds[kind])
    filled = [field for field, _ in message.ListFields()]
    every = list(message.DESCRIPTOR.fields)
    field = rng.choice(filled if filled and rng.random() < 0.75 else every)
    pool = [model] if rng.random() < 0.7 else [model, donor]
    elsewhere = list(_values(pool, message.DESCRIPTOR.name, field))
    if field.is_repeated:
        _change_list(rng, field, getattr(message, field.name), elsewhere)
    elif rng.random() < 0.15:
        message.ClearField(field.name)
    elif field.type == Field.TYPE_MESSAGE:
        if elsewhere:
            getattr(message, field.name).CopyFrom(_fresh(rng.choice(elsewhere)))
        else:
            getattr(message, field.name).SetInParent()
    else:
        setattr(message, field.name, _scalar(rng, field, getattr(message, field.name), elsewhere))


def _change_list(rng: random.Random, field: Any, held: Any, elsewhere: list[Any]) -> None:
    kept = [_fresh(one) for one in held]
    acts = ("less", "twice", "swap", "order", "change", "change", "more", "more")
    act = rng.choice(acts) if kept else "more"
    place = rng.randrange(len(kept)) if kept else 0
    if act == "less":
        del kept[place]
    elif act == "twice":
        kept.insert(rng.randrange(len(kept) + 1), kept[place])
    elif act == "swap":
        near = rng.randrange(len(kept))
        kept[place], kept[near] = kept[near], kept[place]
    elif act == "order":
        rng.shuffle(kept)
    elif field.type != Field.TYPE_MESSAGE:
        text = field.type in (Field.TYPE_STRING, Field.TYPE_BYTES)
        old = kept[place] if kept else b"" if text else 0
        new = _scalar(rng, field, old, elsewhere)
        kept[place : place + (act == "change")] = [new]
    elif elsewhere:
        kept[place : place + (act == "change")] = [_fresh(rng.choice(elsewhere))]
    else:
        held.add()
        return
    del held[:]
    held.extend(kept)


def _scalar(rng: random.Random, field: Any, old: Any, elsewhere: list[Any]) -> Any:
    if elsewhere and rng.random() < 0.3:
        return rng.choice(elsewhere)
    if field.type == Field.TYPE_STRING:
        if field.name == "op_type" and rng.random() < 0.7:
            return rng.choice(_operators())
        if elsewhere and rng.random() < 0.6:
            return rng.choice(elsewhere)
        return rng.choice(TOKENS).decode(errors="ignore")
    if field.type == Field.TYPE_BYTES:
        if rng.random() < 0.3:
            return struct.pack("<f", rng.choice(_FLOATS)) * (len(old) // 4)
        return rng.choice(CHANGES)(rng, old, rng.choice(elsewhere or [b""]))[:_MOST]
    if field.type in (Field.TYPE_FLOAT, Field.TYPE_DOUBLE):
        return rng.choice((*_FLOATS, -old, old * 10, old * 1e20))
    if field.type == Field.TYPE_ENUM:
        return rng.choice(field.enum_type.values).number
    if field.name in ("data_type", "elem_type"):
        return rng.randrange(30)
    bits = 32 if field.type in (Field.TYPE_INT32, Field.TYPE_UINT32) else 64
    most = (1 << bits - 1) - 1
    least = 0 if field.type in (Field.TYPE_UINT32, Field.TYPE_UINT64) else -most - 1
    new = rng.choice((*_INTEGERS, old + 1, old - 1, -old, old * 2, old // 2))
    return min(max(new, least), most)


def _messages(message: Any) -> Iterator[Any]:
    yield message
    for field, value in message.ListFields():
        if field.type == Field.TYPE_MESSAGE:
            for one in value if field.is_repeated else (value,):
                yield from _messages(one)


def _values(models: list[Any], owner: str, field: Any) -> Iterator[Any]:
    """Messages of the field's type; texts of this field, and for what names a tensor all names."""
    for model in models:
        for message in _messages(model):
            if field.type == Field.TYPE_MESSAGE:
                if message.DESCRIPTOR is field.message_type:
                    yield message
            elif field.type in (Field.TYPE_STRING, Field.TYPE_BYTES):
                for own, value in message.ListFields():
                    same = own.name == field.name and message.DESCRIPTOR.name == owner
                    named = field.name in _NAMES and own.name in _NAMES and own.type == field.type
                    if same or named:
                        yield from value if own.is_repeated else (value,)


_NAMES = ("input", "output", "name")


@cache
def _operators() -> list[str]:
    return sorted({schema.name for schema in onnx.defs.get_all_schemas()})


def _fresh(value: Any) -> Any:
    """A copy of a message, which may lie inside of what it is copied to."""
    if not hasattr(value, "DESCRIPTOR"):
        return value
    copy = type(value)()
    copy.CopyFrom(value)
    return copy
