"""Calibrate a prepared model, and convert it to fixed scales and int8 weights for export.

A quantizer may take its range from other tensors, as in a build: an operator that only moves values
has the range of its input, a TensorRT pool that of its input, and tensors that meet in a Concat the
widest of the group. Such source tensors are observed by a `RangeMonitor` module::

    relu --.-- quant --> maxpool -- quant --> conv       quant: the range of relu
           '-- Watch

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
from deploy.errors import Calib8Error, CalibrationError, FeedError, ModelError, first_line
from deploy.fx.capture import as_inputs, select_arguments
from deploy.fx.device import device_of, map_tensors, move_tensors
from deploy.fx.fakequant import FakeQuant, FixedQuant, no_range_error
from deploy.fx.fuse import called_module, called_once
from deploy.fx.int8_layers import IntLayer, QatConvBn, QatLayer, WeightQuant, folded_layer
from deploy.fx.plain_copy import replace_submodule
from deploy.fx.range_search import DEFAULT_SEARCH, ActivationSearch, ScaleAndZero, widest_range
from deploy.graph.bounds import RangeLimits
from deploy.terminal import phase

Sources = Sequence[tuple[fx.Node, RangeLimits | None]]


class RangeMonitor(nn.Module):
    """Identity module whose input is observed; its output has no readers.

    Attributes:
        reach: range beyond which all readers saturate; None if they do not.
    """

    def __init__(self, name: str, reach: RangeLimits | None):
        super().__init__()
        self.name = name
        self.reach = reach

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x."""
        return x


def insert_monitors(graph_module: fx.GraphModule, quant: FakeQuant, sources: Sources) -> None:
    """Insert a `RangeMonitor` on each of `sources`; the quantizer takes its range from them."""
    quant.monitors = []
    for number, (node, reach) in enumerate(sources):
        monitor = RangeMonitor(node.name, reach)
        name = f"watch_{quant.name}_{number}"
        graph_module.add_submodule(name, monitor)
        insert_call(graph_module, node, name)
        quant.monitors.append(monitor)


def insert_call(graph_module: fx.GraphModule, tensor: fx.Node, module: str) -> fx.Node:
    """Insert a call of a module right after the tensor that it reads."""
    after = tensor
    if tensor.op == "placeholder":  # all placeholders must come first
        after = [node for node in graph_module.graph.nodes if node.op == "placeholder"][-1]
    with graph_module.graph.inserting_after(after):
        return graph_module.graph.call_module(module, (tensor,))


def widest_reach(reaches: Iterable[RangeLimits | None]) -> RangeLimits | None:
    """Return the smallest reach that contains all; None if one is None or there are none."""
    listed = list(reaches)
    bounded = [one for one in listed if one is not None]
    if not bounded or len(bounded) < len(listed):
        return None
    floors, ceilings, followed = zip(*bounded, strict=True)
    return RangeLimits(min(floors), max(ceilings), max(followed))


_PADDING = (nn.ConstantPad1d, nn.ConstantPad2d, nn.ConstantPad3d)  # ZeroPad is a ConstantPad
CustomClasses = Mapping[type[nn.Module], type[nn.Module]]


def scale_table(model: nn.Module) -> list[tuple[str, float, int]]:
    """Return (tensor, scale, zero_point) of each quantized activation, prepared or converted."""
    quants = [m for m in model.modules() if isinstance(m, FakeQuant | FixedQuant)]
    return [(q.name, float(q.scale), int(q.zero_point)) for q in quants]


