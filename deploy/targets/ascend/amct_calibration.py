"""AMCT's calibration: weights by ARQ or AdaRound, input channels by DMQ, then activations.

As in AMCT, activations are observed on the float model with fake-quantized weights (ConvTranspose
weights stay float unless AdaRound rounds them), and each algorithm gets `batch_num` batches::

    float model -> DMQ factors (first batch) -> weights: ARQ -> batches -> IFMR, HFMG -> record
                                           (AdaRound, one layer after the other, first batches)

A `RecordPlan` defines the observations for that, and computes the record from their statistics.
"""

import hashlib
import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import numpy_helper

from calibrators.amct.arq import (
    arq,
    arq_fake_quantize,
    ascend_half,
    balance_factors,
    by_row,
    channel_max,
    weight_channel_max,
)
from calibrators.amct.ifmr import AscendScale
from calibrators.amct.recorders import (
    AllValues,
    AllValuesOf,
    ChannelMax,
    ChannelMaxOf,
    HfmgOf,
    IfmrOf,
    RoundedWeights,
)
from calibrators.errors import CalibrationError
from calibrators.scales import Scale
from calibrators.statistics import Statistic
from deploy.calibration.observation import Observation, ObservedStatistics, Variant
from deploy.errors import ConfigError, FeedError
from deploy.graph.edit import extract_output
from deploy.graph.index import Graph
from deploy.targets.ascend.config_keys import LayerConfig, QuantConfig
from deploy.targets.ascend.deploy_model import rewrite_inputs
from deploy.targets.ascend.layers import Layer, LayerGraph
from deploy.targets.ascend.quant_layer import balanced_weight, from_rows, read_constant, to_rows
from deploy.targets.ascend.record import (
    LayerRecord,
    clip_range,
    is_rounded_to_zero,
    is_zero_input,
    search_activation_scale,
    search_params,
)
from deploy.targets.ascend.weight_rounding import (
    MAX_SAMPLES,
    AdaStep,
    error_ratio_range,
    make_adaround_steps,
    refuse_padless_deconvs,
    round_layer,
    uses_adaround,
    weight_algorithms,
)

Factors = Mapping[str, NDArray[np.float32]]
Weights = dict[str, NDArray[np.float32]]  # layer -> scale of its weight, [C_out] or [1]

_NONE = np.zeros(0, np.float32)


