"""Calibrate a prepared model, and convert it to fixed scales and int8 weights for export.

A quantizer may take its range from other tensors, as in a build: an operator that only moves values
has the range of its input, a TensorRT pool that of its input, and tensors that meet in a Concat the
widest of the group. Such source tensors are observed by a `RangeMonitor` module::

    relu --.-- quant --> maxpool -- quant --> conv       quant: the range of relu
           '-- RangeMonitor

Calibration (`calibrate`) runs batches through the model and records what reaches each quantizer or
`RangeMonitor`, as float32 on the CPU. Most statistics do not depend on the order and take whole
batches. TensorRT's histogram does, as its range starts with the first batch: it gets the samples
one by one, as in `build`, and the first batch twice, once for the initial range (lead)::

    samples   1 2 3 4 | 5 6 7 8 | 9          batches of 4: the ninth sample is left out
              lead
              statistic ........
"""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from functools import partial
from itertools import chain, islice
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional

from calibrators.statistics import Recorder, Statistic
from deploy.errors import CalibrationError, ConfigError, FeedError, ModelError, first_line
from deploy.feed.loaders import iterate_items
from deploy.fx.capture import as_inputs, batch_size, has_batch, run_model, select_arguments
from deploy.fx.comparison import eval_mode, tensors_of
from deploy.fx.coverage import measure_coverage, refuse_unquantized
from deploy.fx.device import device_of, map_tensors, move_tensors
from deploy.fx.fakequant import FakeQuant, FixedQuant, no_range_error
from deploy.fx.int8_layers import IntLayer, QatConvBn, QatLayer, WeightQuant, folded_layer
from deploy.fx.operations import (
    add_module,
    arguments_by_name,
    called_module,
    called_once,
    delete_unused_modules,
    module_calls,
)
from deploy.fx.plain_copy import replace_submodule, unwrap
from deploy.fx.range_search import DEFAULT_SEARCH, ActivationSearch, ScaleAndZero, widest_range
from deploy.graph.bounds import RangeLimits
from deploy.terminal import phase

Sources = Sequence[tuple[fx.Node, RangeLimits | None]]


class RangeMonitor(nn.Identity):
    """Identity module whose input is observed; its output has no readers.

    Attributes:
        name: name of the observed tensor.
        saturation_limits: values beyond which all readers of the tensor saturate; None without.
    """

    def __init__(self, name: str, saturation_limits: RangeLimits | None):
        super().__init__()
        self.name = name
        self.saturation_limits = saturation_limits


def insert_monitors(graph_module: fx.GraphModule, quantizer: FakeQuant, sources: Sources) -> None:
    """Insert a `RangeMonitor` on each of `sources`; the quantizer takes its range from them."""
    quantizer.range_monitors = []
    for number, (node, limits) in enumerate(sources):
        monitor = RangeMonitor(node.name, limits)
        name = add_module(graph_module, f"watch_{quantizer.name}_{number}", monitor)
        insert_call(graph_module, node, name)
        quantizer.range_monitors.append(monitor)


def insert_call(graph_module: fx.GraphModule, tensor: fx.Node, module: str) -> fx.Node:
    """Insert a call of a module right after the tensor that it reads."""
    position = tensor
    if tensor.op == "placeholder":  # all placeholders must come first
        position = graph_module.graph.find_nodes(op="placeholder")[-1]
    with graph_module.graph.inserting_after(position):
        return graph_module.graph.call_module(module, (tensor,))


def widest_limits(all_limits: Iterable[RangeLimits | None]) -> RangeLimits | None:
    """Return the narrowest limits that contain all; None if one is None or there are none."""
    limits: list[Any] = list(all_limits)
    if not limits or None in limits:
        return None
    floors, ceilings, extrapolation_limits = zip(*limits, strict=True)
    return RangeLimits(min(floors), max(ceilings), max(extrapolation_limits))


_PADDING = (nn.ConstantPad1d, nn.ConstantPad2d, nn.ConstantPad3d)  # ZeroPad is a ConstantPad
CustomClasses = Mapping[type[nn.Module], type[nn.Module]]
# methods of a quantized class that make it from a module; the first one that it has is called
QUANTIZED_MAKERS = ("from_observed", "from_float")


def check_classes(classes: CustomClasses | None, *makers: str) -> None:
    """Raise `ConfigError` unless `classes` maps classes to classes with one of these methods."""
    if classes is None:
        return
    pairs = classes.items() if isinstance(classes, Mapping) else [(None, classes)]
    for replaced_class, new_class in pairs:
        has_maker = any(map(partial(hasattr, new_class), makers))
        if not (isinstance(replaced_class, type) and has_maker):
            raise ConfigError(
                f"custom modules are a dict of class -> class with {' or '.join(makers)}, got"
                f" {classes!r}"
            )


