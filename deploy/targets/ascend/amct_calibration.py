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

import numpy as np
import onnx
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
    ChannelMax,
    ChannelMaxOf,
    HfmgOf,
    IfmrOf,
    RoundedWeights,
)
from calibrators.errors import CalibrationError
from calibrators.grids import Float32Array
from calibrators.scales import Scales
from calibrators.statistics import Statistic
from deploy.calibration.observation import Observation, ObservedStatistics, Variant
from deploy.errors import ConfigError, FeedError
from deploy.graph.edit import extract_output
from deploy.graph.index import Graph, names_of
from deploy.targets.ascend.config_keys import LayerConfig, QuantConfig
from deploy.targets.ascend.deploy_model import rewrite_inputs
from deploy.targets.ascend.layers import Layer, LayerGraph
from deploy.targets.ascend.quant_layer import (
    from_rows,
    invert_dmq_factors,
    read_constant,
    read_weight_rows,
)
from deploy.targets.ascend.record import (
    NO_DMQ_FACTORS,
    InputRecorder,
    LayerRecord,
    Records,
    clip_range,
    search_activation_scale,
)
from deploy.targets.ascend.weight_rounding import (
    MAX_SAMPLES,
    AdaRoundSteps,
    AdaStep,
    observed_input,
    refuse_padless_deconvs,
    round_layer,
    uses_adaround,
    weight_algorithms,
)

DmqFactors = Mapping[str, Float32Array]  # layer that DMQ balances -> its factors, [C_in]
WeightScales = dict[str, Float32Array]  # layer -> scale of its weight, [C_out] or [1]


