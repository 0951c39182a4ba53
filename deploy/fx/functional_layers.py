"""Rewrite functional layers as modules.

`functions_to_modules` turns `F.conv2d(x, self.weight, ...)` into a call of an `nn.Conv2d` with the
same weight, named `<owner of the weight>.conv`; `F.linear(...)` into `<owner>.linear`; and
`F.batch_norm(...)` into `<owner of the statistics>.norm`. Further linears of one owner have the
weight's name in front. If the owner is a layer that is called too, the module lies beside it, as
`<owner>_linear`.
"""

from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional

from deploy.fx.norms import (
    STATISTICS,
    ChannelNorm,
    batch_norm_arguments,
)
from deploy.fx.operations import (
    arguments_by_name,
    drop_unread_nodes,
    is_attribute,
    refresh,
    replace_node,
)
from deploy.fx.plain_copy import tensor_of

# function -> (module, suffix of its name)
_LAYERS: dict[Any, tuple[type[nn.Module], str]] = {
    torch.conv1d: (nn.Conv1d, "conv"),
    torch.conv2d: (nn.Conv2d, "conv"),
    torch.conv3d: (nn.Conv3d, "conv"),
    functional.linear: (nn.Linear, "linear"),
}
# option of a convolution -> its default
_CONV_DEFAULTS = {"stride": 1, "padding": 0, "dilation": 1, "groups": 1}
_ARGUMENTS = ("input", "weight", "bias", *_CONV_DEFAULTS)  # linear has only the first three
_TENSORS = ("weight", "bias", *STATISTICS)  # arguments that are tensors, of layers and norms


def functions_to_modules(graph_module: fx.GraphModule) -> None:
    """Turn functional convolutions, linears and norms into modules, in place.

    Not changed: calls with a computed weight or option, with a weight that is used elsewhere with
    other options, and norms that use the statistics of the batch.
    """
    rewriter = _Rewriter(graph_module)
    for node in list(graph_module.graph.nodes):
        if node.op == "call_function" and node.target in _LAYERS:
            rewriter.replace_layer(node)
        elif (norm_options := batch_norm_arguments(node)) is not None:
            rewriter.replace_norm(node, norm_options)
    drop_unread_nodes(graph_module)
    rewriter.delete_moved_tensors()
    refresh(graph_module)