def check_quantized_classes(classes: CustomClasses | None, prepared: nn.Module) -> None:
    """Raise `ConfigError` unless `classes` maps classes in `prepared` to quantized classes."""
    check_classes(classes, *QUANTIZED_MAKERS)
    present_classes = {type(module) for module in prepared.modules()}
    missing_classes = set(classes or ()) - present_classes
    if missing_classes:
        missing_names = sorted(kind.__name__ for kind in missing_classes)
        raise ConfigError(
            "custom modules to convert are of classes in the prepared model, got"
            f" {', '.join(missing_names)}; a subclass is named itself"
        )


def scale_table(model: nn.Module) -> list[tuple[str, float, int]]:
    """Return (tensor, scale, zero_point) of each quantized activation, prepared or converted."""
    return [
        (module.name, float(module.scale), int(module.zero_point))
        for module in model.modules()
        if isinstance(module, FakeQuant | FixedQuant)
    ]


def convert(prepared: nn.Module, custom: CustomClasses | None = None) -> nn.Module:
    """Return a copy with fixed scales and int8 weights, in eval mode, ready for export.

    Args:
        prepared: model of `deploy.fx.prepare`, calibrated or trained.
        custom: the user's classes: class of a module in `prepared` -> quantized class to put in its
            place, whose `from_observed`, or else `from_float`, makes it from the module. In static
            mode `prepare` has put observed classes there, in the others float ones.

    Raises:
        CalibrationError: a tensor has no range, or a weight is not finite.
        ConfigError: `custom` is no dict of classes, or has one that is not in `prepared`.
        ExportError: nothing is quantized, as in a model that was not prepared.
    """
    prepared = unwrap(prepared)
    custom = custom or {}
    check_quantized_classes(custom, prepared)
    converted = copy.deepcopy(prepared).eval()
    replacements: dict[nn.Module, nn.Module] = {}  # a shared module is converted once
    _model_itself, *submodules = converted.named_modules(remove_duplicate=False)
    for name, module in submodules:
        replacement = replacements.get(module) or _convert_module(module, name, custom)
        if replacement is None:
            continue
        replacements[module] = replacement
        if _still_has(converted, name, module):  # else its parent was replaced
            replace_submodule(converted, name, replacement)

    if not replacements:
        refuse_unquantized(measure_coverage(converted, prepared))
    for module in converted.modules():
        if isinstance(module, fx.GraphModule):
            _remove_monitors(module)
            _round_biases(module)
    return converted


def _convert_module(module: nn.Module, name: str, custom: CustomClasses) -> nn.Module | None:
    """Return the module to put in place of one of a prepared model; None if it stays."""
    quantized_class: Any = custom.get(type(module))
    if quantized_class is not None:
        takes_observed = hasattr(quantized_class, "from_observed")
        make = quantized_class.from_observed if takes_observed else quantized_class.from_float
        return make(module).eval()
    if isinstance(module, FakeQuant):
        scale, zero_point = module.scale_and_zero()
        return FixedQuant(module.grid, module.name, scale, zero_point)
    if not isinstance(module, QatLayer):
        return None
    if isinstance(module.weight_quant, WeightQuant):
        return IntLayer(module, name)
    return folded_layer(module)  # its weight stays in float, with the merged norm folded into it


def _remove_monitors(graph_module: fx.GraphModule) -> None:
    for node, module in module_calls(graph_module):
        if isinstance(module, RangeMonitor):
            graph_module.graph.erase_node(node)
    delete_unused_modules(graph_module)


def _round_biases(graph_module: fx.GraphModule) -> None:
    """Round biases to multiples of input times weight scale, for ONNX Runtime's integers."""
    for node, layer in module_calls(graph_module):
        if not isinstance(layer, IntLayer) or not called_once(graph_module, node):
            continue
        source = node.args[0]
        while isinstance(source, fx.Node) and _is_zero_pad(graph_module, source):
            source = source.all_input_nodes[0]  # a zero is exact on every grid
        quantizer = called_module(graph_module, source)
        if isinstance(quantizer, FixedQuant):
            layer.round_bias(quantizer.scale)


