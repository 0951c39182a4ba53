"""Protobuf messages of Ascend's text files, by their descriptor in `ascend_descriptor.txtpb`."""

from __future__ import annotations

import re
from collections.abc import Collection
from functools import cache
from typing import TYPE_CHECKING, Any

from deploy.errors import ConfigError, did_you_mean, list_first
from deploy.files.reading import read_package_text

if TYPE_CHECKING:
    from google.protobuf.message import Message

_PACKAGE = "calib8.ascend"
_UNKNOWN_FIELD = re.compile(r'type "(?:[\w.]*\.)?(\w+)" has no field named "([^"]*)"')


def message_class(name: str) -> Any:
    """Return the protobuf class of a message (proto2, so unset fields are known)."""
    from google.protobuf import message_factory

    return message_factory.GetMessageClass(_pool().FindMessageTypeByName(f"{_PACKAGE}.{name}"))


@cache
def _pool() -> Any:
    """Return a DescriptorPool with the messages and enums of `ascend_descriptor.txtpb`."""
    from google.protobuf import descriptor_pb2, descriptor_pool, text_format

    text = read_package_text(__package__, "ascend_descriptor.txtpb")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(text_format.Parse(text, descriptor_pb2.FileDescriptorProto()))
    return pool


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
    return did_you_mean(name, candidates, f"known: {list_first(sorted(candidates), 24)}")


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
