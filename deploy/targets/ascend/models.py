"""The files of an Ascend deployment: config, record, and the three models."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from deploy import atomic
from deploy.targets.ascend.config_json import write_config
from deploy.targets.ascend.config_types import QuantConfig

if TYPE_CHECKING:
    import onnx

    from deploy.frontends import LoadedModel
    from deploy.targets.ascend.quant_layer import QuantLayer
    from deploy.targets.ascend.record import LayerRecord


def write_models(
    model: onnx.ModelProto,
    layers: Mapping[str, QuantLayer],
    config: QuantConfig | None,
    records: Mapping[str, LayerRecord],
    folder: Path,
    loaded: LoadedModel,
) -> dict[str, Path]:
    """Config, record and the three models; everything is made before anything is written.

    Args:
        model: the float model.
        layers: those in int8.
        config: what says so; None writes none.
        records: their scales.
        folder: where to write.
        loaded: what `model` was made of; names the files, and keeps the nodes that ONNX Runtime
            does not know for the models that it does not run.

    Returns:
        Role -> path.

    Raises:
        ExportError: a file cannot be written.
    """
    return {
        role: atomic.write_bytes(folder / f"{loaded.name}_{ending}", data)
        for role, ending, data in list(_contents(model, layers, config, records, loaded))
    }


def _contents(
    model: onnx.ModelProto,
    layers: Mapping[str, QuantLayer],
    config: QuantConfig | None,
    records: Mapping[str, LayerRecord],
    loaded: LoadedModel,
) -> Iterator[tuple[str, str, bytes]]:
    from deploy.targets.ascend.amct_qdq import amct_qdq_model
    from deploy.targets.ascend.deploy_model import deploy_model
    from deploy.targets.ascend.fake_quant import fake_quant_model
    from deploy.targets.ascend.record import write_record

    if config is not None:
        yield "quant config", "quant.json", write_config(config).encode()
    yield "record", "record.txt", write_record(records).encode()
    deploy, fake = deploy_model(model, layers), fake_quant_model(model, layers)
    for role, ending, made in (
        ("deploy model", "deploy_model.onnx", loaded.whole(deploy)),
        ("fake-quant model", "fake_quant_model.onnx", fake),
        ("Q/DQ model", "amct_qdq.onnx", loaded.whole(amct_qdq_model(model, layers))),
    ):
        yield role, ending, made.SerializeToString(deterministic=True)