def _is_zero_pad(graph_module: fx.GraphModule, node: fx.Node) -> bool:
    """Return whether a node pads with zeros, as function or module."""
    if node.target is functional.pad:
        options = arguments_by_name(node, ("input", "pad", "mode", "value"))
        return options.get("mode", "constant") == "constant" and not options.get("value")
    module: Any = called_module(graph_module, node)
    return isinstance(module, _PADDING) and not module.value


def _still_has(model: nn.Module, name: str, module: nn.Module) -> bool:
    """Return whether a model still has a module under a name."""
    try:
        return model.get_submodule(name) is module
    except AttributeError:
        return False


Batches = Iterable[Any] | Callable[[], Iterable[Any]]
Recorders = dict[nn.Module, Recorder]  # by FakeQuant or RangeMonitor


def record_statistics(
    model: nn.Module, batches: Batches, statistic: Statistic
) -> tuple[Recorders, int]:
    """Record the values of all observed tensors; return (recorders, number of runs).

    A recorder gathers a statistic, such as a histogram, of one tensor. Each `RangeMonitor` and each
    quantizer without monitors gets one, if data reaches it.

    A statistic may need an initial range. Then another statistic, its `lead`, is recorded first, on
    the first samples, and samples are taken one by one, as in a build.

    Args:
        model: prepared, in eval mode, with its quantizers off.
        batches: as for `calibrate`.
        statistic: the statistic.

    Raises:
        CalibrationError: NaN or Inf in a tensor.
        FeedError: no batches, or fewer samples than the lead reads; or the user's code failed.
        ModelError: samples are taken one by one, and the model does not run for a batch of 1.
    """
    lead = statistic.lead
    if lead is None:
        return _record_pass(model, batches, statistic, {})

    # The lead reads the samples of TensorRT's first batch. TensorRT reads whole batches only, so no
    # sample of a partial last batch is recorded, here or after the lead.
    lead_size = lead.samples or 1  # number of samples in a batch of TensorRT
    items, _has_end = iterate_items(batches)
    all_samples = chain.from_iterable(map(_split_into_samples, items))
    samples = _drop_partial_batch(all_samples, lead_size)
    lead_samples = list(islice(samples, lead_size))
    try:
        lead_recorders, _run_count = _record_pass(model, lead_samples, lead, {})
    except ModelError as error:
        raise ModelError(
            "a method that sees samples one by one needs a model that runs for a batch of 1,"
            f" got: {first_line(error.__cause__ or error)}; take another method"
        ) from error

    return _record_pass(model, chain(lead_samples, samples), statistic, lead_recorders)


def _record_pass(
    model: nn.Module, batches: Batches, statistic: Statistic, lead_recorders: Recorders
) -> tuple[Recorders, int]:
    """Run a model for all batches and record its tensors; return (recorders, number of runs).

    `lead_recorders`: module -> its recorder of an earlier pass over the first samples (the lead). A
    recorder of this pass starts with the range that this one found. Empty if the statistic needs no
    initial range.
    """
    recorders: Recorders = {}
    record_hook = partial(_record, recorders, statistic, lead_recorders)
    handles = []
    for module in model.modules():
        # a quantizer with monitors takes its range from them, so only they are observed
        is_observed_quantizer = isinstance(module, FakeQuant) and not module.range_monitors
        if is_observed_quantizer or isinstance(module, RangeMonitor):
            handles.append(module.register_forward_pre_hook(record_hook))

    run_count = 0
    device = device_of(model)
    batch_count = len(batches) if isinstance(batches, Sized) else None
    items, _has_end = iterate_items(batches)
    try:
        with phase("calibration", batch_count, "batches") as show_progress:
            for batch in items:
                inputs = move_tensors(select_arguments(batch, model), device)
                run_model(model, inputs)
                run_count += 1
                show_progress()
    finally:
        for handle in handles:
            handle.remove()
    return recorders, run_count


def _record(
    recorders: Recorders,
    statistic: Statistic,
    lead_recorders: Recorders,
    module: nn.Module,
    inputs: Any,
) -> None:
    """Record the values of the tensor that a quantizer or monitor reads; its forward pre-hook.

    Args:
        recorders: module -> recorder; a recorder is added with the first values of a module.
        statistic: makes the recorders.
        lead_recorders: module -> recorder that has seen the first samples; a new recorder starts
            with its range. Empty if the statistic needs no initial range.
        module: the quantizer or monitor.
        inputs: arguments of its forward: (tensor,).

    Raises:
        CalibrationError: NaN or Inf in the tensor.
    """
    assert isinstance(module, FakeQuant | RangeMonitor)
    values = inputs[0].detach().float()
    if not bool(torch.isfinite(values).all()):
        raise CalibrationError(f"calibration needs finite values, got NaN or Inf in {module.name}")
    if values.numel():  # an empty tensor has no range
        if module not in recorders:
            recorders[module] = statistic.recorder(lead_recorders.get(module))
        recorders[module].observe(values.cpu().numpy())


