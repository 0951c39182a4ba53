"""The calibration that AMCT defines: weights by ARQ or AdaRound, channels by DMQ, then activations.

As in AMCT the activations are those of the float model with fake-quantized weights (those of
ConvTranspose stay as they are, but for AdaRound's), and each algorithm sees `batch_num` batches::

    float model -> DMQ factors (first batch) -> weights: ARQ -> batches -> IFMR, HFMG -> record
                                              (AdaRound, a layer after the other, first batches)

A `RecordPlan` says what must be observed for that, and makes the record of what was.

The model whose activations AMCT looks at: weights fake-quantized, inputs balanced.

Layers whose IFMR clips nothing: the one choice beside AMCT's default that calib8 tries.

IFMR tries ratios of the observed maximum (its percentile of 0.999999) and takes the one of least
squared error, which clips what is rare in the images that calibrate::

    ratio   0.7 ------ 1.0 ------ 1.3      AMCT's default search_range
                       1.0 ------ 1.3      nothing is clipped

A range that begins at 1 is an ordinary setting of AMCT's configuration, where it is written too.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from calibrators.amct.arq import (
    arq,
    arq_fake_quantize,
    ascend_half,
    balance_factors,
    channel_max,
    weight_channel_max,
)
from calibrators.amct.ifmr import AscendScale
from calibrators.amct.recorders import (
    ChannelMax,
    ChannelMaxOf,
    Exact,
    ExactOf,
    HfmgOf,
    IfmrOf,
    Rounded,
)
from calibrators.errors import CalibrationError
from calibrators.scales import Scale
from calibrators.statistics import Statistic
from deploy.calibration.observation import Observation, Observed, Variant
from deploy.calibration.one_pass import observe
from deploy.errors import ConfigError, FeedError
from deploy.feed.parallel import Sample
from deploy.graph.edit import cut
from deploy.graph.index import Graph
from deploy.targets.ascend.config_keys import LayerConfig, QuantConfig
from deploy.targets.ascend.layers import Layer, LayerGraph
from deploy.targets.ascend.record import LayerRecord, dead, faint, params_of, range_of, searched
from deploy.targets.ascend.weight_rounding import (
    MOST_SAMPLES,
    AdaStep,
    adaptive,
    algorithms,
    left,
    refuse_open,
    settle,
    steps_of,
)

if TYPE_CHECKING:
    import onnx

    from deploy.method import Choices, Method


_NONE = np.zeros(0, np.float32)


def prepared_model(
    model: onnx.ModelProto,
    layers: Mapping[str, Layer],
    config: QuantConfig,
    weights: Mapping[str, tuple[NDArray[np.float32], NDArray[np.int32]]],
    factors: Mapping[str, NDArray[np.float32]],
    rounded: Mapping[str, NDArray[np.int8]] | None = None,
) -> onnx.ModelProto:
    """The float model to observe: weights fake-quantized, inputs divided by DMQ factors.

    Of AdaRound's layers those that are `rounded` are so, the others stay as they are.
    """
    from onnx import numpy_helper

    from deploy.targets.ascend.deploy_model import rewrite_inputs
    from deploy.targets.ascend.quant_layer import array_of, balanced_weight, from_rows, rows_of

    index, integers = Graph(model), rounded or {}
    arrays = {}
    for name, layer in layers.items():
        if not layer.weight:
            continue
        weight = balanced_weight(array_of(index, layer.weight), layer, factors.get(name, _NONE))
        rows = rows_of(weight, layer)
        if name in integers:
            shape = (-1,) + (1,) * (rows.ndim - 1)
            rows = integers[name].reshape(rows.shape) * weights[name][0].reshape(shape)
        elif layer.kind != "ConvTranspose" and not adaptive(config, name):  # AMCT leaves it
            bits = config.layers[name].weight.num_bits
            rows = np.asarray(arq_fake_quantize(rows, *weights[name], bits=bits), np.float32)
        arrays[layer.weight] = numpy_helper.from_array(from_rows(rows, layer), layer.weight)
    inverse = {n: np.float32(1) / f for n, f in factors.items() if n in layers}
    return rewrite_inputs(model, layers, arrays, inverse)


Factors = Mapping[str, NDArray[np.float32]]
Weights = dict[str, tuple[NDArray[np.float32], NDArray[np.int32]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """What the calibration gives.

    Attributes:
        records: layer name -> scales, in the model's order.
        ranges: tensor -> the clip range of the layers that read it.
        kept_bytes: activations that exact IFMR held.
        adaround: (least, greatest) share of the error of the nearest codes that AdaRound leaves to
            a layer's output, on the places it looked at; None where no layer has it.
        dead: layers whose input was zero throughout; their scale is 1 and means nothing.
        faint: layers whose input is so small that AMCT's scale, 1, rounds all of it to zero.
    """

    records: dict[str, LayerRecord]
    ranges: dict[str, Scale] = field(default_factory=dict)
    kept_bytes: int = 0
    adaround: tuple[float, float] | None = None
    dead: tuple[str, ...] = ()
    faint: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class RecordPlan:
    """What a settled config wants observed.

    Attributes:
        model: float model, nodes named.
        graph: its layers.
        config: from `deploy.targets.ascend.config.settled`.
        base: key of `model` among the variants that are run.
        samples: how many the feed gives, of which `config.batch_num` batches are used.
        images: in each of them, which a model with a fixed batch has several of.
        together: samples that make one of AMCT's batches; the last one may be smaller.
        exact: IFMR on all values, kept in memory, instead of on histograms.
        balanced_over: samples on which DMQ's channels are measured; None for AMCT's first batch.
        lenient: a layer that DMQ cannot balance gets factors of 1, where it is only tried.

    Raises:
        ConfigError: an algorithm that calib8 does not compute, or nothing to quantize.
        FeedError: fewer batches than batch_num.
    """

    model: onnx.ModelProto
    graph: LayerGraph
    config: QuantConfig
    base: str
    samples: int
    images: int = 1
    together: int = 1
    exact: bool = False
    balanced_over: int | None = None
    lenient: bool = False
    _arq: Weights = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        if not self._entries:
            raise ConfigError("a configuration must leave a layer to quantize, got none enabled")
        refuse_open(self.model, self.layers, self.config)
        if self.batches < self.config.batch_num:
            size = self.images * self.together
            of = f" of {size} images" if size > 1 else ""
            raise FeedError(
                f"the calibration needs batch_num batches, {self.config.batch_num}, got"
                f" {self.batches}{of}; give more data or lower batch_num"
            )

    @property
    def batches(self) -> int:
        """How many batches the samples make."""
        return -(-self.samples // self.together)

    @property
    def used(self) -> int:
        """How many samples stand in the batches that are used."""
        return min(self.samples, self.config.batch_num * self.together)

    @cached_property
    def layers(self) -> dict[str, Layer]:
        """What to quantize: layers, in the model's order, and what is offered and asked for."""
        return self.graph.asked(self._entries)

    @cached_property
    def _entries(self) -> Mapping[str, LayerConfig]:
        return self.config.entries()

    @cached_property
    def _index(self) -> Graph:
        return Graph(self.model)

    @cached_property
    def maxima(self) -> dict[str, Observation]:
        """Layer that DMQ balances -> the channels' maxima of its input."""
        variant = Variant(self.base, lambda _: self.model)
        return {
            name: Observation(
                variant,
                layer.input,
                ChannelMaxOf(axis=1 if layer.rank else -1, samples=self._first),
                name,
            )
            for name, layer in self.layers.items()
            if self._entries[name].dmq_balancer_param is not None
        }

    @property
    def _first(self) -> int:
        """Samples on which DMQ's channels are measured."""
        return self.balanced_over or self.together

    @cached_property
    def adaround(self) -> dict[str, AdaStep]:
        """Layer that AdaRound rounds -> what it wants observed."""
        return steps_of(
            self.model,
            self.layers,
            self.config,
            key=self._key(),
            samples=self.used,
            needs=tuple(self.maxima.values()),
            prepared=self._prepared,
        )

    @cached_property
    def activations(self) -> dict[str, Observation]:
        """Layer -> the statistic that its search wants; layers that agree on both share it."""
        return {
            name: self._observation(
                name, f"{name}.mul.output0" if name in self.maxima else layer.input
            )
            for name, layer in self.layers.items()
        }

    @cached_property
    def seconds(self) -> dict[str, Observation]:
        """MatMul of two activations -> the same of its second factor."""
        return {
            name: self._observation(name, layer.others[0])
            for name, layer in self.layers.items()
            if layer.two_activations
        }

    @cached_property
    def _variant(self) -> Variant:
        needs = (*self.maxima.values(), *(one.inputs for one in self.adaround.values()))
        return Variant(self._key(), self._prepared, needs=needs)

    def _observation(self, name: str, tensor: str) -> Observation:
        return Observation(self._variant, tensor, self._statistic(self._entries[name]), name)

    @property
    def observations(self) -> tuple[Observation, ...]:
        """All of them."""
        rounded = (one.inputs for one in self.adaround.values())
        activations = (*self.activations.values(), *self.seconds.values())
        return (*self.maxima.values(), *rounded, *activations)

    def record(self, observed: Observed) -> Recorded:
        """Search every layer.

        Raises:
            CalibrationError: activations or weights with NaN or Inf, or scales that are not finite.
        """
        factors, rounded = self.factors(observed), self.rounded(observed)
        order = sorted(self.activations, key=lambda name: name not in factors)  # AMCT's, stable
        firsts = [(name, self.activations[name]) for name in order]
        scales = self._scales([*firsts, *self.seconds.items()], observed)
        weights = self.weights(observed)
        records = {
            name: self._record(name, scale, weights[name][0], factors, rounded)
            for name, scale in zip(order, scales, strict=False)
        }
        inputs = [(name, records[name], observation) for name, observation in firsts]
        others = zip(self.seconds.items(), scales[len(order) :], strict=True)
        for (name, observation), second in others:
            inputs.append((name, replace(records[name], scale_d=second.scale), observation))
            records[name] = replace(records[name], scale_w=np.array([second.scale]), weighted=True)
        seen = [(name, one, observed.of(observation)) for name, one, observation in inputs]
        lost = tuple(dict.fromkeys(name for name, _, recorder in seen if dead(recorder)))
        zeros = dict.fromkeys(name for name, one, recorder in seen if faint(one, recorder))
        different = {observation.key: observed.of(observation) for _, _, observation in inputs}
        return Recorded(
            records=records,
            ranges={
                observation.tensor: range_of(one, observed.of(observation), self._entries[name])
                for name, one, observation in inputs
            },
            kept_bytes=sum(r.nbytes for r in different.values() if isinstance(r, Exact)),
            adaround=left(rounded.values()),
            dead=lost,
            faint=tuple(name for name in zeros if name not in lost),
        )

    def _scales(
        self, wanted: Iterable[tuple[str, Observation]], observed: Observed
    ) -> list[AscendScale]:
        """Of layers' inputs; searched once for those that agree on tensor and parameters."""
        found: dict[object, AscendScale] = {}
        scales = []
        for name, observation in wanted:
            params = params_of(self._entries[name])
            key = (observation, params)
            if key not in found:
                with _in_layer(name):
                    found[key] = searched(observed.of(observation), params)
            scales.append(found[key])
        if self.config.fakequant_precision_mode is None:
            return scales
        return [replace(one, scale=ascend_half(one.scale)) for one in scales]

    def _record(
        self,
        name: str,
        first: AscendScale,
        scale_w: NDArray[np.float32],
        factors: Factors,
        rounded: Mapping[str, Rounded],
    ) -> LayerRecord:
        """Of a layer's first input, and of its weight where it has one."""
        layer, entry = self.layers[name], self._entries[name]
        return LayerRecord(
            scale_d=first.scale,
            offset_d=first.offset,
            scale_w=scale_w,
            factors=factors.get(name, _NONE),
            weighted=bool(layer.weight),
            rounded=rounded[name].integers if name in rounded else None,
            tensor=layer.at is not None,
            act_bits=entry.activation.num_bits,
            weight_bits=entry.weight.num_bits if layer.weight else 8,
            force_fp16=self.config.fakequant_precision_mode is not None,
        )

    def factors(self, observed: Observed) -> Factors:
        """DMQ factors of the layers that are balanced, from the first batch."""
        found = {}
        for name, observation in self.maxima.items():
            recorder = observed.of(observation)
            assert isinstance(recorder, ChannelMax)
            with _in_layer(name):
                found[name] = self._factor(name, recorder)
        return found

    def weights(self, observed: Observed) -> Weights:
        """Weight (scale, offset) by layer; a pool has scale 1, as AMCT records it."""
        rounded = self.rounded(observed)
        found = self._by_arq(self.factors(observed))
        return {n: _weights_of(rounded[n]) if n in rounded else found[n] for n in self.layers}

    def rounded(
        self, observed: Observed, names: Collection[str] | None = None
    ) -> dict[str, Rounded]:
        """What AdaRound made of its layers, or of some: searched where it is not known yet."""
        factors, found = self.factors(observed), {}
        for place, (name, step) in enumerate(self.adaround.items(), 1):
            if names is None or name in names:
                with _in_layer(name):
                    rows = self._rows(step.layer, factors)
                    where = f"{place} of {len(self.adaround)}: {name}"
                    found[name] = settle(step, rows, observed, place=where)
        return found

    def _by_arq(self, factors: Factors) -> Weights:
        if not self._arq:  # the factors follow from the model and the first batch
            for name, layer in self.layers.items():
                if name not in self.adaround:
                    with _in_layer(name):
                        self._arq[name] = self._weight(layer, factors)
        return self._arq

    def _factor(self, name: str, maxima: ChannelMax) -> NDArray[np.float32]:
        from deploy.targets.ascend.quant_layer import array_of

        layer = self.layers[name]
        weight = _weight_max(array_of(self._index, layer.weight), layer)
        strength = self._entries[name].dmq_balancer_param
        assert strength is not None
        try:
            return balance_factors(maxima.values, weight, strength=strength)
        except CalibrationError:
            if not self.lenient:
                raise
            return np.ones_like(maxima.values)

    def _weight(
        self, layer: Layer, factors: Factors
    ) -> tuple[NDArray[np.float32], NDArray[np.int32]]:
        if layer.at is not None:
            return _NONE, np.zeros(0, np.int32)
        if not layer.weight:
            return np.ones(1, np.float32), np.zeros(1, np.int32)
        wanted = self._entries[layer.name].weight
        rows = self._rows(layer, factors)
        return arq(rows, bits=wanted.num_bits, channel_wise=bool(wanted.channel_wise))

    def _rows(self, layer: Layer, factors: Factors) -> NDArray[np.float32]:
        """A layer's weight, balanced, output channels first."""
        from deploy.targets.ascend.quant_layer import array_of, balanced_weight, rows_of

        weight = array_of(self._index, layer.weight)
        return rows_of(balanced_weight(weight, layer, factors.get(layer.name, _NONE)), layer)

    def _prepared(
        self, observed: Observed, names: Collection[str] | None = None, end: str = ""
    ) -> onnx.ModelProto:
        """The model to observe, of AdaRound's layers these rounded, or all; up to a tensor."""
        factors = self.factors(observed)
        rounded = self.rounded(observed, names)
        weights = {**self._by_arq(factors), **{n: _weights_of(one) for n, one in rounded.items()}}
        integers = {name: one.integers for name, one in rounded.items() if one.integers is not None}
        model = cut(self.model, end) if end else self.model
        there = {node.name for node in model.graph.node}
        layers = {name: layer for name, layer in self.layers.items() if layer.node in there}
        return prepared_model(model, layers, self.config, weights, factors, integers)

    def _key(self) -> str:
        """The variant with all that its weights and inputs depend on."""
        first = min(self.used, MOST_SAMPLES)
        how = {
            name: (
                entry.weight.num_bits,
                entry.weight.channel_wise,
                entry.dmq_balancer_param,
                *((repr(entry.weight), first) if adaptive(self.config, name) else ()),
            )
            for name, entry in self.config.enabled().items()
        }
        parts = [self.base, how, *([self._first] if self.maxima and self._first > 1 else [])]
        digest = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
        return f"weights fake-quantized by AMCT's {algorithms(self.config)}, {digest[:12]}"

    def _statistic(self, entry: LayerConfig) -> Statistic:
        samples = self.used if self.used < self.samples else None
        if entry.activation.act_algo == "hfmg":
            bins = entry.activation.num_of_bins
            return HfmgOf(nbins=bins, samples=samples, together=self.together)
        return ExactOf(samples=samples) if self.exact else IfmrOf(samples=samples)