def observation_model(
    model: onnx.ModelProto,
    layers: Mapping[str, Layer],
    config: QuantConfig,
    weight_scales: WeightScales,
    dmq_factors: DmqFactors,
    roundings: Mapping[str, RoundedWeights],
) -> onnx.ModelProto:
    """Return the float model to observe: weights fake-quantized, inputs divided by DMQ factors.

    DMQ balances a layer's input with its weight: it divides the input's channels by factors and
    multiplies the weight by them.

    Args:
        model: the float model, in which each layer has a weight of its own.
        layers: layer name -> layer, for the layers that `model` has.
        config: the config, with every setting filled in.
        weight_scales: layer name -> scale of its weight.
        dmq_factors: layer name -> factors of its input channels; its weight is multiplied by them.
        roundings: AdaRound layer -> recorder with the integers of its weight, int8 [G, M, K];
            AdaRound layers that are missing here stay float.
    """
    index = Graph(model)
    fake_quant_weights = {}
    for name, layer in layers.items():
        if not layer.weight:
            continue
        # the weight times its DMQ factors, output channels first
        rows = read_weight_rows(index, layer, dmq_factors.get(name, NO_DMQ_FACTORS))
        if name in roundings:
            integers = roundings[name].integers
            assert integers is not None  # `RecordPlan.round_weights` has computed them
            rows = integers.reshape(rows.shape) * by_row(weight_scales[name], rows.ndim)
        # as in AMCT, other weights of AdaRound's layers and of ConvTransposes are not rounded
        elif layer.kind != "ConvTranspose" and not uses_adaround(config, name):
            bits = config.layers[name].weight.num_bits
            rows = np.asarray(arq_fake_quantize(rows, weight_scales[name], bits=bits), np.float32)
        weight = from_rows(rows, layer)
        fake_quant_weights[layer.weight] = numpy_helper.from_array(weight, layer.weight)
    inverse_dmq_factors = {}
    for name, factors in dmq_factors.items():
        if name in layers:
            inverse_dmq_factors[name] = invert_dmq_factors(factors, layers[name])
    return rewrite_inputs(model, fake_quant_weights, inverse_dmq_factors)


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationRecord:
    """Result of the calibration.

    Attributes:
        records: layer -> its record.
        ranges: tensor -> clip range of its scale.
        zero_layers: layers whose input is zero, or so small that AMCT's scale, 1, rounds all of it
            to zero.
        refusals: layer without a record -> why it does not fit the hardware.
    """

    records: Records
    ranges: Scales
    zero_layers: tuple[str, ...]
    refusals: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class RecordPlan:
    """The observations of a resolved config, and the record computed from them.

    Attributes:
        model: the float model, in which each layer has a weight of its own.
        graph: its layers.
        config: the config, with every setting filled in.
        model_key: key of `model` among the model variants that are run.
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
    model_key: str
    samples: int
    images_per_sample: int = 1
    samples_per_batch: int = 1
    exact: bool = False
    dmq_samples: int | None = None
    allow_unbalanced: bool = False

    def __post_init__(self) -> None:
        if not self._settings_by_layer:
            raise ConfigError(
                "an Ascend build must leave a layer in int8, got none that --keep-float and"
                " --ascend-config leave; build the float model with atc"
            )
        refuse_padless_deconvs(self.model, self.layers, self.config)
        batch_count = -(-self.samples // self.samples_per_batch)  # AMCT's batches in the samples
        if batch_count < self.config.batch_num:
            images = self.images_per_sample * self.samples_per_batch
            size = f" of {images} images" if images > 1 else ""
            raise FeedError(
                f"the calibration needs batch_num batches, {self.config.batch_num}, got"
                f" {batch_count}{size}; give more data or lower batch_num"
            )

    @property
    def used_samples(self) -> int:
        """Number of samples in the batches that are used."""
        return min(self.samples, self.config.batch_num * self.samples_per_batch)

    @property
    def images(self) -> int:
        """Number of calibration images."""
        return self.samples * self.images_per_sample

    @property
    def used_images(self) -> int:
        """Number of images in the batches that are used."""
        return self.used_samples * self.images_per_sample

    @cached_property
    def layers(self) -> dict[str, Layer]:
        """Enabled layers and tensor_quantize inputs, in the model's order."""
        return self.graph.select(self._settings_by_layer)

    @cached_property
    def _settings_by_layer(self) -> Mapping[str, LayerConfig]:
        """Name of an enabled layer or tensor_quantize input -> its settings."""
        return self.config.enabled_entries()

    @cached_property
    def _index(self) -> Graph:
        """Index of the nodes and constants of `model`."""
        return Graph(self.model)

    @cached_property
    def channel_maxima(self) -> dict[str, Observation]:
        """Layer that DMQ balances -> observation of its input's channel maxima."""
        variant = Variant(self.model_key, lambda _: self.model)
        observations = {}
        for name, layer in self.layers.items():
            if self._settings_by_layer[name].dmq_balancer_param is not None:
                axis = 1 if layer.spatial_rank else -1
                statistic = ChannelMaxOf(axis=axis, samples=self._dmq_sample_count)
                observations[name] = Observation(variant, layer.input, statistic, name)
        return observations

    @property
    def _dmq_sample_count(self) -> int:
        """Number of samples that DMQ's channel maxima are of."""
        return self.dmq_samples or self.samples_per_batch

    @cached_property
    def adaround_steps(self) -> dict[str, AdaStep]:
        """Layer that AdaRound rounds -> its step, with its observations."""
        steps = AdaRoundSteps(
            float_graph=self._index,
            config=self.config,
            key=self._key(),
            samples=min(self.used_samples, MAX_SAMPLES),
            channel_maxima=self.channel_maxima,
            make_model=self._make_model,
        )
        return steps.make(self.layers)

    @cached_property
    def first_inputs(self) -> dict[str, Observation]:
        """Layer -> observation of its first input; equal tensor and statistic are observed once."""
        return {
            name: self._observation(name, observed_input(layer, self.channel_maxima))
            for name, layer in self.layers.items()
        }

    @cached_property
    def second_inputs(self) -> dict[str, Observation]:
        """MatMul of two activations -> observation of its second input."""
        return {
            name: self._observation(name, layer.other_inputs[0])
            for name, layer in self.layers.items()
            if layer.two_activations
        }

    @property
    def _needed_observations(self) -> tuple[Observation, ...]:
        """The observations that the weights of the observed model follow from."""
        rounded = (step.inputs for step in self.adaround_steps.values())
        return (*self.channel_maxima.values(), *rounded)

    @cached_property
    def _variant(self) -> Variant:
        """The float model with fake-quantized weights, whose activations are observed."""
        return Variant(self._key(), self._make_model, needs=self._needed_observations)

    def _observation(self, name: str, tensor: str) -> Observation:
        """Return the observation of a layer's input, for the search that its settings name."""
        activation = self._settings_by_layer[name].activation
        sample_limit = self.used_samples if self.used_samples < self.samples else None
        statistic: Statistic = IfmrOf(samples=sample_limit, exact=self.exact)
        if activation.act_algo == "hfmg":
            statistic = HfmgOf(
                nbins=activation.num_of_bins,
                samples=sample_limit,
                samples_per_batch=self.samples_per_batch,
            )
        return Observation(self._variant, tensor, statistic, name)

    @property
    def observations(self) -> tuple[Observation, ...]:
        """All observations of the plan."""
        searched = (*self.first_inputs.values(), *self.second_inputs.values())
        return (*self._needed_observations, *searched)

    def record(self, observed: ObservedStatistics) -> CalibrationRecord:
        """Run all searches on the observed statistics; return a record of scales for every layer.

        Raises:
            CalibrationError: activations or weights with NaN or Inf, or scales that are not finite.
        """
        dmq_factors = self.compute_dmq_factors(observed)
        roundings = self.round_weights(observed)  # AdaRound's integers and scales, by layer
        # the layers that DMQ balances come first, as in AMCT's searches and its record file
        names = sorted(self.first_inputs, key=lambda name: name not in dmq_factors)
        sorted_inputs = {name: self.first_inputs[name] for name in names}
        first_scales = self._search_scales(sorted_inputs, observed)
        second_scales = self._search_scales(self.second_inputs, observed)
        weight_scales = self.compute_weight_scales(dmq_factors, roundings)
        records = {}
        searched_inputs = []  # (layer, observation of one of its inputs, scale of that input)
        for name, input_scale in first_scales.items():
            records[name] = self._make_layer_record(
                name,
                input_scale,
                weight_scales[name],
                dmq_factors.get(name, NO_DMQ_FACTORS),
                roundings.get(name),
            )
            searched_inputs.append((name, sorted_inputs[name], input_scale))
        for name, second_scale in second_scales.items():  # layers: MatMuls of two activations
            # AMCT records the second input as the layer's weight
            scale_w = np.array([second_scale.scale])
            records[name] = replace(records[name], scale_w=scale_w, has_weight=True)
            searched_inputs.append((name, self.second_inputs[name], second_scale))
        return self._make_calibration_record(records, searched_inputs, observed)

    def _make_calibration_record(
        self,
        records: Records,
        searched_inputs: Iterable[tuple[str, Observation, AscendScale]],
        observed: ObservedStatistics,
    ) -> CalibrationRecord:
        """Return the records, with the clip range of each input and the layers with a zero input.

        An input counts as zero if all of its values round to 0 with the scale that AMCT's search
        found.

        Args:
            records: layer -> its record.
            searched_inputs: (layer, observation of one of its inputs, scale of that input).
            observed: the recorder of each observation.
        """
        ranges = {}
        zero_layers: dict[str, None] = {}  # a layer with two such inputs counts once
        for name, observation, input_scale in searched_inputs:
            recorder = observed.recorder(observation)
            assert isinstance(recorder, InputRecorder)
            ranges[observation.tensor] = clip_range(
                input_scale, recorder, self._settings_by_layer[name]
            )
            largest = max(map(abs, recorder.extremes))
            if largest < 0.5 * float(input_scale.scale):  # all values round to 0
                zero_layers[name] = None
        return CalibrationRecord(records=records, ranges=ranges, zero_layers=tuple(zero_layers))

    def _search_scales(
        self, observations: Mapping[str, Observation], observed: ObservedStatistics
    ) -> dict[str, AscendScale]:
        """Return layer -> scale of its input.

        Layers that have an input and its settings in common are searched once.

        Args:
            observations: layer -> observation of its input.
            observed: the recorder of each observation.
        """
        scale_by_search: dict[object, AscendScale] = {}
        scales = {}
        for name, observation in observations.items():
            activation = self._settings_by_layer[name].activation
            search = (observation, activation)
            if search not in scale_by_search:
                with _add_layer_to_errors(name):
                    recorder = observed.recorder(observation)
                    scale_by_search[search] = search_activation_scale(recorder, activation)
            scale = scale_by_search[search]
            if self.config.fakequant_precision_mode is not None:  # FORCE_FP16_QUANT, the only mode
                scale = replace(scale, scale=ascend_half(scale.scale))
            scales[name] = scale
        return scales

    def _make_layer_record(
        self,
        name: str,
        input_scale: AscendScale,
        weight_scale: Float32Array,
        dmq_factors: Float32Array,
        rounding: RoundedWeights | None,
    ) -> LayerRecord:
        """Return the record of a layer: the scales and bit widths of its first input and weight.

        A layer without a weight has 8 bits there, as in AMCT.

        Args:
            name: name of the layer.
            input_scale: scale and offset of its first input.
            weight_scale: scale of its weight, [C_out] or [1].
            dmq_factors: factors of its input channels; empty without DMQ.
            rounding: the integers that AdaRound found for its weight; None without AdaRound.
        """
        layer = self.layers[name]
        settings = self._settings_by_layer[name]
        return LayerRecord(
            scale_d=input_scale.scale,
            offset_d=input_scale.offset,
            scale_w=weight_scale,
            dmq_factors=dmq_factors,
            has_weight=bool(layer.weight),
            rounded_weight=None if rounding is None else rounding.integers,
            # whether it is no layer, but an input of an Add or MaxPool
            is_node_input=layer.input_index is not None,
            act_bits=settings.activation.num_bits,
            weight_bits=settings.weight.num_bits if layer.weight else 8,
        )

    def compute_dmq_factors(self, observed: ObservedStatistics) -> DmqFactors:
        """Return layer -> DMQ factors, from the channel maxima of the first batch."""
        dmq_factors = {}
        for name, observation in self.channel_maxima.items():
            recorder = observed.recorder(observation)
            assert isinstance(recorder, ChannelMax)
            with _add_layer_to_errors(name):
                dmq_factors[name] = self._compute_layer_dmq_factors(name, recorder)
        return dmq_factors

    def compute_weight_scales(
        self, dmq_factors: DmqFactors, roundings: Mapping[str, RoundedWeights]
    ) -> WeightScales:
        """Return layer -> scale of its weight; a pool has scale 1, as in AMCT."""
        scales = {}
        for name, layer in self.layers.items():
            if name in roundings:
                scales[name] = roundings[name].scale
            elif name not in self.adaround_steps:  # AdaRound's other layers are not rounded yet
                with _add_layer_to_errors(name):
                    scales[name] = self._arq_scale(layer, dmq_factors)
        return scales

    def round_weights(
        self, observed: ObservedStatistics, names: Collection[str] | None = None
    ) -> dict[str, RoundedWeights]:
        """Return layer -> the integers and scale that AdaRound's search found for its weight.

        The recorders keep the results, so that a layer is searched only once.

        Args:
            observed: the recorders of the layers' inputs and outputs.
            names: the layers to round; None for all that AdaRound rounds.
        """
        dmq_factors = self.compute_dmq_factors(observed)
        results = {}
        for number, (name, step) in enumerate(self.adaround_steps.items(), 1):
            if names is None or name in names:
                with _add_layer_to_errors(name):  # errors name the layer
                    rows = self._weight_rows(step.layer, dmq_factors)
                    progress = f"{number} of {len(self.adaround_steps)}: {name}"
                    results[name] = round_layer(step, rows, observed, progress=progress)
        return results

    def _compute_layer_dmq_factors(self, name: str, maxima: ChannelMax) -> Float32Array:
        """Return the DMQ factors of a layer's input channels, [C_in].

        They are 1 if the layer cannot be balanced, and `allow_unbalanced` is set.

        Raises:
            CalibrationError: it cannot be balanced.
        """
        layer = self.layers[name]
        weight_maxima = _weight_channel_maxima(read_constant(self._index, layer.weight), layer)
        strength = self._settings_by_layer[name].dmq_balancer_param
        assert strength is not None
        try:
            return balance_factors(maxima.values, weight_maxima, strength=strength)
        except CalibrationError:
            if not self.allow_unbalanced:
                raise
            return np.ones_like(maxima.values)

    def _arq_scale(self, layer: Layer, dmq_factors: DmqFactors) -> Float32Array:
        """Return the scales of a layer's weight by ARQ, [C_out] or [1].

        As in AMCT's records, an input of tensor_quantize has none, and a pool has 1.
        """
        if layer.input_index is not None:
            return np.zeros(0, np.float32)
        if not layer.weight:
            return np.ones(1, np.float32)
        params = self._settings_by_layer[layer.name].weight
        rows = self._weight_rows(layer, dmq_factors)
        return arq(rows, bits=params.num_bits, channel_wise=bool(params.channel_wise))

    def _weight_rows(self, layer: Layer, dmq_factors: DmqFactors) -> Float32Array:
        """Return a layer's weight times its DMQ factors, output channels first."""
        return read_weight_rows(self._index, layer, dmq_factors.get(layer.name, NO_DMQ_FACTORS))

    def _make_model(
        self,
        observed: ObservedStatistics,
        rounded_names: Collection[str] | None = None,
        last_tensor: str = "",
    ) -> onnx.ModelProto:
        """Return the float model with fake-quantized weights, whose activations are observed.

        Args:
            observed: statistics from which DMQ's factors and AdaRound's weights are computed.
            rounded_names: layers that get AdaRound's weights; None for all that AdaRound rounds.
            last_tensor: tensor that becomes the only output of the model; "" for the entire model.
        """
        dmq_factors = self.compute_dmq_factors(observed)
        roundings = self.round_weights(observed, rounded_names)
        model = extract_output(self.model, last_tensor) if last_tensor else self.model
        node_names = names_of(model.graph.node)
        layers = {name: layer for name, layer in self.layers.items() if layer.node in node_names}
        return observation_model(
            model,
            layers,
            self.config,
            weight_scales=self.compute_weight_scales(dmq_factors, roundings),
            dmq_factors=dmq_factors,
            roundings=roundings,
        )

    def _key(self) -> str:
        """Return the key of the observed model: it differs if the weights or inputs may differ."""
        algorithms = weight_algorithms(self.config)  # such as "ARQ and AdaRound"
        settings = {
            name: (repr(entry.weight), entry.dmq_balancer_param)
            for name, entry in self.config.enabled_layers().items()
        }
        dependencies: list[object] = [self.model_key, settings]
        if "AdaRound" in algorithms:
            dependencies.append(min(self.used_samples, MAX_SAMPLES))
        if self.channel_maxima and self._dmq_sample_count > 1:
            dependencies.append(self._dmq_sample_count)
        digest = hashlib.sha256(json.dumps(dependencies, sort_keys=True).encode()).hexdigest()
        return f"weights fake-quantized by AMCT's {algorithms}, {digest[:12]}"


@contextmanager
def _add_layer_to_errors(name: str) -> Iterator[None]:
    """Add the layer's name and a remedy to errors."""
    try:
        yield
    except CalibrationError as error:
        raise CalibrationError(
            f"layer {name!r}: {error} (to leave it in float, put it under skip_layers or"
            " --keep-float)"
        ) from None


def _weight_channel_maxima(weight: Float32Array, layer: Layer) -> Float32Array:
    """Return the largest magnitude of a weight for each input channel."""
    if layer.kind == "Conv":
        return weight_channel_max(weight, layer.group)
    if layer.kind == "MatMul":
        return channel_max(weight, -2)
    return channel_max(weight, 1 if layer.trans_b else 0)