def _split_into_samples(batch: Any) -> Iterator[tuple[Any, ...]]:
    """Split a batch into batches of 1."""
    inputs = as_inputs(batch)
    for index in range(batch_size(tensors_of(inputs))):
        yield map_tensors(inputs, partial(_sample, index))


def _sample(index: int, tensor: torch.Tensor) -> torch.Tensor:
    return tensor[index : index + 1] if has_batch(tensor) else tensor


def _drop_partial_batch(samples: Iterable[Any], size: int) -> Iterator[Any]:
    """Yield the samples without those of a partial last batch.

    Raises:
        FeedError: there is no full batch.
    """
    iterator = iter(samples)
    has_full_batch = False
    while len(batch := list(islice(iterator, size))) == size:
        has_full_batch = True
        yield from batch
    if not has_full_batch:
        raise FeedError(
            f"TensorRT calibrates in whole batches, got {len(batch)} samples for batches of"
            f" {size}; give more of them or a smaller batch"
        )


def set_phase(
    prepared: nn.Module, *, observe: bool, quantize: bool, weights: bool | None = None
) -> None:
    """Switch all observers and all fake quantizers of a prepared model on or off.

    `weights`: whether weights are quantized; None goes by `quantize`.
    """
    for module in prepared.modules():
        if isinstance(module, FakeQuant):
            module.observe = observe
            module.enabled = quantize
            module.start_batch()
        elif isinstance(module, WeightQuant):
            module.enabled = quantize if weights is None else weights


def calibrate(
    prepared: nn.Module, batches: Batches, *, search: ActivationSearch = DEFAULT_SEARCH
) -> int:
    """Set the range of every fake quantizer from batches; return the number of runs.

    Afterwards the fake quantizers are on and do not observe.

    Args:
        prepared: a model from `deploy.fx.prepare`.
        batches: each a tensor or a tuple of inputs, batch first, such as a DataLoader; values after
            the last argument of forward (labels) are left out. The result does not depend on the
            batch size.
        search: from `deploy.fx.range_search.search_for`.

    Raises:
        ConfigError: the search is not defined for the grid.
        FeedError: no batch, or an error of the loader.
        CalibrationError: NaN or Inf in a tensor, or no data reached a tensor.
    """
    if not isinstance(search, ActivationSearch):
        raise ConfigError(
            "the search of a calibration is made by search_for(target, method) of"
            f" deploy.fx.range_search, got {search!r}"
        )
    prepared = unwrap(prepared)
    quantizers = [module for module in prepared.modules() if isinstance(module, FakeQuant)]
    for quantizer in quantizers:
        search.check(quantizer.grid)
    # values are recorded in float, but with rounded weights if the search wants them so
    set_phase(prepared, observe=False, quantize=False, weights=search.rounded_weights)
    with eval_mode(prepared):
        recorders, run_count = record_statistics(prepared, batches, search.statistic)
    if not run_count:
        raise FeedError("calibration needs at least one batch, got none")
    with phase("ranges", len(quantizers), "tensors") as show_progress:
        for quantizer in quantizers:
            scale, zero_point = _find_scale(quantizer, recorders, search)
            quantizer.set_range(scale, zero_point)
            show_progress()
    set_phase(prepared, observe=False, quantize=True)
    return run_count


def _find_scale(
    quantizer: FakeQuant, recorders: Recorders, search: ActivationSearch
) -> ScaleAndZero:
    """Return (scale, zero_point) of a quantizer, from its own tensor or from its monitors.

    Raises:
        CalibrationError: no data reached one of them.
    """
    scales = []
    for source in quantizer.range_monitors or [quantizer]:
        if source not in recorders:
            raise no_range_error(quantizer.name)
        scales.append(
            search.find_scale(recorders[source], quantizer.grid, source.saturation_limits)
        )
    return widest_range(scales, quantizer.grid)


def float_form(prepared: nn.Module) -> nn.Module:
    """Return a copy of a prepared model that computes in float with its present weights."""
    float_model = copy.deepcopy(prepared).eval()
    set_phase(float_model, observe=False, quantize=False)
    return float_model


def freeze_norms(prepared: nn.Module) -> None:
    """Freeze the statistics of all BatchNorms trained with their layers."""
    for module in prepared.modules():
        if isinstance(module, QatConvBn):
            module.frozen = True
