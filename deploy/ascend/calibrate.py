"""The calibration pass: weights by ARQ, channels by DMQ, activations by IFMR or HFMG.

As in AMCT the activations are those of the float model with fake-quantized weights (those of
ConvTranspose stay as they are), and each algorithm sees `batch_num` batches::

    float model -> DMQ factors (first batch) -> weights: ARQ -> batches -> IFMR, HFMG -> record
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from calibrators.arq import arq, arq_fake_quantize
from calibrators.dmq import balance_factors, channel_max, weight_channel_max
from calibrators.errors import CalibrationError
from calibrators.hfmg import HfmgHistogram, HfmgParams, hfmg
from calibrators.ifmr import AscendScale, IfmrHistogram, IfmrParams, ifmr, ifmr_streaming
from deploy.ascend.config import LayerConfig, QuantConfig
from deploy.ascend.layers import Index, Layer, LayerGraph
from deploy.errors import ConfigError, FeedError
from deploy.writers.ascend_record import LayerRecord

if TYPE_CHECKING:
    import onnx

EXACT_BYTES = 1 << 30  # exact IFMR keeps every activation; beyond this it streams

Array = NDArray[Any]
Batch = Mapping[str, Array]


@dataclass(frozen=True, slots=True)
class Calibrated:
    """What the pass found.

    Attributes:
        records: layer name -> scales, in the model's order.
        failed: layer name -> why it stays in float.
        kept_bytes: activations that exact IFMR held.
        streamed: layers whose IFMR ran on histograms, because that would not fit.
        batches: batches seen.
        dead: layers whose input was zero throughout; their scale is 1 and means nothing.
    """

    records: dict[str, LayerRecord]
    failed: dict[str, str]
    kept_bytes: int
    streamed: tuple[str, ...]
    batches: int
    dead: tuple[str, ...] = ()


class _Observer(Protocol):
    def observe(self, x: NDArray[np.floating]) -> None: ...

    def result(self) -> AscendScale: ...


def calibrate(
    model: onnx.ModelProto,
    graph: LayerGraph,
    batches: Iterable[Batch],
    config: QuantConfig,
    *,
    exact_bytes: int = EXACT_BYTES,
    strict: bool = True,
    say: Callable[[str], None] = lambda sentence: None,
) -> Calibrated:
    """Calibrate every enabled layer of a settled config.

    Args:
        model: float model, nodes named.
        graph: its layers.
        batches: input name -> array, one dict a batch; `config.batch_num` of them are used.
        config: from `deploy.ascend.config.settled`.
        exact_bytes: cap on the activations that exact IFMR keeps.
        strict: a layer without sound scales is an error, else it stays in float.
        say: told how many bytes will be kept, before they are.

    Raises:
        CalibrationError: activations or weights with NaN or Inf, or scales that are not finite.
        ConfigError: an algorithm that calib8 does not compute.
        FeedError: fewer batches than batch_num.
    """
    layers = {n: graph.layers[n] for n in graph.layers if n in config.enabled()}
    _refuse_unsupported(layers, config)
    stream = iter(islice(batches, config.batch_num))
    first = next(stream, None)
    if first is None:
        raise FeedError("the calibration needs at least one batch, got none")
    failed: dict[str, str] = {}
    guard = _Guard(failed, strict)
    factors = _balance(model, layers, config, first, guard)
    weights = _weights(model, layers, config, factors, guard)
    layers = {name: layer for name, layer in layers.items() if name not in failed}
    tensors = {n: _observed(layer, factors) for n, layer in layers.items()}
    prepared = prepared_model(model, layers, config, weights, factors)
    session = Runner(prepared, sorted(set(tensors.values())))
    values = session.run(first)
    plan = _Plan.of(layers, config, tensors, values, exact_bytes)
    say(plan.sentence(config.batch_num))
    seen = 1
    plan.observe(values, guard)
    for batch in stream:
        plan.observe(session.run(batch), guard)
        seen += 1
    if seen < config.batch_num:
        raise FeedError(
            f"the calibration needs batch_num batches, {config.batch_num}, got {seen};"
            " give more data or lower batch_num"
        )
    records: dict[str, LayerRecord] = {}
    for name in sorted(layers, key=lambda name: name not in factors):  # AMCT's order, stable
        record = guard.call(name, partial(plan.record, name, weights[name], factors))
        if record is not None:
            records[name] = record
    dead = tuple(name for name in records if plan.keys[name] not in plan.alive)
    return Calibrated(records, failed, plan.bytes * seen, plan.streamed, seen, dead)


class _Guard:
    """Names the layer in an error, or puts it aside."""

    def __init__(self, failed: dict[str, str], strict: bool) -> None:
        self.failed, self.strict = failed, strict

    def call(self, name: str, step: Callable[[], Any]) -> Any:
        """What `step` gives; None for a layer that failed now or before."""
        if name in self.failed:
            return None
        try:
            return step()
        except CalibrationError as error:
            if self.strict:
                raise _named(name, error) from None
            self.failed[name] = str(error)
            return None


def _named(name: str, error: CalibrationError) -> CalibrationError:
    return CalibrationError(
        f"layer {name!r}: {error} (to leave it in float, put it under skip_layers or --keep-float)"
    )


def prepared_model(
    model: onnx.ModelProto,
    layers: Mapping[str, Layer],
    config: QuantConfig,
    weights: Mapping[str, tuple[NDArray[np.float32], NDArray[np.int32]]],
    factors: Mapping[str, NDArray[np.float32]],
) -> onnx.ModelProto:
    """The float model to observe: weights fake-quantized, inputs divided by DMQ factors."""
    from onnx import numpy_helper

    from deploy.writers.ascend_graph import array_of, balanced_weight, rewrite_inputs, rows_of

    index = Index(model.graph)
    arrays = {}
    for name, layer in layers.items():
        if not layer.weight:
            continue
        weight = balanced_weight(array_of(index, layer.weight), layer, factors.get(name, _NONE))
        if layer.kind != "ConvTranspose":  # AMCT leaves it, measured on its modified model
            rows = rows_of(weight, layer)
            bits = config.layers[name].weight.num_bits
            fake = arq_fake_quantize(rows, *weights[name], bits=bits)
            turned = layer.kind == "MatMul" or (layer.kind == "Gemm" and not layer.trans_b)
            weight = np.asarray(fake.T if turned else fake, np.float32)
        arrays[layer.weight] = numpy_helper.from_array(np.ascontiguousarray(weight), layer.weight)
    inverse = {n: np.float32(1) / f for n, f in factors.items() if n in layers}
    return rewrite_inputs(model, layers, arrays, inverse)


_NONE = np.zeros(0, np.float32)


def _observed(layer: Layer, factors: Mapping[str, Array]) -> str:
    return f"{layer.name}.mul.output0" if layer.name in factors else layer.input


def _refuse_unsupported(layers: Mapping[str, Layer], config: QuantConfig) -> None:
    for name in layers:
        entry = config.layers[name]
        if entry.weight.wts_algo != "arq_quantize":
            raise ConfigError(
                f"calib8 computes arq_quantize, got ada_quantize in layer {name!r}; AdaRound needs"
                " AMCT itself"
            )
        if entry.activation.num_bits != 8 or entry.weight.num_bits == 4:
            raise ConfigError(
                "calib8 deploys 8-bit activations and 6 to 8-bit weights, got"
                f" {entry.activation.num_bits} and {entry.weight.num_bits} bits in layer {name!r}"
            )
    if config.fakequant_precision_mode:
        raise ConfigError(
            "fakequant_precision_mode FORCE_FP16_QUANT is for Nano chips, whose files calib8 does"
            " not write; take it out"
        )


def _balance(
    model: onnx.ModelProto,
    layers: Mapping[str, Layer],
    config: QuantConfig,
    first: Batch,
    guard: _Guard,
) -> dict[str, NDArray[np.float32]]:
    """DMQ factors from the first batch of the float model, as AMCT's preprocess pass has it."""
    from deploy.writers.ascend_graph import array_of

    wanted = {n: s for n in layers if (s := config.layers[n].dmq_balancer_param) is not None}
    if not wanted:
        return {}
    values = Runner(model, sorted({layers[n].input for n in wanted})).run(first)
    index = Index(model.graph)
    factors = {}
    for name, strength in wanted.items():
        layer = layers[name]

        def find(layer: Layer = layer, strength: float = strength) -> NDArray[np.float32]:
            axis = 1 if layer.rank else -1
            act = channel_max(values[layer.input], axis)
            weight = _weight_max(array_of(index, layer.weight), layer)
            return balance_factors(act, weight, strength=strength)

        found = guard.call(name, find)
        if found is not None:
            factors[name] = found
    return factors


