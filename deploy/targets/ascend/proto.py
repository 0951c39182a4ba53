"""Protobuf messages of Ascend's text files: `ascend.proto`, read on first use without protoc."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

from deploy.errors import ConfigError, did_you_mean
from deploy.files.reading import read_package_text

if TYPE_CHECKING:
    from google.protobuf.message import Message

_PACKAGE = "calib8.ascend"
_DEFINITION = re.compile(r"^(message|enum) (\w+) {\n(.*?)^}", re.MULTILINE | re.DOTALL)
_FIELD = re.compile(r"oneof (\w+) {|(})|(?:(optional|repeated) )?(\w+) (\w+) = (\d+);")
_UNKNOWN_FIELD = re.compile(r'type "(?:[\w.]*\.)?(\w+)" has no field named "([^"]*)"')
_ENUM_VALUE = re.compile(r"(\w+) = (\d+);")


def message_class(name: str) -> Any:
    """Return the protobuf class of a message (proto2, so unset fields are known)."""
    from google.protobuf import message_factory

    return message_factory.GetMessageClass(_pool().FindMessageTypeByName(f"{_PACKAGE}.{name}"))


@cache
def _pool() -> Any:
    """Return a DescriptorPool with the messages and enums of `ascend.proto`.

    protoc is not needed: the file is read by regular expressions, which know the subset of the
    language that it uses.
    """
    from google.protobuf import descriptor_pb2, descriptor_pool

    definitions = _DEFINITION.findall(read_package_text(__package__, "ascend.proto"))
    file = descriptor_pb2.FileDescriptorProto(
        name="calib8/ascend.proto", package=_PACKAGE, syntax="proto2"
    )
    kind_by_name = {name: kind for kind, name, _ in definitions}
    for kind, name, body in definitions:
        if kind == "message":
            _add_fields(file.message_type.add(name=name), body, kind_by_name)
            continue
        enum = file.enum_type.add(name=name)
        for value, number in _ENUM_VALUE.findall(body):
            enum.value.add(name=value, number=int(number))
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return pool


def _add_fields(message: Any, body: str, kind_by_name: Mapping[str, str]) -> None:
    """Add the fields and oneofs of a message's body to its descriptor.

    Args:
        message: a DescriptorProto; changed in place.
        body: text between the braces of the message.
        kind_by_name: type that the file defines -> "message" or "enum".
    """
    from google.protobuf.descriptor_pb2 import FieldDescriptorProto as Proto

    # a match is the start of a oneof, with its name, or the brace at its end, or else a field
    is_in_oneof = False
    for oneof_name, end, label, type_name, name, number in _FIELD.findall(body):
        if oneof_name:
            message.oneof_decl.add(name=oneof_name)
        if oneof_name or end:
            is_in_oneof = bool(oneof_name)
            continue
        field = message.field.add(name=name, number=int(number))
        field.label = Proto.LABEL_REPEATED if label == "repeated" else Proto.LABEL_OPTIONAL
        field.type = getattr(Proto, f"TYPE_{kind_by_name.get(type_name, type_name).upper()}")
        if type_name in kind_by_name:
            field.type_name = f".{_PACKAGE}.{type_name}"
        if is_in_oneof:  # the one that was added last
            field.oneof_index = len(message.oneof_decl) - 1


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


def suggest_name(name: str, candidates: Collection[str]) -> str:
    """Return "did you mean ...?" with the nearest known name, or the list of known names."""
    return did_you_mean(name, candidates, f"known: {', '.join(sorted(candidates)[:24])}")


def _hint(error: Exception) -> str:
    """Return the parser's error, with the nearest known name if a field is unknown."""
    text = " ".join(str(error).split())[:300]
    unknown = _UNKNOWN_FIELD.search(text)
    if unknown is None:
        return text
    message, field = unknown.groups()
    fields = [descriptor.name for descriptor in message_class(message).DESCRIPTOR.fields]
    position, colon, _ = text.partition(" : ")
    prefix = f"{position}: " if colon else ""
    return f"{prefix}no key {field!r} in {message}; {suggest_name(field, fields)}"