class _Rewriter:
    """Replaces calls of functions by calls of modules that it adds.

    Attributes:
        options_by_name: name of each new module -> its options, tensors by their names.
        called_modules: names of the modules that the graph calls.
    """

    def __init__(self, graph_module: fx.GraphModule):
        self.graph_module = graph_module
        self.options_by_name: dict[str, dict[str, Any]] = {}
        calls = graph_module.graph.find_nodes(op="call_module")
        self.called_modules = {str(node.target) for node in calls}

    def replace_layer(self, node: fx.Node) -> None:
        """Replace a functional convolution or linear, if its weight is no computed one."""
        options = {"bias": None, **_CONV_DEFAULTS, **arguments_by_name(node, _ARGUMENTS)}
        input_node = options.pop("input")
        weight = options["weight"]
        if not is_attribute(weight) or not _is_parameter_or_none(options["bias"]):
            return
        kind, suffix = _LAYERS[node.target]
        self._replace(node, input_node, kind, self._module_name(weight, suffix), options)

    def replace_norm(self, node: fx.Node, options: dict[str, Any]) -> None:
        """Replace a functional BatchNorm, unless it always uses the statistics of the batch.

        `options`: its arguments by name.
        """
        input_node = options.pop("input")
        mean = options["running_mean"]
        # in eval mode, a module would not use the statistics of the batch: such a norm stays
        uses_batch_in_eval = options.pop("training") and not self.graph_module.training
        if uses_batch_in_eval or mean is None:
            return
        # a computed tensor can be no part of a module
        if not all(_is_parameter_or_none(options[key]) for key in _TENSORS):
            return
        if not isinstance(options["momentum"], float):
            return
        name = self._module_name(mean, "norm")
        self._replace(node, input_node, ChannelNorm, name, options)

    def _replace(
        self,
        node: fx.Node,
        input_node: fx.Node,
        kind: type[nn.Module],
        name: str,
        arguments: dict[str, Any],
    ) -> None:
        """Replace a call of a function by a call of a module, which is added at its first call.

        The node stays if an option is computed, such as a padding from a size; or if the module's
        name is taken: by a module of the user, or by a module that was added for a call with the
        same weight and other options.

        Args:
            node: calls the function.
            input_node: its input tensor.
            kind: class of the module.
            name: of the module.
            arguments: those of the call by name, without the input.
        """
        if not all(map(is_attribute, set(node.all_input_nodes) - {input_node})):
            return
        # name -> value, or for a tensor its name in the model, such as "fc.weight"
        options: Any = fx.node.map_arg(arguments, lambda tensor: str(tensor.target))
        if kind is nn.Linear and self._is_name_taken(name, options):
            # another linear with a weight of the same owner has this name: put the name of this
            # one's weight in front of the suffix
            layer_suffix = name.rpartition(".")[2]
            name = f"{options['weight']}_{layer_suffix}"
        if self._is_name_taken(name, options):
            return
        if name not in self.options_by_name:  # else an equal call has added the module
            self.graph_module.add_submodule(name, self._create_module(kind, options))
            self.options_by_name[name] = options
        with node.graph.inserting_before(node):
            call = node.graph.call_module(name, (input_node,))
        call.meta.update(node.meta)
        replace_node(node, call)

    def _module_name(self, tensor: fx.Node, suffix: str) -> str:
        """Return the name of a module for a tensor: inside the tensor's owner, or beside it.

        A called owner is a layer: quantization replaces it, and what is inside would be lost.
        """
        owner, _, _ = str(tensor.target).rpartition(".")
        if not owner:
            return suffix
        separator = "_" if owner in self.called_modules else "."
        return f"{owner}{separator}{suffix}"

    def _is_name_taken(self, name: str, options: dict[str, Any]) -> bool:
        """Return whether a new module with other options, or one of the user's, has this name."""
        if name in self.options_by_name:
            return self.options_by_name[name] != options
        return name in dict(self.graph_module.named_modules())

    def _tensor(self, name: Any) -> Any:
        return tensor_of(self.graph_module, name) if name else None

    def _create_module(self, kind: Any, options: dict[str, Any]) -> nn.Module:
        """Return a module of class `kind` that computes what a call of a function does.

        It gets the tensors of the call, None for a missing one, as its parameters and statistics.

        `options`: arguments of the call: name -> value, or for a tensor its name in the model, such
        as "fc.weight".
        """
        tensors = {key: self._tensor(options[key]) for key in _TENSORS if key in options}
        weight = tensors["weight"]
        if kind is ChannelNorm:
            channels = tensors["running_mean"].numel()
            module = kind(channels, options["eps"], options["momentum"], weight is not None)
        else:
            output_channels, input_channels, *kernel_size = weight.shape
            conv_options = {}
            if kind is not nn.Linear:
                input_channels *= options["groups"]
                conv_options = {key: options[key] for key in _CONV_DEFAULTS}
                conv_options["kernel_size"] = kernel_size
            has_bias = tensors["bias"] is not None
            # on the device "meta": these parameters take no memory, and are replaced below
            module = kind(
                input_channels, output_channels, bias=has_bias, device="meta", **conv_options
            )

        for name, tensor in tensors.items():
            if name in STATISTICS:  # a buffer
                setattr(module, name, tensor)
            elif tensor is not None:
                is_parameter = isinstance(tensor, nn.Parameter)
                parameter = tensor if is_parameter else nn.Parameter(tensor)
                module.register_parameter(name, parameter)
        return module.train(self.graph_module.training)

    def delete_moved_tensors(self) -> None:
        """Delete parameters that only the new modules use, which would be stored twice."""
        graph = self.graph_module.graph
        read_tensors = {node.target for node in graph.find_nodes(op="get_attr")}
        called_modules = {node.target for node in graph.find_nodes(op="call_module")}
        moved_tensors: set[str] = set()
        for options in self.options_by_name.values():
            moved_tensors.update(filter(None, map(options.get, _TENSORS)))
        for name in moved_tensors - read_tensors:
            owner, _, attribute = name.rpartition(".")
            if owner not in called_modules:
                delattr(self.graph_module.get_submodule(owner), attribute)


def _is_parameter_or_none(value: object) -> bool:
    return value is None or is_attribute(value)