def _weight_max(weight: NDArray[np.float32], layer: Layer) -> NDArray[np.float32]:
    if layer.kind == "Conv":
        return weight_channel_max(weight, layer.group)
    return channel_max(weight, 1 if layer.trans_b else 0)


def _weights(
    model: onnx.ModelProto,
    layers: Mapping[str, Layer],
    config: QuantConfig,
    factors: Mapping[str, NDArray[np.float32]],
    guard: _Guard,
) -> dict[str, tuple[NDArray[np.float32], NDArray[np.int32]]]:
    """Weight (scale, offset) by layer; a pool has scale 1, as AMCT records it."""
    from deploy.writers.ascend_graph import array_of, balanced_weight, rows_of

    index = Index(model.graph)
    found = {}
    for name, layer in layers.items():
        if not layer.weight:
            found[name] = (np.ones(1, np.float32), np.zeros(1, np.int32))
            continue
        wanted = config.layers[name].weight

        def search(layer: Layer = layer, wanted: Any = wanted) -> Any:
            weight = array_of(index, layer.weight)
            rows = rows_of(balanced_weight(weight, layer, factors.get(layer.name, _NONE)), layer)
            return arq(rows, bits=wanted.num_bits, channel_wise=bool(wanted.channel_wise))

        result = guard.call(name, search)
        if result is not None:
            found[name] = result
    return found


