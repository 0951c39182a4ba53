"""A calibrated, perhaps trained, model -> fixed scales and int8 weights, fit for export.

Whose values give a quantizer its range, where that is not the one tensor that it rounds.

As in a build: what only moves values has the range of what it moves, a pool of TensorRT's that of
its input, and what meets in a Concat there the widest of them all. Such a tensor is watched while a
model is calibrated, whether it is quantized or not::

    relu --.-- quant --> maxpool -- quant --> conv       quant: the range of relu
           '-- Watch

Batches through a prepared model: all that reaches a fake quantizer, into its statistic.

Values are brought to the CPU as float32, whatever the model computes in and wherever it is. What no
order can change takes whole batches. What the order shows in (TensorRT's histogram, whose range
starts with the first batch) gets the samples one by one, as in `build`, and the first of them
twice: for what must be known before, and in their place::

    samples   1 2 3 4 | 5 6 7 8 | 9          batches of 4: the ninth fills none
              lead
              statistic ........

The phases of a prepared model: observing ranges, quantizing with them, freezing its norms.
"""

from __future__ import annotations

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
from deploy.fx.device import device_of, mapped, moved
from deploy.fx.fakequant import BY_DEFAULT, FakeQuant, FixedQuant, OnGrid, Search, no_data, widest
from deploy.fx.fuse import called_module, called_once
from deploy.fx.int8_layers import IntLayer, QatConvBn, QatLayer, WeightQuant, folded_layer
from deploy.fx.trace import replace_submodule
from deploy.graph.bounds import Reach
from deploy.terminal import phase

Sources = Sequence[tuple[fx.Node, Reach | None]]


class Watch(nn.Module):
    """A tensor that is looked at, and nobody reads from here.

    Attributes:
        name: the tensor's, for messages.
        reach: how far its readers tell values apart; None for no end.
    """

    def __init__(self, name: str, reach: Reach | None):
        super().__init__()
        self.name = name
        self.reach = reach

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """X."""
        return x


def watch(graph_module: fx.GraphModule, quant: FakeQuant, sources: Sources) -> None:
    """Let a quantizer have the range of tensors other than its own."""
    quant.watches = []
    for number, (node, reach) in enumerate(sources):
        one = Watch(node.name, reach)
        name = f"watch_{quant.name}_{number}"
        graph_module.add_submodule(name, one)
        place = node
        if node.op == "placeholder":  # the graph's inputs come first, all of them
            place = [other for other in graph_module.graph.nodes if other.op == "placeholder"][-1]
        with graph_module.graph.inserting_after(place):
            graph_module.graph.call_module(name, (node,))
        quant.watches.append(one)


def loosest(reaches: Iterable[Reach | None]) -> Reach | None:
    """The reach that holds all of several; None where one tensor has none."""
    known = list(reaches)
    held = [one for one in known if one is not None]
    if not held or len(held) < len(known):
        return None
    floors, ceilings, followed = zip(*held, strict=True)
    return Reach(min(floors), max(ceilings), max(followed))


def unwatch(graph_module: fx.GraphModule) -> None:
    """Take out what was only watched."""
    for node in list(graph_module.graph.nodes):
        if isinstance(called_module(graph_module, node), Watch):
            graph_module.graph.erase_node(node)
    graph_module.delete_all_unused_submodules()
    graph_module.recompile()


_PADDING = (nn.ConstantPad1d, nn.ConstantPad2d, nn.ConstantPad3d)  # ZeroPad is a ConstantPad
CustomClasses = Mapping[type[nn.Module], type[nn.Module]]


def scale_table(model: nn.Module) -> list[tuple[str, float, int]]:
    """(tensor, scale, zero_point) of each quantized activation, prepared or converted."""
    quants = [m for m in model.modules() if isinstance(m, FakeQuant | FixedQuant)]
    return [(q.name, float(q.scale), int(q.zero_point)) for q in quants]


