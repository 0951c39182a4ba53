"""Prepare a float model for quantization: insert fake quantizers where the target wants them.

::

    model --fold--> graph --prepare--> FakeQuant at each site, weights fake-quantized
          --calibrate--> ranges --train--> weights adapted to their grid
          --convert--> FixedQuant and int8 weights

A pair may be on any tensor of the exported model, and a fake quantizer needs a node for it. So
calls that a runtime sees as several operators are decomposed first::

    SiLU                            x -> sigmoid -> mul
    scaled_dot_product_attention    query, key -> matmul -> softmax -> matmul <- value
    Conv with non-zero padding      x -> pad -> Conv without padding
"""

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import fx, nn
from torch.fx.proxy import GraphAppendingTracer
from torch.nn import functional

from calibrators.grids import INT8, Grid
from deploy.errors import ConfigError, ModelError
from deploy.fx.capture import as_inputs, graph_of
from deploy.fx.comparison import eval_mode
from deploy.fx.convert import CustomClasses, insert_call, insert_monitors, widest_reach
from deploy.fx.coverage import FLOAT_REASONS
from deploy.fx.device import device_of
from deploy.fx.fakequant import DynamicQuant, FakeQuant
from deploy.fx.fuse import (
    CONVS,
    FOLDABLE,
    UNFOLDED_NORMS,
    called_module,
    called_once,
    fold_batch_norms,
    fold_frozen,
    layers_to_modules,
    reason_not_foldable,
)
from deploy.fx.int8_layers import (
    WEIGHTED,
    QatConvBn,
    QatLayer,
    WeightQuant,
    channel_axis,
    weight_quantizer,
)
from deploy.fx.lift import is_layer
from deploy.fx.norms import FrozenNorm, is_norm
from deploy.fx.operations import propagate_shapes, refresh
from deploy.fx.plain_copy import plain_copy, replace_submodule
from deploy.fx.target_placement import GraphPlacement, QuantizationSite, place_quantizers
from deploy.fx.trace import submodule
from deploy.targets import Target, find_target

BITS = (2, 3, 4, 5, 6, 7, 8)


def grid_with_bits(grid: Grid, bits: int) -> Grid:
    """Return the 8-bit `grid` with fewer bits, stored in the same type."""
    if bits not in BITS:
        raise ConfigError(f"bits are {BITS[0]} to {BITS[-1]}, got {bits}")
    if grid.kind != "integer":
        raise ConfigError(f"a PyTorch model is quantized to integers, got a grid of {grid.name}")
    low = -(2 ** (bits - 1)) if grid.qmin < 0 else 0
    name = grid.name.rstrip("0123456789") + str(bits)
    return replace(grid, name=name, bits=bits, qmin=low, qmax=low + 2**bits - 1)


SILUS = (functional.silu, torch.ops.aten.silu.default, torch.ops.aten.silu_.default)
ATTENTION = functional.scaled_dot_product_attention


def decompose_calls(graph_module: fx.GraphModule) -> None:
    """Decompose, in place, the calls inside of which a runtime may run something in int8."""
    for node in list(graph_module.graph.nodes):
        _pad_before(graph_module, node)
        function = _decomposition(graph_module, node)
        if function is not None:
            _replace(node, function)
    refresh(graph_module)


def _decomposition(graph_module: fx.GraphModule, node: fx.Node) -> Callable[..., Any] | None:
    """Return a function that decomposes a node, or None."""
    if node.target in SILUS or isinstance(called_module(graph_module, node), nn.SiLU):
        return _silu
    return _attention if node.target is ATTENTION and _is_plain(node) else None


def _pad_before(graph_module: fx.GraphModule, node: fx.Node) -> None:
    """Move the padding of a convolution into a separate node, unless it pads with zeros."""
    module = called_module(graph_module, node)
    layer: Any = module.layer if isinstance(module, QatLayer) else module
    if not isinstance(layer, CONVS) or layer.padding_mode == "zeros":
        return
    widths, mode = layer._reversed_padding_repeated_twice, layer.padding_mode
    for call in graph_module.graph.nodes:
        if called_module(graph_module, call) is module:
            with graph_module.graph.inserting_before(call):
                options = {"mode": mode}
                padded = graph_module.graph.call_function(
                    functional.pad, (call.args[0], widths), options
                )
            call.replace_input_with(call.args[0], padded)
    bare = copy.copy(layer)
    bare.padding, bare.padding_mode = (0,) * len(layer.kernel_size), "zeros"
    if isinstance(module, QatLayer):
        module.layer = bare
    else:
        replace_submodule(graph_module, str(node.target), bare)


