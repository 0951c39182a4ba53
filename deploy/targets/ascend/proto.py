"""Protobuf messages of Ascend's text files: `ascend.proto`, read on first use without protoc."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

from deploy.errors import ConfigError, did_you_mean
from deploy.files.reading import read_package_text

if TYPE_CHECKING:
    from google.protobuf.message import Message

_PACKAGE = "calib8.ascend"
_MESSAGE = re.compile(r"^(message|enum) (\w+) {\n(.*?)^}", re.MULTILINE | re.DOTALL)
_FIELD = re.compile(r"oneof (\w+) {|(})|(?:(optional|repeated) )?(\w+) (\w+) = (\d+);")
_VALUE = re.compile(r"(\w+) = (\d+);")

# keys that are not in the simplified configuration -> the place they belong to
FOREIGN_KEYS = {
    "nuq_config": "a key of AMCT's binary packages",
    "version": "a key of the quant config JSON",
    "conv_calibration_config": "an old key; write override_layer_types for Conv",
    "fc_calibration_config": "an old key; write override_layer_types for Gemm and MatMul",
}


def message_class(name: str) -> Any:
    """Return the protobuf class of a message (proto2, so unset fields are known)."""
    from google.protobuf import message_factory

    return message_factory.GetMessageClass(_pool().FindMessageTypeByName(f"{_PACKAGE}.{name}"))


@cache
def _pool() -> Any:
    from google.protobuf import descriptor_pb2, descriptor_pool

    text = read_package_text(__package__, "ascend.proto")
    file = descriptor_pb2.FileDescriptorProto(
        name="calib8/ascend.proto", package=_PACKAGE, syntax="proto2"
    )
    types = {name: kind for kind, name, _ in _MESSAGE.findall(text)}
    for kind, name, body in _MESSAGE.findall(text):
        if kind == "message":
            _describe(file.message_type.add(name=name), body, types)
            continue
        entry = file.enum_type.add(name=name)
        for value, number in _VALUE.findall(body):
            entry.value.add(name=value, number=int(number))
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return pool


def _describe(message: Any, body: str, types: Mapping[str, str]) -> None:
    from google.protobuf.descriptor_pb2 import FieldDescriptorProto as Proto

    is_choice = False
    for choice, end, label, kind, name, number in _FIELD.findall(body):
        if choice:
            message.oneof_decl.add(name=choice)
        if choice or end:
            is_choice = bool(choice)
            continue
        entry = message.field.add(name=name, number=int(number))
        entry.label = Proto.LABEL_REPEATED if label == "repeated" else Proto.LABEL_OPTIONAL
        entry.type = getattr(Proto, f"TYPE_{types.get(kind, kind).upper()}")
        if kind in types:
            entry.type_name = f".{_PACKAGE}.{kind}"
        if is_choice:
            entry.oneof_index = len(message.oneof_decl) - 1


def parse_text(name: str, text: str, what: str) -> Message:
    """Parse the text of file `what` as message `name`; of a field set twice the last one counts."""
    from google.protobuf import text_format

    message: Message = message_class(name)()
    try:
        return text_format.Merge(text, message)
    except (text_format.ParseError, UnicodeError, RecursionError) as error:
        raise ConfigError(f"{what} must be protobuf text of {name}, got: {_hint(error)}") from None


def print_text(message: Message) -> str:
    """Return a message as protobuf text, fields ordered by number."""
    from google.protobuf import text_format

    return str(text_format.MessageToString(message))


def suggest_name(word: str, known: list[str] | tuple[str, ...]) -> str:
    """Return "did you mean ...?" with the nearest known name, or the list of known names."""
    return did_you_mean(word, known, f"known: {', '.join(sorted(known)[:24])}")


def _hint(error: Exception) -> str:
    """Return the parser's error, with the nearest known name if a field is unknown."""
    text = " ".join(str(error).split())[:300]
    if 'has no field named "' not in text:
        return text
    message = text.split('type "')[1].split('"')[0].rsplit(".", 1)[-1]
    word = text.split('field named "')[1].split('"')[0]
    if word in FOREIGN_KEYS:
        return f"{word!r} in {message}, which is {FOREIGN_KEYS[word]}"
    place = text.split(" : ")[0] if " : " in text else ""
    known = [field.name for field in message_class(message).DESCRIPTOR.fields]
    return (
        f"{place + ': ' if place else ''}no key {word!r} in {message}; {suggest_name(word, known)}"
    )