def convert(prepared: nn.Module, custom: CustomClasses | None = None) -> nn.Module:
    """A copy with fixed scales and int8 weights, in eval mode; fit for `deploy.fx.export`.

    Args:
        prepared: calibrated, perhaps trained.
        custom: observed class (static) or float class (dynamic, weight-only) -> quantized class
            with `from_observed`, or `from_float` where it has none.

    Raises:
        CalibrationError: a tensor that saw no data, or weights that are not finite.
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
            unwatch(part)
            _round_biases(part)
    return converted


def _converted(module: nn.Module, name: str, custom: CustomClasses) -> nn.Module | None:
    for kind, quantized in custom.items():
        if type(module) is kind:
            made: Any = quantized
            build = getattr(made, "from_observed", None) or made.from_float
            return build(module).eval()
    if isinstance(module, FakeQuant):
        scale, zero = module.parameters_of_grid()
        return FixedQuant(module.grid, module.name, scale, zero)
    if not isinstance(module, QatLayer):
        return None
    int8 = isinstance(module.weight_quant, WeightQuant)
    return IntLayer(module, name) if int8 else folded_layer(module)


def _round_biases(graph_module: fx.GraphModule) -> None:
    """Put each layer's bias on the grid of its products, where runtimes keep it in int32.

    Onnxruntime rounds a bias to multiples of input scale times weight scale; with the same
    multiples here both compute the same codes.
    """
    for node in graph_module.graph.nodes:
        layer = called_module(graph_module, node)
        if not isinstance(layer, IntLayer) or not called_once(graph_module, node):
            continue
        source = _before_padding(graph_module, node.args[0])
        quant = called_module(graph_module, source)
        if isinstance(quant, FixedQuant):
            layer.round_bias(quant.scale)


def _before_padding(graph_module: fx.GraphModule, tensor: Any) -> Any:
    """The tensor before any padding with zeros: a real 0 is exact on every grid."""
    while isinstance(tensor, fx.Node) and _is_zero_pad(graph_module, tensor):
        tensor = tensor.all_input_nodes[0]
    return tensor


def _is_zero_pad(graph_module: fx.GraphModule, node: fx.Node) -> bool:
    if node.target is functional.pad:
        options = dict(zip(("input", "pad", "mode", "value"), node.args, strict=False))
        options |= node.kwargs
        return options.get("mode", "constant") == "constant" and not options.get("value")
    module: Any = called_module(graph_module, node)
    return isinstance(module, _PADDING) and not module.value


def _inside_replaced(name: str, model: nn.Module, module: nn.Module) -> bool:
    """Whether a parent has been replaced already, so that the name leads elsewhere."""
    try:
        return model.get_submodule(name) is not module
    except AttributeError:
        return True


Recorders = dict[nn.Module, Recorder]


def observed(
    model: nn.Module, batches: Iterable[Any], statistic: Statistic
) -> tuple[Recorders, int]:
    """A recorder of each tensor that gives a range and was reached, and how many runs were made.

    Its key is the `Watch` on it, or else the fake quantizer that it goes through.

    Args:
        model: prepared, its quantizers off, in eval mode.
        batches: a tensor, or a tuple of inputs, each; batch first.
        statistic: what to observe.

    Raises:
        CalibrationError: NaN or Inf in a tensor.
        FeedError: fewer samples than the first batch of the statistic.
        ModelError: the model does not run for one sample, where they are taken one by one.
    """
    lead = statistic.lead
    if lead is None:
        return _pass(model, batches, lambda quant: statistic.recorder(None))
    size = lead.samples or 1
    samples = _in_whole_batches(chain.from_iterable(map(_samples, batches)), size)
    first = list(islice(samples, size))
    try:
        leads, _ = _pass(model, first, lambda quant: lead.recorder(None))
    except Calib8Error:
        raise
    except Exception as error:  # whatever a user's model raises
        raise ModelError(
            "a method that sees samples one by one needs a model that runs for a batch of 1,"
            f" got: {first_line(error)}; take another method"
        ) from error
    return _pass(model, chain(first, samples), lambda quant: statistic.recorder(leads.get(quant)))


def as_inputs(batch: Any) -> tuple[Any, ...]:
    """A batch as the arguments of a forward."""
    return tuple(batch) if isinstance(batch, tuple | list) else (batch,)


def _pass(
    model: nn.Module, batches: Iterable[Any], make: Callable[[nn.Module], Recorder]
) -> tuple[Recorders, int]:
    recorders: Recorders = {}
    looked_at = [module for module in model.modules() if _gives_range(module)]
    hook = partial(_record, recorders, make)
    hooks = [module.register_forward_pre_hook(hook) for module in looked_at]
    count, device = 0, device_of(model)
    total = len(batches) if isinstance(batches, Sized) else None
    try:
        with phase("calibration", total, "batches") as step, torch.no_grad():
            for batch in batches:
                model(*moved(as_inputs(batch), device))
                count += 1
                step()
    finally:
        for one in hooks:
            one.remove()
    return recorders, count


def _gives_range(module: nn.Module) -> bool:
    return isinstance(module, Watch) or (isinstance(module, FakeQuant) and not module.watches)


def _record(
    recorders: Recorders, make: Callable[[nn.Module], Recorder], quant: nn.Module, inputs: Any
) -> None:
    assert isinstance(quant, FakeQuant | Watch)
    values = inputs[0].detach().float()
    if not bool(torch.isfinite(values).all()):
        raise CalibrationError(f"calibration needs finite values, got NaN or Inf in {quant.name}")
    if values.numel():
        if quant not in recorders:
            recorders[quant] = make(quant)
        recorders[quant].observe(values.cpu().numpy())


def _samples(batch: Any) -> Iterator[tuple[Any, ...]]:
    """A batch as batches of one."""
    inputs = as_inputs(batch)
    sizes: list[int] = []
    mapped(inputs, lambda tensor: sizes.extend(tensor.shape[:1]))
    for at in range(sizes[0] if sizes else 1):
        yield mapped(inputs, partial(_sample, at))


def _sample(at: int, tensor: torch.Tensor) -> torch.Tensor:
    return tensor[at : at + 1] if tensor.ndim else tensor


def _in_whole_batches(samples: Iterable[Any], size: int) -> Iterator[Any]:
    """The samples that fill batches of that size; the last few may fill none."""
    waiting: list[Any] = []
    whole = 0
    for sample in samples:
        waiting.append(sample)
        if len(waiting) == size:
            yield from waiting
            whole += 1
            waiting = []
    if not whole:
        raise FeedError(
            f"TensorRT calibrates in whole batches, got {len(waiting)} samples for batches of"
            f" {size}; give more of them or a smaller batch"
        )


def set_phase(prepared: nn.Module, *, observe: bool, quantize: bool) -> None:
    """Switch all observers and all fake quantizers of a prepared model on or off."""
    for module in prepared.modules():
        if isinstance(module, FakeQuant):
            module.observe, module.enabled = observe, quantize
            module.start_batch()
        elif isinstance(module, WeightQuant):
            module.enabled = quantize


def calibrate(prepared: nn.Module, batches: Iterable[Any], *, search: Search = BY_DEFAULT) -> int:
    """Find the range of every fake quantizer from batches; gives how many runs that took.

    Afterwards the fake quantizers are on and follow nothing.

    Args:
        prepared: by `deploy.fx.prepare`.
        batches: a tensor, or a tuple of inputs, each; batch first. Their size changes nothing.
        search: of `deploy.fx.fakequant.search_for`.

    Raises:
        ConfigError: the search is not defined for the grid.
        FeedError: no batch.
        CalibrationError: NaN or Inf in a tensor, or a tensor that no data reached.
    """
    quants = [module for module in prepared.modules() if isinstance(module, FakeQuant)]
    for quant in quants:
        search.check(quant.grid)
    set_phase(prepared, observe=False, quantize=False)
    _round_weights(prepared, search.rounded_weights)
    training = prepared.training
    prepared.eval()
    recorders, count = observed(prepared, batches, search.statistic)
    if not count:
        raise FeedError("calibration needs at least one batch, got none")
    prepared.train(training)
    with phase("ranges", len(quants), "tensors") as step:
        for quant in quants:
            quant.settle(*_range(quant, recorders, search))
            step()
    set_phase(prepared, observe=False, quantize=True)
    return count


def _range(quant: FakeQuant, recorders: Recorders, search: Search) -> OnGrid:
    """(scale, zero_point) of what a quantizer has its range of: itself, or what it watches."""
    found = []
    for source in quant.watches or [quant]:
        if source not in recorders:
            raise no_data(quant.name)
        found.append(search.on(recorders[source], quant.grid, source.reach))
    return widest(found, quant.grid)


def _round_weights(prepared: nn.Module, enabled: bool) -> None:
    for module in prepared.modules():
        if isinstance(module, WeightQuant):
            module.enabled = enabled


def float_form(prepared: nn.Module) -> nn.Module:
    """A copy of a prepared model that computes in float with the weights it has by now."""
    form = copy.deepcopy(prepared).eval()
    set_phase(form, observe=False, quantize=False)
    return form


def freeze_norms(prepared: nn.Module) -> int:
    """Stop all BatchNorms trained with their layers from following the batch; gives how many."""
    layers = [module for module in prepared.modules() if isinstance(module, QatConvBn)]
    for layer in layers:
        layer.frozen = True
    return len(layers)


def observers_of(prepared: nn.Module) -> dict[str, FakeQuant]:
    """Tensor name -> its `FakeQuant`, in the model's order."""
    found = [module for module in prepared.modules() if isinstance(module, FakeQuant)]
    return {quant.name: quant for quant in found}