def _replace(node: fx.Node, function: Callable[..., Any]) -> None:
    tracer = GraphAppendingTracer(node.graph)
    kwargs = {key: value for key, value in node.kwargs.items() if key != "inplace"}
    with node.graph.inserting_before(node):
        args, kwargs = fx.node.map_arg((node.args, kwargs), lambda one: fx.Proxy(one, tracer))
        result = function(*args, **kwargs)
    result.node.meta |= {key: node.meta[key] for key in ("rank",) if key in node.meta}
    node.replace_all_uses_with(result.node)
    node.graph.erase_node(node)


def _silu(x: Any, inplace: bool = False) -> Any:
    return x * torch.sigmoid(x)


def _is_plain(node: fx.Node) -> bool:
    """Return whether an attention has known shapes, no dropout and no grouped queries."""
    names = ("query", "key", "value", "attn_mask", "dropout_p")
    arguments = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    unsupported = (arguments.get("dropout_p"), arguments.get("enable_gqa"))
    known = all(isinstance(_shape(arguments[name]), torch.Size) for name in ("query", "key"))
    return known and not any(unsupported)


def _attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """Decompose as torch's exporter does: query and key are scaled before the product."""
    shape, mask = _shape(query.node), None if attn_mask is None else attn_mask.node
    factor = math.sqrt(1 / math.sqrt(shape[-1]) if scale is None else scale)
    products = torch.matmul(query * factor, key.transpose(-2, -1) * factor)
    if mask is not None:
        boolean = mask.meta["tensor_meta"].dtype is torch.bool
        bias = torch.where(attn_mask, 0.0, -math.inf) if boolean else attn_mask
        products = products + bias
    if is_causal:
        sizes = shape[-2], _shape(key.node)[-2]
        products = products + query.new_full(sizes, -math.inf).triu(1)
    return torch.matmul(torch.softmax(products, -1), value)


def _shape(node: Any) -> Any:
    return getattr(node.meta.get("tensor_meta"), "shape", None) if node is not None else None


MODES = ("static", "dynamic", "weight-only")
NORM_NOT_ADJACENT = (
    "norms='train' needs the norm right after its own layer; norms='fold' can fold it"
)


class CustomConfig:
    """Stands in for torch's QConfig as `float_module.qconfig` in a custom module's `from_float`."""

    def __init__(self, grid: Grid, name: str, bits: int):
        self.grid = grid
        self.name = name
        self.bits = bits

    def activation(self) -> FakeQuant:
        """Return a new fake quantizer of an activation."""
        return FakeQuant(self.grid, self.name)

    def weight(self, axis: int | None = None) -> WeightQuant:
        """Return a new fake quantizer of a weight."""
        return WeightQuant(axis, self.bits)


def prepare(
    model: nn.Module,
    inputs: Sequence[torch.Tensor],
    *,
    target: str | Target = "onnxruntime",
    mode: str = "static",
    bits: int = 8,
    norms: str = "fold",
    leaves: Sequence[str | type[nn.Module]] = (),
    skip: Sequence[str] = (),
    share: Sequence[str] = (),
    custom: CustomClasses | None = None,
    momentum: float = 0.05,
) -> fx.GraphModule:
    """Return a graph of a copy of `model` with disabled fake quantizers; its outputs are unchanged.

    Args:
        model: a float model; for norms="fold" in eval mode.
        inputs: example inputs, any batch size.
        target: onnxruntime, tensorrt or ascend, or a target with options. Its plan determines
            which tensors and weights are quantized, and the grid, as in `calib8 build`.
        mode: "static" (scales from calibration; also for training), "dynamic" (Linear layers,
            activations with the range of each batch) or "weight-only".
        bits: of activations and weights, 2 to 8.
        norms: "fold" BatchNorms first, or "train" them with their layers (see `freeze_norms`).
        leaves: modules to keep as one node and in float, by name, class name or class.
        skip: names of layers to leave in float.
        share: kinds of operators whose inputs and output share a scale, in addition to those of
            the target: add, concat, pool, keep.
        custom: float class -> observed class with `from_float`; kept as one node.
        momentum: of the moving average of min and max; 1 for the extremes of all batches.

    Raises:
        ConfigError: an option has an unknown value or name.
        ModelError: the model cannot be traced or run.
    """
    _check_options(mode, norms, momentum, bits)
    custom, inputs = custom or {}, as_inputs(inputs, model)
    chosen = resolve_target(target)
    graph_module = _graph(model, inputs, [*leaves, *custom], norms)
    _check_skip(graph_module, skip)
    if norms == "train":
        _merge_norms(graph_module, bits, skip)
    _run_once(graph_module, inputs)
    is_opaque = partial(_is_opaque, graph_module, [*leaves, *custom])
    decompose_calls(graph_module)
    _run_once(graph_module, inputs)
    placed = place_quantizers(
        graph_module, inputs, chosen, skip=skip, share=share, is_opaque=is_opaque
    )
    if mode == "static":
        grid = grid_with_bits(placed.grid, bits)
        observers = _insert_observers(graph_module, placed.sites, grid, momentum)
        _set_sources(graph_module, placed, observers)
        _swap_custom(graph_module, custom, grid, bits, momentum, observers)
    elif mode == "dynamic":
        _insert_dynamic(graph_module, placed.weights)
    if mode == "weight-only":  # float products cannot saturate
        placed = replace(placed, fits_pairs=False)
    _wrap_weights(graph_module, placed, bits, linear_only=mode == "dynamic")
    graph_module.meta[FLOAT_REASONS] = dict(placed.reasons)
    graph_module.delete_all_unused_submodules()
    refresh(graph_module)
    return graph_module.to(device_of(graph_module))