def convert(prepared: nn.Module, custom: CustomClasses | None = None) -> nn.Module:
    """Return a copy with fixed scales and int8 weights, in eval mode, ready for export.

    `custom`: observed class (static) or float class (dynamic, weight-only) -> quantized class with
    `from_observed`, or else `from_float`.

    Raises:
        CalibrationError: a tensor has no range, or a weight is not finite.
    """
    converted = copy.deepcopy(prepared).eval()
    fixed: dict[nn.Module, nn.Module] = {}
    for name, module in list(converted.named_modules(remove_duplicate=False)):
        new = fixed.get(module) or _converted(module, name, custom or {})
        if new is not None and name:
            fixed[module] = new
            if not _inside_replaced(name, converted, module):
                replace_submodule(converted, name, new)
    for part in converted.modules():
        if isinstance(part, fx.GraphModule):
            for node in list(part.graph.nodes):
                if isinstance(called_module(part, node), RangeMonitor):
                    part.graph.erase_node(node)
            part.delete_all_unused_submodules()
            part.recompile()
            # round each bias to multiples of input times weight scale, for ONNX Runtime's integers
            for node in part.graph.nodes:
                layer = called_module(part, node)
                if not isinstance(layer, IntLayer) or not called_once(part, node):
                    continue
                source = node.args[0]
                while isinstance(source, fx.Node) and _is_zero_pad(part, source):
                    source = source.all_input_nodes[0]  # a zero is exact on every grid
                quant = called_module(part, source)
                if isinstance(quant, FixedQuant):
                    layer.round_bias(quant.scale)
    return converted


def _converted(module: nn.Module, name: str, custom: CustomClasses) -> nn.Module | None:
    for kind, quantized in custom.items():
        if type(module) is kind:
            target: Any = quantized
            build = getattr(target, "from_observed", None) or target.from_float
            return build(module).eval()
    if isinstance(module, FakeQuant):
        scale, zero = module.scale_and_zero()
        return FixedQuant(module.grid, module.name, scale, zero)
    if not isinstance(module, QatLayer):
        return None
    int8 = isinstance(module.weight_quant, WeightQuant)
    return IntLayer(module, name) if int8 else folded_layer(module)


def _is_zero_pad(graph_module: fx.GraphModule, node: fx.Node) -> bool:
    if node.target is functional.pad:
        options = dict(zip(("input", "pad", "mode", "value"), node.args, strict=False))
        options |= node.kwargs
        return options.get("mode", "constant") == "constant" and not options.get("value")
    module: Any = called_module(graph_module, node)
    return isinstance(module, _PADDING) and not module.value


def _inside_replaced(name: str, model: nn.Module, module: nn.Module) -> bool:
    """Return whether a parent was replaced already, so that the name no longer finds `module`."""
    try:
        return model.get_submodule(name) is not module
    except AttributeError:
        return True


Recorders = dict[nn.Module, Recorder]  # by FakeQuant or Watch


def record_statistics(
    model: nn.Module, batches: Iterable[Any], statistic: Statistic
) -> tuple[Recorders, int]:
    """Run batches through a prepared model; return (its recorders, number of runs).

    There is a recorder for each `RangeMonitor` and each quantizer without one that data reached.

    `model`: prepared, in eval mode, with its quantizers off. `batches`: each a tensor or a tuple of
    inputs, batch first.

    Raises:
        CalibrationError: NaN or Inf in a tensor.
        FeedError: fewer samples than the first batch of the statistic.
        ModelError: samples are taken one by one, and the model does not run for a batch of 1.
    """
    lead = statistic.lead
    if lead is None:
        return _record_pass(model, batches, lambda quant: statistic.recorder(None))
    size = lead.samples or 1
    samples = _in_whole_batches(chain.from_iterable(map(_samples, batches)), size)
    first = list(islice(samples, size))
    try:
        leads, _ = _record_pass(model, first, lambda quant: lead.recorder(None))
    except Calib8Error:
        raise
    except Exception as error:  # whatever a user's model raises
        raise ModelError(
            "a method that sees samples one by one needs a model that runs for a batch of 1,"
            f" got: {first_line(error)}; take another method"
        ) from error
    return _record_pass(
        model, chain(first, samples), lambda quant: statistic.recorder(leads.get(quant))
    )


def _record_pass(
    model: nn.Module, batches: Iterable[Any], make: Callable[[nn.Module], Recorder]
) -> tuple[Recorders, int]:
    recorders: Recorders = {}
    monitors = (RangeMonitor, FakeQuant)
    found = [module for module in model.modules() if isinstance(module, monitors)]
    observed_modules = [one for one in found if isinstance(one, RangeMonitor) or not one.monitors]
    hook = partial(_record, recorders, make)
    hooks = [module.register_forward_pre_hook(hook) for module in observed_modules]
    count, device = 0, device_of(model)
    total = len(batches) if isinstance(batches, Sized) else None
    try:
        with phase("calibration", total, "batches") as step, torch.no_grad():
            for batch in batches:
                model(*move_tensors(select_arguments(batch, model), device))
                count += 1
                step()
    finally:
        for handle in hooks:
            handle.remove()
    return recorders, count


