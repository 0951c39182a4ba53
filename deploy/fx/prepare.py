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
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import fx, nn
from torch.fx.proxy import GraphAppendingTracer
from torch.nn import functional

from calibrators.grids import INT8, Grid, signed_grid, unsigned_grid
from deploy.errors import ConfigError, ModelError
from deploy.fx.capture import as_inputs, graph_of, run_model
from deploy.fx.comparison import eval_mode
from deploy.fx.convert import (
    CustomClasses,
    check_classes,
    insert_call,
    insert_monitors,
    widest_limits,
)
from deploy.fx.coverage import FLOAT_REASONS, measure_coverage, refuse_unquantized
from deploy.fx.device import device_of
from deploy.fx.fakequant import DynamicQuant, FakeQuant
from deploy.fx.functional_layers import functions_to_modules
from deploy.fx.fuse import (
    CONVS,
    UNFOLDED_NORMS,
    WEIGHTED,
    fold_batch_norms,
    fold_frozen,
    reason_not_foldable,
)
from deploy.fx.int8_layers import (
    QatConvBn,
    QatLayer,
    WeightQuant,
    channel_axis,
    find_weighted_layers,
    weight_quantizer,
)
from deploy.fx.lift import is_layer
from deploy.fx.model_inputs import cast_floats, convert_to_float32, floating_dtype
from deploy.fx.norms import is_norm
from deploy.fx.operations import (
    add_module,
    arguments_by_name,
    called_module,
    called_once,
    calls_of_module,
    delete_unused_modules,
    is_plain,
    module_calls,
    propagate_shapes,
    refresh,
    replace_layer,
    replace_node,
)
from deploy.fx.plain_copy import plain_copy, replace_submodule, unwrap
from deploy.fx.range_search import resolve_target
from deploy.fx.target_placement import GraphPlacement, QuantizationSite, place_quantizers
from deploy.fx.trace import Leaves, check_names, names_module, submodule
from deploy.targets import Target

BITS = range(2, 9)


def grid_with_bits(grid: Grid, bits: int) -> Grid:
    """Return the 8-bit `grid` with fewer bits, stored in the same type."""
    if bits not in BITS:
        raise ConfigError(f"bits are {BITS[0]} to {BITS[-1]}, got {bits}")
    if grid.kind != "integer":
        raise ConfigError(f"a PyTorch model is quantized to integers, got a grid of {grid.name}")
    grid_of_bits = signed_grid if grid.qmin < 0 else unsigned_grid
    return replace(grid_of_bits(bits), symmetric=grid.symmetric)


SILUS = (functional.silu, torch.ops.aten.silu.default, torch.ops.aten.silu_.default)
ATTENTION = functional.scaled_dot_product_attention


def decompose_calls(graph_module: fx.GraphModule) -> None:
    """Decompose, in place, the calls inside of which a runtime may run something in int8."""
    for node in list(graph_module.graph.nodes):
        _separate_padding(graph_module, node)
        if node.target in SILUS or is_plain(called_module(graph_module, node), (nn.SiLU,)):
            _replace_call(node, _silu)
        elif node.target is ATTENTION and _is_decomposable(node):
            _replace_call(node, _attention)
    refresh(graph_module)


def _separate_padding(graph_module: fx.GraphModule, node: fx.Node) -> None:
    """Move the padding of a convolution into a separate node, in place, unless it pads with zeros.

    A Conv of ONNX can pad only with zeros, so other padding is a Pad before it, and the plan may
    quantize the tensor between them. The module loses its padding, so every call of it gets a
    padding node here.

    `node`: one call of the convolution; nothing happens if it is something else.
    """
    module = called_module(graph_module, node)
    layer: Any = module.layer if isinstance(module, QatLayer) else module
    if not is_plain(layer, CONVS) or layer.padding_mode == "zeros":
        return
    for call in calls_of_module(graph_module, node):
        with graph_module.graph.inserting_before(call):
            padded_input = graph_module.graph.call_function(
                functional.pad,
                # the padding in the form that `pad` takes
                (call.args[0], layer._reversed_padding_repeated_twice),
                {"mode": str(layer.padding_mode)},
            )
        call.replace_input_with(call.args[0], padded_input)

    unpadded_layer = copy.copy(layer)
    unpadded_layer.padding = (0,) * len(layer.kernel_size)
    unpadded_layer.padding_mode = "zeros"
    if isinstance(module, QatLayer):
        module.layer = unpadded_layer
    else:
        replace_submodule(graph_module, str(node.target), unpadded_layer)