def resolve_target(target: str | Target) -> Target:
    """Return the target of this name with default options; a target object is returned unchanged.

    Raises:
        ConfigError: there is no target of this name.
    """
    return find_target(target)() if isinstance(target, str) else target


def _is_opaque(
    graph_module: fx.GraphModule, leaves: Sequence[str | type[nn.Module]], node: fx.Node
) -> bool:
    """Whether a `call_module` node stays one node: a leaf or an unknown module."""
    module = called_module(graph_module, node)
    assert module is not None
    names = (str(node.target), type(module).__name__, type(module))
    known = is_layer(module) or is_norm(module) or isinstance(module, (QatLayer, FrozenNorm))
    return not known or any(leaf in names for leaf in leaves)


def prepare_only(
    model: nn.Module, name: str, inputs: Sequence[torch.Tensor], **options: Any
) -> nn.Module:
    """Return a copy of `model` with only its submodule `name` prepared.

    Args:
        model: a float model; only the submodule has to be traceable.
        name: qualified name of the submodule.
        inputs: example inputs of the entire model; those of the submodule are recorded in a run.
        options: as for `prepare`.

    Raises:
        ConfigError, ModelError: as `prepare`; or the run does not reach the submodule.
    """
    model = plain_copy(model)
    part = submodule(model, name)
    calls: list[tuple[Any, ...]] = []
    hook = part.register_forward_pre_hook(lambda _, args: calls.append(args))
    with torch.no_grad():
        model(*inputs)
    hook.remove()
    if not calls:
        raise ModelError(f"{name} must run for the example inputs, and does not")
    prepared = prepare(part, calls[0], **options)
    for module in prepared.modules():
        if isinstance(module, FakeQuant):
            module.calls_per_batch *= len(calls)  # one range for all calls of the submodule
    replace_submodule(model, name, prepared)
    return model


def _check_options(mode: str, norms: str, momentum: float, bits: int) -> None:
    if mode not in MODES:
        raise ConfigError(f"a mode is one of {', '.join(MODES)}, got {mode!r}")
    if norms not in ("fold", "train"):
        raise ConfigError(f"norms are 'fold' or 'train', got {norms!r}")
    if not 0 < momentum <= 1:
        raise ConfigError(f"momentum lies in (0, 1], got {momentum}")
    grid_with_bits(INT8, bits)


def _graph(
    model: nn.Module, inputs: Sequence[Any], leaves: list[Any], norms: str
) -> fx.GraphModule:
    graph_module = graph_of(model, inputs, leaves=leaves)
    if norms == "fold":
        return fold_batch_norms(graph_module)[0]
    layers_to_modules(graph_module)
    fold_frozen(graph_module)
    return graph_module


def _check_skip(graph_module: fx.GraphModule, skip: Sequence[str]) -> None:
    layers = [name for name, m in graph_module.named_modules() if isinstance(m, WEIGHTED)]
    missing = sorted(set(skip) - set(layers))
    if missing:
        raise ConfigError(
            f"a layer to leave in float must be a Conv or Linear of the model, got"
            f" {', '.join(missing)}; it has {', '.join(layers)}"
        )


def _run_once(graph_module: fx.GraphModule, inputs: Sequence[torch.Tensor]) -> None:
    """Set the shapes of all nodes, in eval mode so that norm statistics do not change."""
    try:
        with eval_mode(graph_module):
            propagate_shapes(graph_module, *inputs)
    except Exception as error:  # whatever a user's model raises
        shapes = [tuple(x.shape) for x in inputs]
        cause = error.__cause__ or error  # torch.fx wraps what the model raised
        first = str(cause).strip().splitlines() or [type(cause).__name__]
        raise ModelError(f"the model must run for inputs {shapes}, got: {first[0]}") from error


def _insert_observers(
    graph_module: fx.GraphModule, sites: Sequence[QuantizationSite], grid: Grid, momentum: float
) -> dict[fx.Node, FakeQuant]:
    groups: dict[str, str] = {}
    observers: dict[fx.Node, FakeQuant] = {}
    for site in sites:
        name = groups.get(site.group)
        if name is None:
            name = groups[site.group] = f"quant_{site.tensor.name}"
            quant = FakeQuant(grid, site.tensor.name, momentum=momentum)
            graph_module.add_submodule(name, quant)
        else:
            getattr(graph_module, name).calls_per_batch += 1
        observers[site.tensor] = getattr(graph_module, name)
        _insert(graph_module, site.tensor, site.readers, name)
    return observers


