"""What the ONNX parser of each CANN reads, and models brought to it before they travel."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import onnx
    from google.protobuf.message import Message

_TOLD = ("doc_string", "metadata_props")  # where exporters leave paths, sources and stack traces


@dataclass(frozen=True, slots=True)
class Parser:
    """One CANN's.

    Attributes:
        opset: newest operator set, of ai.onnx.
        ir: newest version of the file format, that of the ONNX release it is made for.
    """

    opset: int
    ir: int


# Sources, on hiascend.com: "ONNX operator specifications" of canncommercial/5046 (ONNX 1.8.0,
# opset 9 to 13), of 700 (ONNX 1.12.0, opset 9 to 18) and of 80RC22, 80RC3 and 910beta3 (ONNX
# 1.12.0, each operator 11 to 18); hicann/ge, atc's page on --framework (opset 11 to 18).
PARSERS = {
    "5.0": Parser(13, 7),
    "7.0": Parser(18, 8),
    "8.0": Parser(18, 8),
    "8.2": Parser(18, 8),
    "9.1": Parser(18, 8),
}
DEFAULT = "8.0"


def readable(model: onnx.ModelProto, cann: str) -> onnx.ModelProto:
    """The float model in an opset and format that this CANN's parser reads.

    Before it is quantized: of Ascend's own operators ONNX knows no types, by which nodes behind
    them could be written otherwise.

    Args:
        model: of opset 13 to 25.
        cann: key of `PARSERS`.

    Raises:
        ExportError: a node has no form in that opset.
    """
    from deploy.graph.edit import copied
    from deploy.graph.lowering import lowered

    parser = PARSERS[cann]
    made = copied(lowered(model, opset=parser.opset).model)
    made.ir_version = min(made.ir_version, parser.ir)
    return made


def stripped(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy without documentation and metadata: it computes the same."""
    from deploy.graph.edit import copied

    made = copied(model)
    for message in (made, *_inside(made)):
        for name in _TOLD:
            if name in message.DESCRIPTOR.fields_by_name:
                message.ClearField(name)
    return made


def _inside(message: Message) -> Iterator[Message]:
    """Every message in it, however deep."""
    for field, value in message.ListFields():
        if field.message_type is None:
            continue
        for one in value if hasattr(value, "__len__") else (value,):
            yield one
            yield from _inside(one)
