"""Huawei Ascend: AMCT's files from any machine, and the .om where CANN's `atc` is on the PATH.

::

    model, feed -> config -> calibrate -> record -> deploy.onnx -> atc -> .om
                                             |-> fake_quant.onnx: the same numerics on a CPU
                                             '-> qdq.onnx: for AMCT's own `convert`

AMCT's algorithms are defined on its own statistics, so this target runs its own pass over the
feed; the neutral scales are not used. The .om itself runs through CANN's pyACL, which is not
covered here: `open` says so.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from shutil import which
from typing import TYPE_CHECKING, Any

from deploy import atomic
from deploy.errors import BackendError, ConfigError, ExportError, ModelError, SdkMissingError
from deploy.targets.base import BuildRequest, Built
from deploy.tensors import Session

if TYPE_CHECKING:
    import onnx

    from deploy.feed.preprocess import Preprocess
    from deploy.graph.plan import Decision
    from deploy.targets.ascend.atc import AtcOptions
    from deploy.targets.ascend.calibrate import Calibrated
    from deploy.targets.ascend.config_types import QuantConfig
    from deploy.targets.ascend.layers import LayerGraph
    from deploy.targets.ascend.quant_layer import QuantLayer

_ATC_SECONDS = 3600
_VERIFIED = 2  # samples on which the deploy model is run in integers


@dataclass(frozen=True, kw_only=True)
class Ascend:
    """The Ascend target.

    Attributes:
        soc: chip for `atc`, such as Ascend310P3; None writes everything but the .om.
        config: AMCT's simplified configuration (.cfg) or quant config JSON; None is AMCT's
            default over all samples of the feed.
        aipp: put the preprocessing into the .om where AIPP can express it.
        source_color: order of the pictures that the .om gets, "rgb" or "bgr".
        first_layer_int8: let AIPP and the first convolution run fused in int8.
        atc_flags: further flags of atc, '--name=value'.
        exact_bytes: cap on the activations that exact IFMR keeps; None is 1 GiB.
        say: told what the calibration keeps in memory before it starts.
    """

    soc: str | None = None
    config: Path | None = None
    aipp: bool = False
    source_color: str = "rgb"
    first_layer_int8: bool = False
    atc_flags: tuple[str, ...] = ()
    exact_bytes: int | None = None
    name: str = "ascend"
    say: Callable[[str], None] = field(default=lambda sentence: None, repr=False)

    def __post_init__(self) -> None:
        self._atc()  # a wrong chip or flag is told before anything is calibrated

    def _atc(self) -> AtcOptions:
        from deploy.targets.ascend.atc import AtcOptions

        return AtcOptions(soc=self.soc, extra=self.atc_flags)

    def wanted(self, model: onnx.ModelProto, float_nodes: tuple[str, ...]) -> tuple[str, ...]:
        """Inputs of the layers. They go into the cache; AMCT's own scales are found in `build`."""
        from deploy.targets.ascend.files import read_any_config

        _, graph = _prepared(model)
        if self.config is not None:
            read_any_config(self.config, graph)  # a broken one is told before calibration
        layers = (layer for name, layer in graph.layers.items() if name not in float_nodes)
        return tuple(dict.fromkeys(layer.input for layer in layers))

    def decisions(
        self, model: onnx.ModelProto, float_nodes: tuple[str, ...] = ()
    ) -> tuple[Decision, ...]:
        """The layers that AMCT quantizes by default, and why the others stay float."""
        named, graph = _prepared(model)
        return _decisions(named, graph, [name for name in graph.layers if name not in float_nodes])

    def build(self, request: BuildRequest) -> Built:
        """Write config, record, deploy, fake-quant and Q/DQ models, AIPP; run `atc` if it is here.

        Raises:
            ConfigError: the configuration, the chip or a flag of atc breaks a rule.
            CalibrationError: a layer has no sound scales.
            ExportError: a layer is outside what the hardware takes.
            BackendError: `atc` is here and failed.
        """
        from deploy.targets.ascend.models import write_models
        from deploy.targets.ascend.quant_layer import quantize_layers

        model, graph = _prepared(request.model)
        config = self._config(model, graph, request)
        if not config.do_fusion or config.skip_fusion_layers:
            model, graph = _unfused(request, config)
            config = self._config(model, graph, request)
        found = self._calibrated(model, graph, config, request)
        layers = quantize_layers(model, graph, found.records)
        files = write_models(model, layers, config, found.records, request.folder, request.name)
        notes = [*_calibration_notes(found, config, request), _verified(model, layers, request)]
        if self.aipp or self.first_layer_int8:
            notes += self._write_aipp(request, files)
        engine, more = self._om(request, files)
        return Built(
            target=self.name,
            engine=engine,
            runnable=files["fake-quant model"],
            files=files,
            decisions=_decisions(model, graph, found.records),
            notes=(*notes, *more),
        )

    def open(self, engine: Path, *, threads: int | None = None) -> Session:
        """Refuse: an .om runs on the NPU only.

        Raises:
            SdkMissingError: always; the fake-quant model tells the accuracy on a CPU.
        """
        raise SdkMissingError(
            f"{engine.name} runs on an Ascend NPU through CANN (pyACL or ais_bench), which calib8"
            " does not drive; its fake-quant model has the same numerics and runs here"
        )

    def _config(
        self, model: onnx.ModelProto, graph: LayerGraph, request: BuildRequest
    ) -> QuantConfig:
        from deploy.targets.ascend.config import default_config
        from deploy.targets.ascend.files import read_any_config

        if self.config is None:
            config = default_config(graph, batch_num=max(len(request.feed), 1))
        else:
            config = read_any_config(self.config, graph)
        return without(config, request.float_nodes)

    def _calibrated(
        self, model: onnx.ModelProto, graph: LayerGraph, config: QuantConfig, request: BuildRequest
    ) -> Calibrated:
        from deploy.targets.ascend.calibrate import EXACT_BYTES, calibrate

        if not config.enabled():
            raise ConfigError("a configuration must leave a layer to quantize, got none enabled")
        samples = request.feed.samples()
        try:
            return calibrate(
                model,
                graph,
                samples,
                config,
                exact_bytes=EXACT_BYTES if self.exact_bytes is None else self.exact_bytes,
                say=self.say,
            )
        finally:
            _close(samples)

    def _write_aipp(self, request: BuildRequest, files: dict[str, Path]) -> list[str]:
        """Write the AIPP file and, where asked, the compression options; gives notes."""
        from deploy.feed.preprocess import Preprocess
        from deploy.targets.ascend.aipp import write_aipp
        from deploy.targets.ascend.atc import write_compression_options

        given = request.manifest.get("preprocess")
        if not given:
            return ["No AIPP file: the calibration was fed arrays, not pictures."]
        how: Preprocess = Preprocess.from_json(given)
        try:
            made = write_aipp(how, source_color=self.source_color)
        except ExportError as error:
            return [f"No AIPP file: {error}."]
        path = request.folder / f"{request.name}_aipp.cfg"
        files["AIPP configuration"] = atomic.write_text(path, made.text)
        if self.first_layer_int8:
            path = request.folder / f"{request.name}_compression.cfg"
            text = write_compression_options(first_layer=True)
            files["compression options"] = atomic.write_text(path, text)
        return list(made.host)

    def _om(self, request: BuildRequest, files: dict[str, Path]) -> tuple[Path | None, list[str]]:
        """The .om, or the command that makes it."""
        from deploy.targets.ascend.atc import atc_command, shell

        output, options = request.folder / request.name, self._atc()
        command = atc_command(
            files["deploy model"],
            output,
            _shapes(request),
            options,
            aipp=files.get("AIPP configuration"),
            compression=files.get("compression options"),
        )
        files["atc command"] = atomic.write_text(
            request.folder / f"{request.name}_atc.sh", f"#!/bin/sh\n{shell(command)}\n"
        )
        if options.soc is None:
            return None, [f"No .om: name the chip with --soc. The command: {shell(command)}"]
        if which("atc") is None:
            return None, [f"No .om: `atc` (CANN) is not on the PATH. The command: {shell(command)}"]
        engine = run_atc(command, output.with_name(f"{output.name}.om"))
        files["int8 engine"] = engine
        return engine, []


