"""Read an `onnx.ModelProto` with all its weights, or report what the file is instead."""

import hashlib
import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import onnx

from deploy.errors import ModelError
from deploy.files.manifest import sha256
from deploy.files.reading import open_regular_file, read_bytes

MESSAGE_LIMIT = 2**31 - 1  # bytes of one protobuf message

_WEIGHTS_REMEDY = (
    "if it is a state dict, name the code of its model, net.py:make --weights FILE; else export"
    " the model to ONNX"
)

# (offset, magic bytes, kind of file, remedy)
_OTHER_FORMATS: tuple[tuple[int, bytes, str, str], ...] = (
    (0, b"version https://git-lfs", "a Git LFS pointer", "run 'git lfs pull'"),
    (0, b"PK\x03\x04", "a zip archive, as torch.save writes", _WEIGHTS_REMEDY),
    (0, b"\x80", "a Python pickle, as torch.save writes", _WEIGHTS_REMEDY),
    (0, b"\x1f\x8b", "gzip-compressed", "unpack it first"),
    (0, b"\x89HDF", "an HDF5 file", "export the model to ONNX"),
    (8, b'{"', "a safetensors file", _WEIGHTS_REMEDY),
    (4, b"ORTM", "in onnxruntime's own ORT format", "give the ONNX model it was made from"),
    (4, b"TFL3", "a TensorFlow Lite model", "export the model to ONNX"),
)


@dataclass(frozen=True, slots=True)
class FileDigests:
    """Digests of the bytes that a model was read from.

    Attributes:
        file: sha256 (hex) of the ONNX file.
        weights: sha256 (hex) of its external data; "" without any. It covers, per piece in the
            order of (location, offset, length): the location's UTF-8 and a zero byte, offset and
            length in 8 bytes each, little-endian, and the sha256 of the bytes; as in C++.
    """

    file: str
    weights: str = ""


def read_model(path: Path) -> onnx.ModelProto:
    """Read an ONNX file and its external data.

    Raises:
        ModelError: no such file, not ONNX, truncated, too large, or bad external data.
    """
    return read_model_and_digests(path)[0]


def read_model_and_digests(path: Path) -> tuple[onnx.ModelProto, FileDigests]:
    """Return `read_model`'s result and the digests of the bytes that were parsed."""
    data = model_bytes(path)
    model = parse_model(data, str(path))
    return model, FileDigests(sha256(data), _read_external(model, path))


def parse_model(data: bytes, title: str) -> onnx.ModelProto:
    """Parse the bytes of an ONNX model; `title` names it in messages."""
    from google.protobuf.message import DecodeError

    _refuse_other_formats(data, title)
    try:
        model: onnx.ModelProto = onnx.ModelProto.FromString(data)
    except DecodeError as error:
        raise ModelError(
            f"{title} must be an ONNX model, got bytes that do not parse (not ONNX, or truncated);"
            " export or copy it again"
        ) from error
    if not model.HasField("graph") or not model.opset_import or not model.ir_version:
        raise ModelError(
            f"{title} must be an ONNX model, got a file without graph, opset or IR version; "
            "export or copy it again"
        )
    return model


def refuse_external(model: onnx.ModelProto) -> None:
    """Refuse a model in memory whose weights are not in memory."""
    tensor = next(_external_tensors(model), None)
    if tensor is not None:
        raise ModelError(
            f"a model given in memory must hold its weights, got '{tensor.name}' in an external "
            "file; give the path of the model, or call onnx.load_external_data_for_model first"
        )


def model_bytes(path: Path) -> bytes:
    """Return the bytes of a model's file.

    Raises:
        ModelError: the file is not readable, or over 2 GB.
    """
    return read_bytes(path, what="an ONNX file", error=ModelError, max_bytes=MESSAGE_LIMIT)


def _refuse_other_formats(data: bytes, title: str) -> None:
    """Refuse an empty file, and files whose first bytes tell another format."""
    if not data:
        raise ModelError(f"{title} must be an ONNX model, got an empty file; copy it again")
    for start, magic, kind, remedy in _OTHER_FORMATS:
        if data[start : start + len(magic)] == magic:
            raise ModelError(f"{title} must be an ONNX model, got a file that is {kind}; {remedy}")


