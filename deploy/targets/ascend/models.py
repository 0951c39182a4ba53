"""The files of an Ascend deployment: config, record, mapping, and the models."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from deploy.files import atomic
from deploy.targets.ascend.cann import DEFAULT, readable, stripped
from deploy.targets.ascend.config_json import write_config
from deploy.targets.ascend.config_types import QuantConfig

if TYPE_CHECKING:
    import onnx

    from deploy.calibration.subject import Subject
    from deploy.targets.ascend.quant_layer import QuantLayer
    from deploy.targets.ascend.record import LayerRecord


def write_models(
    model: onnx.ModelProto,
    layers: Mapping[str, QuantLayer],
    config: QuantConfig | None,
    records: Mapping[str, LayerRecord],
    folder: Path,
    subject: Subject,
    *,
    cann: str = DEFAULT,
    halves: Collection[str] = (),
    shared: Collection[str] = (),
) -> dict[str, Path]:
    """Config, record, mapping and the models; all is made before anything is written.

    Args:
        model: the float model.
        layers: those in int8.
        config: what says so; None writes none.
        records: their scales.
        folder: where to write.
        subject: what `model` was made of; names the files, and keeps the nodes that ONNX Runtime
            does not know for the models that it does not run.
        cann: whose parser reads the models that ONNX Runtime does not run.
        halves: tensors that stay in float16, from `deploy.targets.ascend.half.halves_of`.
        shared: layers that share their weights in the model as it was given.

    Returns:
        Role -> path.

    Raises:
        ExportError: a file cannot be written, or a node not for this CANN.
    """
    made = list(_contents(model, layers, config, records, subject, cann, halves, shared))
    return {
        role: atomic.write_bytes(folder / f"{subject.loaded.name}_{ending}", data)
        for role, ending, data in made
    }


def _contents(
    model: onnx.ModelProto,
    layers: Mapping[str, QuantLayer],
    config: QuantConfig | None,
    records: Mapping[str, LayerRecord],
    subject: Subject,
    cann: str,
    halves: Collection[str],
    shared: Collection[str],
) -> Iterator[tuple[str, str, bytes]]:
    from deploy.targets.ascend.amct_qdq import amct_qdq_model
    from deploy.targets.ascend.deploy_model import deploy_model
    from deploy.targets.ascend.fake_quant import fake_quant_model
    from deploy.targets.ascend.half import narrowed
    from deploy.targets.ascend.mapping import fusion_mapping
    from deploy.targets.ascend.modified import modified_model
    from deploy.targets.ascend.record import write_record

    loaded = subject.loaded
    if config is not None:
        yield "quant config", "config.json", write_config(config).encode()
    typed = {
        name: replace(one, half=layers[name].layer.output in halves)
        for name, one in records.items()
    }
    yield "record", "record.txt", write_record(typed).encode()
    older = readable(model, cann)
    deploy, fake = deploy_model(older, layers), fake_quant_model(model, layers)
    if halves:
        deploy = narrowed(deploy, halves)
        fake = narrowed(fake, halves, exact=[f"{name}.fakedequant.mul" for name in layers])
    deploy = loaded.whole(deploy)
    for role, ending, made in (
        ("deploy model", "deploy_model.onnx", deploy),
        ("fake-quant model", "fake_quant_model.onnx", fake),
        ("Q/DQ model", "amct_qdq.onnx", loaded.whole(amct_qdq_model(older, layers))),
    ):
        yield role, ending, stripped(made).SerializeToString(deterministic=True)
    if shared or any(record.rounded is not None for record in records.values()):
        modified = stripped(loaded.whole(modified_model(model, layers)))
        yield (
            "modified model",
            "modified_model.onnx",
            modified.SerializeToString(deterministic=True),
        )
    original = subject.model if subject.original is None else subject.original
    mapping = fusion_mapping(deploy, original, name=loaded.name)
    yield "fusion mapping", "quant.json", mapping.encode()