def observation_model(
    model: onnx.ModelProto,
    layers: Mapping[str, Layer],
    config: QuantConfig,
    weights: Weights,
    factors: Factors,
    rounded: Mapping[str, NDArray[np.int8]] = MappingProxyType({}),
) -> onnx.ModelProto:
    """Return the float model to observe: weights fake-quantized, inputs divided by DMQ factors.

    AdaRound layers get the integers in `rounded`; those that are missing there stay float.
    """
    index, arrays = Graph(model), {}
    for name, layer in layers.items():
        if not layer.weight:
            continue
        weight = balanced_weight(
            read_constant(index, layer.weight), layer, factors.get(name, _NONE)
        )
        rows = to_rows(weight, layer)
        if name in rounded:
            rows = rounded[name].reshape(rows.shape) * by_row(weights[name], rows.ndim)
        elif layer.kind != "ConvTranspose" and not uses_adaround(config, name):  # AMCT leaves it
            bits = config.layers[name].weight.num_bits
            rows = np.asarray(arq_fake_quantize(rows, weights[name], bits=bits), np.float32)
        arrays[layer.weight] = numpy_helper.from_array(from_rows(rows, layer), layer.weight)
    inverse = {n: np.float32(1) / f for n, f in factors.items() if n in layers}
    return rewrite_inputs(model, layers, arrays, inverse)


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationRecord:
    """Result of the calibration.

    Attributes:
        activation_bytes: memory of the activations that exact IFMR kept.
        adaround_ratios: (smallest, largest) ratio of a layer's output error with AdaRound to that
            with rounding to nearest, at the sampled positions; None without AdaRound layers.
        zero_layers: layers whose input was always zero; their scale is 1 and means nothing.
        underflow_layers: layers whose input is so small that AMCT's scale, 1, rounds all of it to
            zero.
    """

    records: dict[str, LayerRecord]
    ranges: dict[str, Scale] = field(default_factory=dict)
    activation_bytes: int = 0
    adaround_ratios: tuple[float, float] | None = None
    zero_layers: tuple[str, ...] = ()
    underflow_layers: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class RecordPlan:
    """The observations of a resolved config, and the record computed from them.

    Attributes:
        base: key of `model` among the model variants that are run.
        samples: number of calibration samples; `config.batch_num` batches of them are used.
        images_per_sample: images per sample, for models with a fixed batch.
        samples_per_batch: samples per AMCT batch; the last batch may be smaller.
        exact: run IFMR on all values, kept in memory, instead of on histograms.
        dmq_samples: number of samples for DMQ's channel maxima; None for AMCT's first batch.
        allow_unbalanced: give factors of 1 to a layer that DMQ cannot balance, instead of raising.

    Raises:
        ConfigError: an algorithm that calib8 does not implement, or nothing to quantize.
        FeedError: fewer batches than batch_num.
    """

    model: onnx.ModelProto
    graph: LayerGraph
    config: QuantConfig
    base: str
    samples: int
    images_per_sample: int = 1
    samples_per_batch: int = 1
    exact: bool = False
    dmq_samples: int | None = None
    allow_unbalanced: bool = False
    _arq: Weights = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        if not self._entries:
            raise ConfigError("a configuration must leave a layer to quantize, got none enabled")
        refuse_padless_deconvs(self.model, self.layers, self.config)
        if self.batch_count < self.config.batch_num:
            size = self.images_per_sample * self.samples_per_batch
            of = f" of {size} images" if size > 1 else ""
            raise FeedError(
                f"the calibration needs batch_num batches, {self.config.batch_num}, got"
                f" {self.batch_count}{of}; give more data or lower batch_num"
            )

    @property
    def batch_count(self) -> int:
        """Number of AMCT batches in the samples."""
        return -(-self.samples // self.samples_per_batch)

    @property
    def used_samples(self) -> int:
        """Number of samples in the batches that are used."""
        return min(self.samples, self.config.batch_num * self.samples_per_batch)

    @cached_property
    def layers(self) -> dict[str, Layer]:
        """Enabled layers and tensor_quantize inputs, in the model's order."""
        return self.graph.select(self._entries)

    @cached_property
    def _entries(self) -> Mapping[str, LayerConfig]:
        return self.config.entries()

    @cached_property
    def _index(self) -> Graph:
        return Graph(self.model)

    @cached_property
    def channel_maxima(self) -> dict[str, Observation]:
        """Layer that DMQ balances -> observation of its input's channel maxima."""
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
        """Number of samples for DMQ's channel maxima."""
        return self.dmq_samples or self.samples_per_batch

    @cached_property
    def adaround_steps(self) -> dict[str, AdaStep]:
        """Layer that AdaRound rounds -> its step, with its observations."""
        return make_adaround_steps(
            self.model,
            self.layers,
            self.config,
            key=self._key(),
            samples=self.used_samples,
            needs=tuple(self.channel_maxima.values()),
            prepared=self._prepared,
        )

    @cached_property
    def activations(self) -> dict[str, Observation]:
        """Layer -> observation for its search; equal tensor and statistic are observed once."""
        return {
            name: self._observation(
                name, f"{name}.mul.output0" if name in self.channel_maxima else layer.input
            )
            for name, layer in self.layers.items()
        }

    @cached_property
    def second_factors(self) -> dict[str, Observation]:
        """MatMul of two activations -> observation of its second factor."""
        return {
            name: self._observation(name, layer.other_inputs[0])
            for name, layer in self.layers.items()
            if layer.two_activations
        }

    @cached_property
    def _variant(self) -> Variant:
        needs = (
            *self.channel_maxima.values(),
            *(one.inputs for one in self.adaround_steps.values()),
        )
        return Variant(self._key(), self._prepared, needs=needs)

    def _observation(self, name: str, tensor: str) -> Observation:
        return Observation(self._variant, tensor, self._statistic(self._entries[name]), name)

    @property
    def observations(self) -> tuple[Observation, ...]:
        """All observations of the plan."""
        rounded = (one.inputs for one in self.adaround_steps.values())
        activations = (*self.activations.values(), *self.second_factors.values())
        return (*self.channel_maxima.values(), *rounded, *activations)

    def record(self, observed: ObservedStatistics) -> CalibrationRecord:
        """Run all searches on the observed statistics.

        Raises:
            CalibrationError: activations or weights with NaN or Inf, or scales that are not finite.
        """
        factors, rounded = self.dmq_factors(observed), self.round_weights(observed)
        order = sorted(self.activations, key=lambda name: name not in factors)  # AMCT's, stable
        firsts = [(name, self.activations[name]) for name in order]
        scales = self._scales([*firsts, *self.second_factors.items()], observed)
        weights = self.weight_scales(observed)
        records = {
            name: self._record(name, scale, weights[name], factors, rounded)
            for name, scale in zip(order, scales, strict=False)
        }
        inputs = [(name, records[name], observation) for name, observation in firsts]
        others = zip(self.second_factors.items(), scales[len(order) :], strict=True)
        for (name, observation), second in others:
            inputs.append((name, replace(records[name], scale_d=second.scale), observation))
            records[name] = replace(
                records[name], scale_w=np.array([second.scale]), has_weight=True
            )
        recorders = [
            (name, one, observed.recorder(observation)) for name, one, observation in inputs
        ]
        zeros = tuple(
            dict.fromkeys(name for name, _, recorder in recorders if is_zero_input(recorder))
        )
        tiny = dict.fromkeys(
            name for name, one, recorder in recorders if is_rounded_to_zero(one, recorder)
        )
        distinct = {observation.key: observed.recorder(observation) for _, _, observation in inputs}
        return CalibrationRecord(
            records=records,
            ranges={
                observation.tensor: clip_range(
                    one, observed.recorder(observation), self._entries[name]
                )
                for name, one, observation in inputs
            },
            activation_bytes=sum(r.nbytes for r in distinct.values() if isinstance(r, AllValues)),
            adaround_ratios=error_ratio_range(rounded.values()),
            zero_layers=zeros,
            underflow_layers=tuple(name for name in tiny if name not in zeros),
        )

    def _scales(
        self, wanted: Iterable[tuple[str, Observation]], observed: ObservedStatistics
    ) -> list[AscendScale]:
        """Return the scale of each layer's input; equal observation and search run once."""
        results: dict[object, AscendScale] = {}
        scales = []
        for name, observation in wanted:
            params = search_params(self._entries[name])
            key = (observation, params)
            if key not in results:
                with _in_layer(name):
                    results[key] = search_activation_scale(observed.recorder(observation), params)
            scales.append(results[key])
        if self.config.fakequant_precision_mode is None:
            return scales
        return [replace(one, scale=ascend_half(one.scale)) for one in scales]

    def _record(
        self,
        name: str,
        first: AscendScale,
        scale_w: NDArray[np.float32],
        factors: Factors,
        rounded: Mapping[str, RoundedWeights],
    ) -> LayerRecord:
        """Return the record of a layer's first input and its weight."""
        layer, entry = self.layers[name], self._entries[name]
        return LayerRecord(
            scale_d=first.scale,
            offset_d=first.offset,
            scale_w=scale_w,
            factors=factors.get(name, _NONE),
            has_weight=bool(layer.weight),
            rounded_weight=rounded[name].integers if name in rounded else None,
            is_node_input=layer.input_index is not None,
            act_bits=entry.activation.num_bits,
            weight_bits=entry.weight.num_bits if layer.weight else 8,
            force_fp16=self.config.fakequant_precision_mode is not None,
        )

    def dmq_factors(self, observed: ObservedStatistics) -> Factors:
        """Return layer -> DMQ factors, from the channel maxima of the first batch."""
        factors = {}
        for name, observation in self.channel_maxima.items():
            recorder = observed.recorder(observation)
            assert isinstance(recorder, ChannelMax)
            with _in_layer(name):
                factors[name] = self._factor(name, recorder)
        return factors

    def weight_scales(self, observed: ObservedStatistics) -> Weights:
        """Return layer -> scale of its weight; a pool has scale 1, as in AMCT."""
        rounded = self.round_weights(observed)
        by_arq = self._by_arq(self.dmq_factors(observed))
        return {n: rounded[n].scale if n in rounded else by_arq[n] for n in self.layers}

    def round_weights(
        self, observed: ObservedStatistics, names: Collection[str] | None = None
    ) -> dict[str, RoundedWeights]:
        """Return AdaRound's result for its layers or for `names`; search if not known yet."""
        factors, results = self.dmq_factors(observed), {}
        for place, (name, step) in enumerate(self.adaround_steps.items(), 1):
            if names is None or name in names:
                with _in_layer(name):
                    rows = self._rows(step.layer, factors)
                    where = f"{place} of {len(self.adaround_steps)}: {name}"
                    results[name] = round_layer(step, rows, observed, place=where)
        return results

    def _by_arq(self, factors: Factors) -> Weights:
        if not self._arq:  # the factors follow from the model and the first batch
            found: Weights = {}
            for name, layer in self.layers.items():
                if name not in self.adaround_steps:
                    with _in_layer(name):
                        found[name] = self._weight(layer, factors)
            self._arq.update(found)  # at once: trials in other threads share the plan
        return self._arq

    def _factor(self, name: str, maxima: ChannelMax) -> NDArray[np.float32]:
        layer = self.layers[name]
        weight = _weight_max(read_constant(self._index, layer.weight), layer)
        strength = self._entries[name].dmq_balancer_param
        assert strength is not None
        try:
            return balance_factors(maxima.values, weight, strength=strength)
        except CalibrationError:
            if not self.allow_unbalanced:
                raise
            return np.ones_like(maxima.values)

    def _weight(self, layer: Layer, factors: Factors) -> NDArray[np.float32]:
        if layer.input_index is not None:
            return _NONE
        if not layer.weight:
            return np.ones(1, np.float32)
        params = self._entries[layer.name].weight
        rows = self._rows(layer, factors)
        return arq(rows, bits=params.num_bits, channel_wise=bool(params.channel_wise))

    def _rows(self, layer: Layer, factors: Factors) -> NDArray[np.float32]:
        """Return a layer's weight times its DMQ factors, output channels first."""
        weight = read_constant(self._index, layer.weight)
        return to_rows(balanced_weight(weight, layer, factors.get(layer.name, _NONE)), layer)

    def _prepared(
        self, observed: ObservedStatistics, names: Collection[str] | None = None, end: str = ""
    ) -> onnx.ModelProto:
        """Return the model to observe, cut after `end`; `names` limits the rounded layers."""
        factors = self.dmq_factors(observed)
        rounded = self.round_weights(observed, names)
        weights = {**self._by_arq(factors), **{n: one.scale for n, one in rounded.items()}}
        integers = {name: one.integers for name, one in rounded.items() if one.integers is not None}
        model = extract_output(self.model, end) if end else self.model
        remaining = {node.name for node in model.graph.node}
        layers = {name: layer for name, layer in self.layers.items() if layer.node in remaining}
        return observation_model(model, layers, self.config, weights, factors, integers)

    def _key(self) -> str:
        """Return the variant's key: all that its weights and inputs depend on."""
        first = min(self.used_samples, MAX_SAMPLES)
        settings = {
            name: (
                entry.weight.num_bits,
                entry.weight.channel_wise,
                entry.dmq_balancer_param,
                *((repr(entry.weight), first) if uses_adaround(self.config, name) else ()),
            )
            for name, entry in self.config.enabled().items()
        }
        hashed = [
            self.base,
            settings,
            *([self._first] if self.channel_maxima and self._first > 1 else []),
        ]
        digest = hashlib.sha256(json.dumps(hashed, sort_keys=True).encode()).hexdigest()
        return f"weights fake-quantized by AMCT's {weight_algorithms(self.config)}, {digest[:12]}"

    def _statistic(self, entry: LayerConfig) -> Statistic:
        samples = self.used_samples if self.used_samples < self.samples else None
        if entry.activation.act_algo == "hfmg":
            bins = entry.activation.num_of_bins
            return HfmgOf(nbins=bins, samples=samples, together=self.samples_per_batch)
        return AllValuesOf(samples=samples) if self.exact else IfmrOf(samples=samples)


@contextmanager
def _in_layer(name: str) -> Iterator[None]:
    """Add the layer's name and a remedy to errors."""
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