def _replace_call(node: fx.Node, function: Callable[..., Any]) -> None:
    """Replace a call by the operations of `function`, which takes the same arguments."""
    to_proxy = partial(fx.Proxy, tracer=GraphAppendingTracer(node.graph))
    with node.graph.inserting_before(node):
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), to_proxy)
        result = function(*args, **kwargs)
    if "rank" in node.meta:
        result.node.meta["rank"] = node.meta["rank"]
    replace_node(node, result.node)


def _silu(x: Any, inplace: bool = False) -> Any:  # the functional form has a second argument
    return x * torch.sigmoid(x)


def _is_decomposable(attention: fx.Node) -> bool:
    """Return whether an attention has known shapes, no dropout and no grouped queries."""
    names = ("query", "key", "value", "attn_mask", "dropout_p")
    arguments = arguments_by_name(attention, names)
    if arguments.get("dropout_p") or arguments.get("enable_gqa"):
        return False
    shapes = (_shape(arguments["query"]), _shape(arguments["key"]))
    return all(isinstance(shape, torch.Size) for shape in shapes)


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
    """Compute `scaled_dot_product_attention` by single operations, as torch's exporter does.

    Query and key are scaled before the product. The arguments are those of torch, as `fx.Proxy`;
    dropout and grouped queries are not decomposed (`_is_decomposable`).
    """
    *_, query_length, width = _shape(query.node)
    if scale is None:
        scale = 1 / math.sqrt(width)
    factor = math.sqrt(scale)  # of the query and of the key
    scores = torch.matmul(query * factor, key.transpose(-2, -1) * factor)
    if attn_mask is not None:
        bias = attn_mask
        if attn_mask.node.meta["tensor_meta"].dtype is torch.bool:  # False: a position is masked
            bias = torch.where(attn_mask, 0.0, -math.inf)
        scores = scores + bias
    if is_causal:  # no position sees a later one
        *_, key_length, _ = _shape(key.node)
        scores = scores + query.new_full((query_length, key_length), -math.inf).triu(1)
    return torch.matmul(torch.softmax(scores, -1), value)


def _shape(node: fx.Node) -> Any:
    """Return the shape of a node's tensor; None if it outputs no tensor."""
    return getattr(node.meta.get("tensor_meta"), "shape", None)


MODES = ("static", "dynamic", "weight-only")
NORM_NOT_ADJACENT = (
    "norms='train' needs the norm right after its own layer; norms='fold' can fold it"
)