def calibrate(
    model: onnx.ModelProto,
    graph: LayerGraph,
    batches: Iterable[Sample],
    config: QuantConfig,
    *,
    exact: bool = False,
) -> Recorded:
    """Observe and record in one go, for whoever has a model and batches at hand.

    Args:
        model: float model, nodes named.
        graph: its layers.
        batches: input name -> array, one dict a batch; `config.batch_num` of them are used.
        config: from `deploy.targets.ascend.config.settled`.
        exact: IFMR on all values, kept in memory.

    Raises:
        As `RecordPlan`, `RecordPlan.record` and `deploy.calibration.one_pass.observe`.
    """
    listed = list(batches)
    plan = RecordPlan(
        model=model, graph=graph, config=config, base="float", samples=len(listed), exact=exact
    )
    return plan.record(observe(plan.observations, listed, runs=Counter()))


def _weights_of(rounded: Rounded) -> tuple[NDArray[np.float32], NDArray[np.int32]]:
    """(scale, offset) of a layer that AdaRound rounded."""
    return rounded.scale, np.zeros(rounded.scale.size, np.int32)


@contextmanager
def _in_layer(name: str) -> Iterator[None]:
    """Errors name the layer and the way out."""
    try:
        yield
    except CalibrationError as error:
        raise CalibrationError(
            f"layer {name!r}: {error} (to leave it in float, put it under skip_layers or"
            " --keep-float)"
        ) from None