# -- activations ------------------------------------------------------------------------------


class _Exact:
    """AMCT's IFMR: keeps the data of all batches."""

    def __init__(self, params: IfmrParams) -> None:
        self.params, self.kept = params, []  # type: IfmrParams, list[Array]

    def observe(self, x: NDArray[np.floating]) -> None:
        self.kept.append(np.array(x, copy=True).reshape(-1))

    def result(self) -> AscendScale:
        data = np.concatenate(self.kept)
        self.kept.clear()  # one tensor at a time is held twice
        return ifmr(data, self.params)


class _Streaming:
    def __init__(self, params: IfmrParams) -> None:
        self.params, self.histogram = params, IfmrHistogram()

    def observe(self, x: NDArray[np.floating]) -> None:
        self.histogram.observe(x)

    def result(self) -> AscendScale:
        return ifmr_streaming(self.histogram, self.params)


class _Hfmg:
    def __init__(self, params: HfmgParams) -> None:
        self.params, self.histogram = params, HfmgHistogram(params.nbins)

    def observe(self, x: NDArray[np.floating]) -> None:
        self.histogram.observe(x)

    def result(self) -> AscendScale:
        return hfmg(self.histogram, self.params)


@dataclass(slots=True)
class _Plan:
    """One observer for each (tensor, parameters); layers that agree on both share it."""

    keys: dict[str, tuple[str, Any]]
    observers: dict[tuple[str, Any], _Observer]
    bytes: int
    streamed: tuple[str, ...]
    troubles: dict[tuple[str, Any], CalibrationError]
    weighted: dict[str, bool]
    alive: set[tuple[str, Any]]

    @classmethod
    def of(
        cls,
        layers: Mapping[str, Layer],
        config: QuantConfig,
        tensors: Mapping[str, str],
        values: Mapping[str, Array],
        exact_bytes: int,
    ) -> _Plan:
        keys = {n: (tensors[n], _params(config.layers[n])) for n in layers}
        exact = {key for key in keys.values() if isinstance(key[1], IfmrParams)}
        one = sum(values[tensor].nbytes for tensor, _ in exact)
        streams = one * config.batch_num > exact_bytes
        observers = {key: _observer(key[1], streams) for key in keys.values()}
        streamed = tuple(n for n, k in keys.items() if streams and k in exact)
        weighted = {n: bool(layer.weight) for n, layer in layers.items()}
        return cls(keys, observers, 0 if streams else one, streamed, {}, weighted, set())

    def sentence(self, batch_num: int) -> str:
        """What will be kept, for the user, before it is."""
        if self.streamed:
            return (
                f"IFMR of {len(self.streamed)} layers runs on histograms: keeping their"
                " activations would pass the memory cap."
            )
        return f"IFMR keeps {self.bytes * batch_num / 2**20:.1f} MiB of activations."

    def observe(self, values: Mapping[str, Array], guard: _Guard) -> None:
        for key, observer in self.observers.items():
            if key in self.troubles:
                continue
            if key not in self.alive and values[key[0]].any():
                self.alive.add(key)
            try:
                observer.observe(values[key[0]])
            except CalibrationError as error:
                self.troubles[key] = error
                if guard.strict:
                    name = next(n for n, k in self.keys.items() if k == key)
                    raise _named(name, error) from None

    def record(
        self,
        name: str,
        weights: tuple[NDArray[np.float32], NDArray[np.int32]],
        factors: Mapping[str, NDArray[np.float32]],
    ) -> LayerRecord:
        """The layer's record; an observer's search runs once however many layers share it."""
        key = self.keys[name]
        if key in self.troubles:
            raise self.troubles[key]
        observer = self.observers[key]
        if not isinstance(observer, _Done):
            observer = self.observers[key] = _Done(observer.result())
        found = observer.result()
        return LayerRecord(
            scale_d=found.scale,
            offset_d=found.offset,
            scale_w=weights[0],
            factors=factors.get(name, _NONE),
            weighted=self.weighted[name],
        )