@dataclass(frozen=True, slots=True)
class CustomConfig:
    """Stands in for torch's QConfig as `float_module.qconfig` in a custom module's `from_float`.

    Attributes:
        grid: grid of the activations.
        name: qualified name of the module.
        bits: of activations and weights.
    """

    grid: Grid
    name: str
    bits: int

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
    leaves: Leaves = (),
    skip: Sequence[str] = (),
    custom: CustomClasses | None = None,
) -> fx.GraphModule:
    """Return a graph of a copy of `model` with disabled fake quantizers; its outputs are unchanged.

    Args:
        model: a float model in any mode. With norms="fold" the graph is in eval mode, with
            norms="train" in that of the model.
        inputs: example inputs, any batch size.
        target: onnxruntime, tensorrt or ascend, or a target with options. Its plan determines
            which tensors and weights are quantized, and the grid, as in `calib8 build`.
        mode: "static" (scales from calibration; also for training), "dynamic" (Linear layers,
            activations with the range of each batch) or "weight-only".
        bits: of activations and weights, 2 to 8.
        norms: "fold" BatchNorms first, or "train" them with their layers (see `freeze_norms`).
        leaves: modules to keep as one node and in float, by name, class name or class.
        skip: names of layers to leave in float.
        custom: float class -> observed class with `from_float`; kept as one node.

    Raises:
        ConfigError: an option has an unknown value or name.
        ModelError: the model cannot be traced or run.
        ExportError: nothing would be quantized.
    """
    _check_options(mode, norms, bits)
    check_names(leaves=leaves, skip=skip)
    check_classes(custom, "from_float")
    model = unwrap(model)
    custom = custom or {}
    inputs = cast_floats(as_inputs(inputs, model), torch.float32)
    if floating_dtype(model) != torch.float32:
        model = plain_copy(model)
        convert_to_float32(model)
    opaque = [*leaves, *custom]  # modules that stay one node
    graph_module = _graph_without_norms(model, inputs, norms, opaque, skip)
    # the decomposition reads shapes, and adds nodes whose shapes the placement reads
    _set_shapes(graph_module, inputs)
    decompose_calls(graph_module)
    _set_shapes(graph_module, inputs)
    placement = place_quantizers(
        graph_module,
        inputs,
        resolve_target(target),
        skip=skip,
        is_opaque=partial(_is_opaque, graph_module, opaque),
    )
    if mode == "static":
        grid = grid_with_bits(placement.grid, bits)
        observers = _insert_observers(graph_module, placement.sites, grid)
        _set_sources(graph_module, placement, observers)
        _replace_custom(graph_module, custom, grid, bits, observers)
    elif mode == "dynamic":
        _insert_dynamic(graph_module, quantized_layers=placement.per_channel_by_layer)
    else:  # weight-only: products are computed in float, which cannot saturate
        placement = replace(placement, limits_pair_sums=False)
    _wrap_weights(graph_module, placement, bits, linear_only=mode == "dynamic")

    graph_module.meta[FLOAT_REASONS] = dict(placement.reasons)
    has_quantizer = any(
        isinstance(module, FakeQuant | WeightQuant) for module in graph_module.modules()
    )
    if not has_quantizer and not opaque:  # `convert` may put int8 classes of the user's there
        refuse_unquantized(measure_coverage(graph_module, model))
    delete_unused_modules(graph_module)
    return graph_module.to(device_of(graph_module))  # new quantizers are on the CPU


def _graph_without_norms(
    model: nn.Module, inputs: Sequence[Any], norms: str, opaque: Leaves, skip: Sequence[str]
) -> fx.GraphModule:
    """Return a graph of a copy of a model whose BatchNorms are part of the layers before them.

    With norms="fold" they are folded into the weights, with "train" merged to be trained. Norms for
    which this is impossible stay. The arguments are those of `prepare`; `opaque` are modules that
    stay one node.
    """
    if norms == "fold":
        graph_module, _report = fold_batch_norms(model, inputs, leaves=opaque)
        _refuse_unknown_layers(graph_module, skip)
        return graph_module
    graph_module = graph_of(model, inputs, leaves=opaque)
    functions_to_modules(graph_module)
    fold_frozen(graph_module)
    _refuse_unknown_layers(graph_module, skip)
    _merge_norms(graph_module, skip)
    return graph_module


def _is_opaque(graph_module: fx.GraphModule, leaves: Leaves, node: fx.Node) -> bool:
    """Return whether a `call_module` node stays one node: a leaf or an unknown module."""
    module = called_module(graph_module, node)
    assert module is not None
    if any(names_module(leaf, str(node.target), module) for leaf in leaves):
        return True
    is_quantizable = is_layer(module) or isinstance(module, QatLayer)
    return not is_quantizable and not is_norm(module)


def prepare_part(
    model: nn.Module, only: str | None, inputs: Sequence[torch.Tensor], **options: Any
) -> nn.Module:
    """Return a copy of `model` prepared: only its submodule `only`, or all of it if None.

    Args:
        model: a float model; only the submodule has to be traceable.
        only: qualified name of the submodule.
        inputs: example inputs of the entire model; those of the submodule are recorded in a run.
        options: as for `prepare`.

    Raises:
        ConfigError, ModelError: as `prepare`; or the run does not reach the submodule.
    """
    if only is None:
        return prepare(model, inputs, **options)
    model = plain_copy(model)
    part = submodule(model, only)
    calls: list[tuple[Any, ...]] = []
    hook = part.register_forward_pre_hook(lambda _module, args: calls.append(args))
    with eval_mode(model):
        run_model(model, as_inputs(inputs, model))
    hook.remove()
    if not calls:
        raise ModelError(f"{only} must run for the example inputs, and does not")
    prepared = prepare(part, calls[0], **options)
    for module in prepared.modules():
        if isinstance(module, FakeQuant):
            module.calls_per_batch *= len(calls)  # one range for all calls of the submodule
    replace_submodule(model, only, prepared)
    return model