def without(config: QuantConfig, float_nodes: tuple[str, ...]) -> QuantConfig:
    """The config with these layers disabled."""
    layers = {
        name: replace(layer, quant_enable=False) if name in float_nodes else layer
        for name, layer in config.layers.items()
    }
    return replace(config, layers=layers)


def run_atc(command: list[str], engine: Path) -> Path:
    """Run atc; it writes `engine`.

    Raises:
        BackendError: atc failed, took over an hour, or wrote nothing.
    """
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=_ATC_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BackendError(f"atc must run, got: {error}") from error
    said = " ".join((done.stdout + done.stderr).split())[-600:]
    if done.returncode != 0:
        raise BackendError(f"atc failed with {done.returncode}, it said: {said}")
    if not engine.exists():
        raise BackendError(f"atc must write {engine}, got nothing; it said: {said}")
    return engine


def _prepared(model: onnx.ModelProto) -> tuple[onnx.ModelProto, LayerGraph]:
    from deploy.targets.ascend.layers import find_layers, name_nodes

    named = name_nodes(model)
    return named, find_layers(named)


def _unfused(request: BuildRequest, config: QuantConfig) -> tuple[onnx.ModelProto, LayerGraph]:
    """The model with the BatchNormalizations that the config wants apart from their Conv."""
    from deploy.frontends import load
    from deploy.frontends.affine import NORM, fold_affine

    if request.source is None:
        raise ConfigError(
            "do_fusion false and skip_fusion_layers need the model as a file, got one in memory"
        )
    model, graph = _prepared(load(request.source, fold_batchnorm=False).model)
    if not config.do_fusion:
        return model, graph
    ends = {graph.layers[name].output for name in config.skip_fusion_layers}
    apart = {n.name for n in model.graph.node if n.op_type == NORM and n.input[0] in ends}
    fold_affine(model.graph, apart=apart)
    return _prepared(model)


