"""A model's file read again: what is run is what was loaded, or the run ends."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from deploy.errors import ModelError
from deploy.frontends.reader import model_bytes, parse_model, read_stamped, stamp_of

if TYPE_CHECKING:
    import onnx

    from deploy.frontends.base import LoadedModel


def file_of(loaded: LoadedModel) -> bytes:
    """The file as it was loaded, with its external data inside; of a model in memory itself.

    Raises:
        ModelError: the file or its external data changed since.
    """
    if loaded.source is None or loaded.stamp is None:
        return bytes(loaded.model.SerializeToString())
    if loaded.stamp.weights:
        model, stamp = read_stamped(loaded.source)
        refuse_other(loaded, stamp == loaded.stamp)
        return bytes(model.SerializeToString())
    data = model_bytes(loaded.source)
    refuse_other(loaded, stamp_of(data) == loaded.stamp)
    return data


def graph_of(path: Path, loaded: LoadedModel) -> onnx.ModelProto:
    """The graph as the file has it, external data left where it is.

    Raises:
        ModelError: the file changed since it was loaded.
    """
    data = model_bytes(path)
    refuse_other(loaded, loaded.stamp is None or stamp_of(data).file == loaded.stamp.file)
    return parse_model(data, str(path))


def refuse_other(loaded: LoadedModel, same: bool) -> None:
    """End a run whose model is not the one that was loaded.

    Raises:
        ModelError: it is not the same.
    """
    if not same:
        raise ModelError(
            f"{loaded.source} changed while calib8 ran, so that not all of the run saw the same"
            " model; leave it alone meanwhile and run again"
        )