def _check_options(mode: str, norms: str, bits: int) -> None:
    if mode not in MODES:
        raise ConfigError(f"a mode is one of {', '.join(MODES)}, got {mode!r}")
    if norms not in ("fold", "train"):
        raise ConfigError(f"norms are 'fold' or 'train', got {norms!r}")
    grid_with_bits(INT8, bits)


def _refuse_unknown_layers(graph_module: fx.GraphModule, skip: Sequence[str]) -> None:
    layers = dict(find_weighted_layers(graph_module))
    unknown_names = sorted(set(skip) - layers.keys())
    if unknown_names:
        raise ConfigError(
            f"a layer to leave in float must be a Conv or Linear of the model, got"
            f" {', '.join(unknown_names)}; it has {', '.join(layers)}"
        )


def _set_shapes(graph_module: fx.GraphModule, inputs: Sequence[torch.Tensor]) -> None:
    """Set the shapes of all nodes, in eval mode so that norm statistics do not change."""
    with eval_mode(graph_module):
        propagate_shapes(graph_module, *inputs)


def _insert_observers(
    graph_module: fx.GraphModule, sites: Sequence[QuantizationSite], grid: Grid
) -> dict[fx.Node, FakeQuant]:
    """Insert a call of a fake quantizer after each tensor; return tensor -> its quantizer.

    Tensors of a group, which share a scale, share the quantizer.
    """
    name_and_quantizer_by_group: dict[str, tuple[str, FakeQuant]] = {}
    quantizers: dict[fx.Node, FakeQuant] = {}
    for site in sites:
        if site.group in name_and_quantizer_by_group:
            name, quantizer = name_and_quantizer_by_group[site.group]
            quantizer.calls_per_batch += 1
        else:
            quantizer = FakeQuant(grid, site.tensor.name)
            name = add_module(graph_module, f"quant_{site.tensor.name}", quantizer)
            name_and_quantizer_by_group[site.group] = (name, quantizer)
        quantizers[site.tensor] = quantizer
        _insert_between(graph_module, site.tensor, site.readers, name)
    return quantizers


def _set_sources(
    graph_module: fx.GraphModule, placement: GraphPlacement, observers: Mapping[fx.Node, FakeQuant]
) -> None:
    """Give each quantizer the tensors from which its range comes, and limits, as in a build.

    The limits are the values beyond which all readers of a tensor saturate.
    """
    tensors_by_group: dict[str, list[fx.Node]] = {}
    for site in placement.sites:
        tensors_by_group.setdefault(site.group, []).append(site.tensor)

    for group, tensors in tensors_by_group.items():
        quantizer = observers[tensors[0]]  # the tensors of a group share it
        sources = placement.sources[group]
        quantizer.saturation_limits = widest_limits(limits for _, limits in sources)
        # A quantizer without monitors observes the tensors that it quantizes. So it does if these
        # are the sources; or if there are none, since each is inside the call of a module.
        observed_tensors = [node for node, _ in sources] or tensors
        if observed_tensors != tensors:
            insert_monitors(graph_module, quantizer, sources)


def _insert_between(
    graph_module: fx.GraphModule, tensor: fx.Node, readers: set[fx.Node] | None, module: str
) -> None:
    """Insert a call of a module between a tensor and its readers; None for all readers."""
    quantized = insert_call(graph_module, tensor, module)
    for reader in list(tensor.users):
        if reader is not quantized and (readers is None or reader in readers):
            reader.replace_input_with(tensor, quantized)


def _insert_dynamic(graph_module: fx.GraphModule, *, quantized_layers: Container[str]) -> None:
    """Insert a dynamic quantizer before each Linear with a quantized weight."""
    name_by_source: dict[Any, str] = {}
    for node, module in module_calls(graph_module):
        if isinstance(module, nn.Linear) and str(node.target) in quantized_layers:
            source = node.args[0]
            if source not in name_by_source:
                name = f"quant_{source.name}"
                name_by_source[source] = add_module(graph_module, name, DynamicQuant())
            _insert_between(graph_module, source, {node}, name_by_source[source])