def _weight_max(weight: NDArray[np.float32], layer: Layer) -> NDArray[np.float32]:
    if layer.kind == "Conv":
        return weight_channel_max(weight, layer.group)
    if layer.kind == "MatMul":
        return channel_max(weight, -2)
    return channel_max(weight, 1 if layer.trans_b else 0)


KEEPING = "minmax"
_WHOLE = (1.0, 1.3)


def kept_layers(plan: RecordPlan, choices: Choices) -> frozenset[str]:
    """The layers for which the choices want no clipping.

    Raises:
        ConfigError: a method that is neither that nor AMCT's own.
    """
    for method in filter(None, (choices.method, *choices.methods.values())):
        _check(method)
    entries = plan.config.entries()
    return frozenset(
        name
        for name, layer in plan.layers.items()
        if (choices.methods.get(layer.input) or choices.method) is not None
        and entries[name].activation.act_algo == "ifmr"
    )


def _check(method: Method) -> None:
    if method.name != KEEPING:
        raise ConfigError(
            f"a plan for ascend takes the method {KEEPING} or none, got {method.label!r}; delete"
            " the line, or the file to have it made anew"
        )


def keeping(config: QuantConfig, layers: Collection[str]) -> QuantConfig:
    """The config in which IFMR clips nothing in these layers."""
    changed = {
        name: replace(one, activation=replace(one.activation, search_range=_WHOLE))
        if name in layers
        else one
        for name, one in config.layers.items()
    }
    tensors = (
        replace(one, activation=replace(one.activation, search_range=_WHOLE))
        if one.key in layers
        else one
        for one in config.tensors
    )
    return replace(config, layers=changed, tensors=tuple(tensors))


def keeping_plan(plan: RecordPlan) -> RecordPlan:
    """The plan with no clipping in any layer; what it wants observed is the same."""
    return replace(plan, config=keeping(plan.config, plan.layers))


def mixed(plan: RecordPlan, own: Recorded, kept: Recorded, layers: Collection[str]) -> Recorded:
    """Records as the plan gives them, and in these layers those without clipping."""
    read = (*plan.activations.items(), *plan.seconds.items())
    tensors = {observation.tensor for name, observation in read if name in layers}
    return replace(
        own,
        records={n: (kept if n in layers else own).records[n] for n in own.records},
        ranges={t: (kept if t in tensors else own).ranges[t] for t in own.ranges},
    )