class _Done:
    def __init__(self, found: AscendScale) -> None:
        self.found = found

    def observe(self, x: NDArray[np.floating]) -> None:
        raise AssertionError("observed after the search")

    def result(self) -> AscendScale:
        return self.found


def _params(entry: LayerConfig) -> IfmrParams | HfmgParams:
    act = entry.activation
    affine = bool(act.asymmetric)
    if act.act_algo == "hfmg":
        return HfmgParams(nbins=act.num_of_bins, with_offset=affine)
    return IfmrParams(
        max_percentile=act.max_percentile,
        min_percentile=act.min_percentile,
        search_range=act.search_range,
        search_step=act.search_step,
        with_offset=affine,
    )


def _observer(params: IfmrParams | HfmgParams, streams: bool) -> _Observer:
    if isinstance(params, HfmgParams):
        return _Hfmg(params)
    return _Streaming(params) if streams else _Exact(params)


class Runner:
    """ONNX Runtime on a model with the wanted tensors among its outputs."""

    def __init__(self, model: onnx.ModelProto, tensors: list[str]) -> None:
        import onnx
        import onnxruntime as ort

        tapped = onnx.ModelProto()
        tapped.CopyFrom(model)
        inputs = {value.name for value in tapped.graph.input}
        outputs = {value.name for value in tapped.graph.output}
        for name in tensors:
            if name not in inputs | outputs:
                tapped.graph.output.append(onnx.ValueInfoProto(name=name))
        options = ort.SessionOptions()
        options.log_severity_level = 3
        self.session = ort.InferenceSession(
            tapped.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
        self.tensors = [name for name in tensors if name not in inputs]
        self.fed = [name for name in tensors if name in inputs]

    def run(self, batch: Batch) -> dict[str, Array]:
        """Input arrays -> the wanted tensors.

        Raises:
            FeedError: ONNX Runtime refused the batch.
        """
        try:
            values = self.session.run(self.tensors or None, dict(batch))
        except Exception as error:  # ONNX Runtime raises classes of its own, and RuntimeError
            raise FeedError(
                f"the model must take the batch, got: {' '.join(str(error).split())[:300]}"
            ) from None
        found = dict(zip(self.tensors, values, strict=False))
        return found | {name: np.asarray(batch[name]) for name in self.fed}