def _external_tensors(message: Any) -> Iterator[onnx.TensorProto]:
    """Yield the tensors of a message with external data, also where no valid model has a tensor."""
    if isinstance(message, onnx.TensorProto):
        if message.data_location == onnx.TensorProto.EXTERNAL:
            yield message
        return
    for field, value in message.ListFields():
        if field.message_type is not None:
            for inner in value if hasattr(value, "append") else [value]:
                yield from _external_tensors(inner)


def _read_external(model: onnx.ModelProto, path: Path) -> str:
    """Move external data into the tensors; no file outside the model's folder is opened.

    Returns:
        sha256 (hex) of the data; "" without any.

    Raises:
        ModelError: model and data are over 2 GB (no data is read then), or a file cannot be read.
    """
    tensors = list(_external_tensors(model))
    slices = [_find_slice(path, tensor) for tensor in tensors]
    total = model.ByteSize() + sum(length for _, _, length in slices)
    if total > MESSAGE_LIMIT:
        raise ModelError(
            f"{path} with its external data must be below 2 GB, got {total / 2**30:.1f} GB; calib8"
            " writes a model as one protobuf message, which holds no more: build parts of the model"
        )
    # (location, offset, length) -> sha256; several tensors may share a slice, which counts once
    digest_by_slice: dict[tuple[bytes, int, int], bytes] = {}
    for tensor, (file, offset, length) in zip(tensors, slices, strict=True):
        with _open_external(file, tensor.name) as stream:
            stream.seek(offset)
            data = stream.read(length)
        location = _external_entries(tensor)["location"].encode()
        digest_by_slice[location, offset, len(data)] = hashlib.sha256(data).digest()
        tensor.raw_data = data
        del tensor.external_data[:]
        tensor.data_location = onnx.TensorProto.DEFAULT
    return _combine_digests(digest_by_slice) if digest_by_slice else ""


def _combine_digests(digest_by_slice: Mapping[tuple[bytes, int, int], bytes]) -> str:
    """Return the sha256 (hex) of external data, see `FileDigests.weights`."""
    state = hashlib.sha256()
    for (location, offset, length), digest in sorted(digest_by_slice.items()):
        state.update(location + b"\0")
        state.update(offset.to_bytes(8, "little") + length.to_bytes(8, "little") + digest)
    return state.hexdigest()


def _open_external(file: Path, name: str) -> AbstractContextManager[IO[bytes]]:
    """Open a file of external data; `name` is that of its tensor, for messages."""
    what = f"the external data of '{name}', beside the model"
    return open_regular_file(file, what=what, error=ModelError)


def _external_entries(tensor: onnx.TensorProto) -> dict[str, str]:
    """Return the entries that say where a tensor's external data is."""
    return {entry.key: entry.value for entry in tensor.external_data}


def _find_external_file(path: Path, name: str, location: str) -> Path:
    """Return the file of a tensor's external data, which must lie in the model's folder.

    Args:
        path: of the model.
        name: of the tensor, for messages.
        location: the path that the tensor has of its data, relative to the folder.
    """
    folder = Path(os.path.realpath(path.parent))
    file = folder  # is refused below: it is not inside itself
    if "\0" not in location:  # no path can hold a zero byte
        # links are resolved first: a link out of the folder would escape it like ".."
        file = Path(os.path.realpath(folder / location))
    if Path(location).is_absolute() or folder not in file.parents:
        raise ModelError(
            f"external data of '{name}' must lie in the model's folder, got {location!a}; "
            "put the file itself, not a link to it, beside the model and save its relative location"
        )
    return file


def _find_slice(path: Path, tensor: onnx.TensorProto) -> tuple[Path, int, int]:
    """Return (file, offset, length) of one tensor's external data, in bytes.

    Args:
        path: of the model.
        tensor: with external data.

    Raises:
        ModelError: it is not within a file in the model's folder.
    """
    entries = _external_entries(tensor)
    file = _find_external_file(path, tensor.name, entries.get("location", ""))
    with _open_external(file, tensor.name) as stream:
        size = os.fstat(stream.fileno()).st_size
    try:
        offset = int(entries.get("offset", 0))
        length = int(entries.get("length", size - offset))  # without a length, up to the end
    except ValueError:
        # not numbers: refused below as a negative offset
        offset = -1
        length = 0
    if offset < 0 or length < 0 or offset + length > size:
        raise ModelError(
            f"external data of '{tensor.name}' must lie within its file, got bytes {offset} to "
            f"{offset + length} of {size} in {file}; copy the file again, it may be truncated"
        )
    return file, offset, length