def _set_sources(
    graph_module: fx.GraphModule, placed: GraphPlacement, observers: Mapping[fx.Node, FakeQuant]
) -> None:
    """Give each quantizer the range sources and reach that a build uses for its tensor."""
    members: dict[str, list[fx.Node]] = {}
    for site in placed.sites:
        members.setdefault(site.group, []).append(site.tensor)
    for group, tensors in members.items():
        quant, sources = observers[tensors[0]], placed.sources[group]
        quant.reach = widest_reach(reach for _, reach in sources)
        if sources and [node for node, _ in sources] != tensors:
            insert_monitors(graph_module, quant, sources)


def _insert(
    graph_module: fx.GraphModule, tensor: fx.Node, readers: set[fx.Node] | None, module: str
) -> None:
    quantized = insert_call(graph_module, tensor, module)
    for reader in list(tensor.users):
        if reader is not quantized and (readers is None or reader in readers):
            reader.replace_input_with(tensor, quantized)


def _insert_dynamic(graph_module: fx.GraphModule, weights: Mapping[str, bool]) -> None:
    for node in list(graph_module.graph.nodes):
        module = called_module(graph_module, node)
        if isinstance(module, nn.Linear) and str(node.target) in weights:
            source = node.args[0]
            name = f"quant_{source.name}"
            if not hasattr(graph_module, name):
                graph_module.add_submodule(name, DynamicQuant(source.name))
            _insert(graph_module, source, {node}, name)


def _swap_custom(
    graph_module: fx.GraphModule,
    custom: CustomClasses,
    grid: Grid,
    bits: int,
    momentum: float,
    observers: dict[fx.Node, FakeQuant],
) -> None:
    """Replace each custom float module by its observed class, with an observer of its output."""
    for node in list(graph_module.graph.nodes):
        module: Any = called_module(graph_module, node)
        observed: Any = custom.get(type(module))
        if observed is None:
            continue
        name = str(node.target)
        module.qconfig = CustomConfig(grid, name, bits)
        new = observed.from_float(module)
        if not hasattr(new, "activation_post_process"):
            if node not in observers:
                site = QuantizationSite(node, None, "")
                observers |= _insert_observers(graph_module, [site], grid, momentum)
            new.activation_post_process = observers[node]
        replace_submodule(graph_module, name, new)


def _wrap_weights(
    graph_module: fx.GraphModule, placed: GraphPlacement, bits: int, *, linear_only: bool
) -> None:
    """Insert weight quantizers; a layer that stays float but was merged with its norm has none."""
    weights, fits = placed.weights, placed.fits_pairs
    called = (str(n.target) for n in graph_module.graph.nodes if n.op == "call_module")
    for name in dict.fromkeys(called):
        module = graph_module.get_submodule(name)
        plain = isinstance(module, (nn.Linear,) if linear_only else WEIGHTED)
        if isinstance(module, QatLayer) and name in weights:
            axis = channel_axis(module.layer, weights[name])
            module.weight_quant = weight_quantizer(module.layer, axis, bits, fits_pairs=fits)
        elif isinstance(module, QatLayer):
            module.weight_quant = nn.Identity()
        elif plain and name in weights:
            axis = channel_axis(module, weights[name])
            quant = weight_quantizer(module, axis, bits, fits_pairs=fits)
            replace_submodule(graph_module, name, QatLayer(module, quant))


def _merge_norms(graph_module: fx.GraphModule, bits: int, skip: Sequence[str]) -> None:
    """Merge each BatchNorm with the layer before it, to train them as one."""
    left: dict[str, str] = {}
    for node in list(graph_module.graph.nodes):
        norm = called_module(graph_module, node)
        if norm is None or not is_norm(norm):
            continue
        layer: Any = node.args[0]
        before = called_module(graph_module, layer)
        reason = reason_not_foldable(graph_module, node)
        if reason is None and (
            not isinstance(before, FOLDABLE) or not called_once(graph_module, layer)
        ):
            reason = NORM_NOT_ADJACENT
        if reason is not None:
            left[str(node.target)] = reason
        elif before is not None and str(layer.target) not in skip:
            merged = QatConvBn(before, norm, WeightQuant(channel_axis(before), bits))
            replace_submodule(graph_module, str(layer.target), merged.train(before.training))
            node.replace_all_uses_with(layer)
            graph_module.graph.erase_node(node)
    graph_module.meta[UNFOLDED_NORMS] = left
    graph_module.recompile()