def _calibration_notes(
    found: Calibrated, config: QuantConfig, request: BuildRequest
) -> Iterator[str]:
    enabled = config.enabled().values()
    searches = sorted({layer.activation.act_algo.upper() for layer in enabled})
    yield f"Scales: AMCT's ARQ and {' and '.join(searches)} over {found.batches} samples."
    if found.streamed:
        yield (
            f"IFMR of {len(found.streamed)} layers ran on histograms: their activations were over"
            " the memory cap."
        )
    if found.dead:
        yield (
            f"The input of {len(found.dead)} layers was zero on every sample, so their scale says"
            f" nothing: {', '.join(found.dead[:3])}."
        )
    if found.batches < len(request.feed):
        yield (
            f"batch_num {config.batch_num} of the configuration: {found.batches} of"
            f" {len(request.feed)} samples were used."
        )


def _decisions(
    model: onnx.ModelProto, graph: LayerGraph, chosen: Collection[str]
) -> tuple[Decision, ...]:
    from deploy.graph.plan import ASCEND, FLOAT32, Decision

    decisions = []
    for node in model.graph.node:
        int8 = node.name in chosen
        reason = graph.refused.get(node.name, "")
        if not int8 and not reason:
            off = node.name in graph.layers
            reason = "left float as asked" if off else "no int8 on Ascend for this type"
        precision = ASCEND.grid.name if int8 else FLOAT32
        decisions.append(Decision(node.name, node.op_type, precision, "" if int8 else reason))
    return tuple(decisions)


def _verified(
    model: onnx.ModelProto, layers: Mapping[str, QuantLayer], request: BuildRequest
) -> str:
    """A sentence on how the deploy model compares with its fake-quant model."""
    from deploy.targets.ascend.verify import verify

    samples = request.feed.samples()
    try:
        return verify(model, layers, islice(samples, _VERIFIED)).sentence()
    except ModelError as error:
        return f"The deploy model was not run in integers: {error}."
    finally:
        _close(samples)


def _close(samples: Any) -> None:
    """End a stream early, where it can be ended."""
    if hasattr(samples, "close"):
        samples.close()


def _shapes(request: BuildRequest) -> dict[str, Any]:
    """Fixed input shapes: those of a sample."""
    samples = request.feed.samples()
    first = next(iter(samples))
    _close(samples)
    return {name: tuple(array.shape) for name, array in first.items()}