def _replace_custom(
    graph_module: fx.GraphModule,
    custom: CustomClasses,
    grid: Grid,
    bits: int,
    observers: dict[fx.Node, FakeQuant],
) -> None:
    """Replace each custom float module by its observed form, with an observer of its output.

    An observer is a fake quantizer. An observed module that has its own observer keeps it.

    Args:
        graph_module: the graph, edited in place.
        custom: float class of the user -> observed class, whose `from_float` makes a module.
        grid: grid of the activations.
        bits: of the weights.
        observers: quantized tensor -> its fake quantizer; those of the custom modules' outputs are
            added.
    """
    for node, module in module_calls(graph_module):
        observed_class: Any = custom.get(type(module))
        if observed_class is None:
            continue
        name = str(node.target)
        module.qconfig = CustomConfig(grid, name, bits)  # where torch's `from_float` reads it
        observed_module = observed_class.from_float(module)
        if not hasattr(observed_module, "activation_post_process"):  # torch's name for an observer
            if node not in observers:  # the plan leaves the tensor in float
                # readers=None are all of them; sites with the same group would share the scale, so
                # a single one may have any group
                site = QuantizationSite(tensor=node, readers=None, group="")
                observers |= _insert_observers(graph_module, [site], grid)
            observed_module.activation_post_process = observers[node]
        replace_submodule(graph_module, name, observed_module)


def _wrap_weights(
    graph_module: fx.GraphModule, placement: GraphPlacement, bits: int, *, linear_only: bool
) -> None:
    """Give each layer whose weight the placement quantizes a weight quantizer, in place.

    `linear_only`: leave convolutions in float, as dynamic quantization does.
    """
    kinds = (nn.Linear,) if linear_only else WEIGHTED
    calls = graph_module.graph.find_nodes(op="call_module")
    for name in dict.fromkeys(str(node.target) for node in calls):
        module: Any = graph_module.get_submodule(name)
        # `_merge_norms` has made a QatLayer of a layer and its BatchNorm, without a quantizer
        has_merged_norm = isinstance(module, QatLayer)
        is_quantizable = has_merged_norm or isinstance(module, kinds)
        if name not in placement.per_channel_by_layer or not is_quantizable:
            continue

        layer = module.layer if has_merged_norm else module
        axis = channel_axis(layer, placement.per_channel_by_layer[name])
        quantizer = weight_quantizer(layer, axis, bits, limits_pair_sums=placement.limits_pair_sums)
        if has_merged_norm:
            module.weight_quant = quantizer
        else:
            replace_layer(graph_module, name, QatLayer(layer, quantizer))


def _merge_norms(graph_module: fx.GraphModule, skip: Sequence[str]) -> None:
    """Merge each BatchNorm with the layer before it, in place, to train them as one.

    A norm stays if it cannot be merged, and the graph's `meta` gets the reason. It also stays after
    a layer of `skip`, which is left in float.
    """
    reason_by_norm: dict[str, str] = {}
    for norm_call, norm in module_calls(graph_module):
        if not is_norm(norm):
            continue
        layer_call: Any = norm_call.args[0]
        layer: Any = called_module(graph_module, layer_call)
        reason = reason_not_foldable(graph_module, norm_call)
        # else a view or dropout lies between, or several calls would each need a merged layer
        is_adjacent = isinstance(layer, WEIGHTED) and called_once(graph_module, layer_call)
        if reason is None and not is_adjacent:
            reason = NORM_NOT_ADJACENT
        if reason is not None:
            reason_by_norm[str(norm_call.target)] = reason
            continue
        layer_name = str(layer_call.target)
        if layer_name in skip:
            continue
        no_quantizer = nn.Identity()  # `_wrap_weights` replaces it if the plan quantizes the weight
        merged_layer = QatConvBn(layer, norm, no_quantizer)
        merged_layer.train(layer.training)
        replace_layer(graph_module, layer_name, merged_layer)
        replace_node(norm_call, layer_call)
    graph_module.meta[UNFOLDED_NORMS] = reason_by_norm
    graph_module.recompile()