def _record(
    recorders: Recorders, make: Callable[[nn.Module], Recorder], quant: nn.Module, inputs: Any
) -> None:
    assert isinstance(quant, FakeQuant | RangeMonitor)
    values = inputs[0].detach().float()
    if not bool(torch.isfinite(values).all()):
        raise CalibrationError(f"calibration needs finite values, got NaN or Inf in {quant.name}")
    if values.numel():
        if quant not in recorders:
            recorders[quant] = make(quant)
        recorders[quant].observe(values.cpu().numpy())


def _samples(batch: Any) -> Iterator[tuple[Any, ...]]:
    """Split a batch into batches of 1."""
    inputs = as_inputs(batch)
    sizes: list[int] = []
    map_tensors(inputs, lambda tensor: sizes.extend(tensor.shape[:1]))
    for index in range(sizes[0] if sizes else 1):
        yield map_tensors(inputs, partial(_sample, index))


def _sample(index: int, tensor: torch.Tensor) -> torch.Tensor:
    return tensor[index : index + 1] if tensor.ndim else tensor


def _in_whole_batches(samples: Iterable[Any], size: int) -> Iterator[Any]:
    """Yield the samples without those of a partial last batch."""
    pending: list[Any] = []
    count = 0
    for sample in samples:
        pending.append(sample)
        if len(pending) == size:
            yield from pending
            count += 1
            pending = []
    if not count:
        raise FeedError(
            f"TensorRT calibrates in whole batches, got {len(pending)} samples for batches of"
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
            module.observe, module.enabled = observe, quantize
            module.start_batch()
        elif isinstance(module, WeightQuant):
            module.enabled = quantize if weights is None else weights


def calibrate(
    prepared: nn.Module, batches: Iterable[Any], *, search: ActivationSearch = DEFAULT_SEARCH
) -> int:
    """Set the range of every fake quantizer from batches; return the number of runs.

    Afterwards the fake quantizers are on and do not observe.

    Args:
        prepared: a model from `deploy.fx.prepare`.
        batches: each a tensor or a tuple of inputs, batch first, such as a DataLoader; values after
            the last argument of forward (labels) are left out. Any batch size gives the same.
        search: from `deploy.fx.range_search.search_for`.

    Raises:
        ConfigError: the search is not defined for the grid.
        FeedError: no batch.
        CalibrationError: NaN or Inf in a tensor, or no data reached a tensor.
    """
    quants = [module for module in prepared.modules() if isinstance(module, FakeQuant)]
    for quant in quants:
        search.check(quant.grid)
    set_phase(prepared, observe=False, quantize=False, weights=search.rounded_weights)
    training = prepared.training
    prepared.eval()
    recorders, count = record_statistics(prepared, batches, search.statistic)
    if not count:
        raise FeedError("calibration needs at least one batch, got none")
    prepared.train(training)
    with phase("ranges", len(quants), "tensors") as step:
        for quant in quants:
            quant.set_range(*_range(quant, recorders, search))
            step()
    set_phase(prepared, observe=False, quantize=True)
    return count


def _range(quant: FakeQuant, recorders: Recorders, search: ActivationSearch) -> ScaleAndZero:
    """Return (scale, zero_point) of a quantizer, from its own tensor or from its watches."""
    ranges = []
    for source in quant.monitors or [quant]:
        if source not in recorders:
            raise no_range_error(quant.name)
        ranges.append(search.find_scale(recorders[source], quant.grid, source.reach))
    return widest_range(ranges, quant.grid)


def float_form(prepared: nn.Module) -> nn.Module:
    """Return a copy of a prepared model that computes in float with its present weights."""
    copied = copy.deepcopy(prepared).eval()
    set_phase(copied, observe=False, quantize=False)
    return copied


def freeze_norms(prepared: nn.Module) -> int:
    """Freeze the statistics of all BatchNorms trained with their layers; return how many."""
    layers = [module for module in prepared.modules() if isinstance(module, QatConvBn)]
    for layer in layers:
        layer.frozen = True
    return len(layers)
