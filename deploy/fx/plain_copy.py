"""Make plain copies of models: without wrappers, with computed weights as parameters.

Computed weights are those of parametrizations, weight and spectral norm, and pruning.
"""

import copy
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize, prune, remove_spectral_norm, remove_weight_norm
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from deploy.errors import ModelError, first_line

_PARALLEL_WRAPPERS = (nn.DataParallel, nn.parallel.DistributedDataParallel)


_WEIGHT_HOOKS = (WeightNorm, SpectralNorm, BasePruningMethod)


def plain_copy(model: nn.Module) -> nn.Module:
    """Return a deep copy without wrappers, in which every weight is a parameter.

    Wrappers are those of DataParallel and torch.compile. A weight is no parameter if it is computed
    in every forward, such as by weight norm; its present value becomes one. Each module stays in
    its mode, train or eval.

    Raises:
        ModelError: see `unwrap`; or the model cannot be copied, has NaN among its weights, or a
            part with a name that torch.fx needs.
    """
    model = unwrap(model)
    refuse_reserved_names(model)
    refuse_nan(model)
    # id of a weight that a hook computes -> its copy: torch itself copies no computed tensor
    copied_weights: dict[int, Any] = {}
    for module in model.modules():
        for name in map(_computed_name, _weight_hooks(module)):
            weight = getattr(module, name)
            copied_weights[id(weight)] = weight.detach().clone()
    model_copy = deep_copy(model, copied_weights)

    for name, module in list(model_copy.named_modules()):
        inner_module = unwrap(module, name)
        if inner_module is not module:  # not the model itself, which is unwrapped already
            replace_submodule(model_copy, name, inner_module)
    for module in model_copy.modules():
        module._compiled_call_impl = None  # undo module.compile(), a wrapper without its own class
        _fix_computed_weights(module)
    return model_copy


def deep_copy(model: nn.Module, memo: dict[int, Any] | None = None) -> nn.Module:
    """Return a deep copy of a model as it is.

    `memo`: as of `copy.deepcopy`: id of an object in the model -> what is in its place in the copy.

    Raises:
        ModelError: one of its modules holds something that cannot be copied.
    """
    try:
        return copy.deepcopy(model, memo)
    except Exception as error:  # a user's module may hold anything
        raise ModelError(
            f"a model must be copied before it is changed, got {type(error).__name__}:"
            f" {first_line(error)}; keep open files, locks and computed tensors out of its modules"
        ) from error


def unwrap(model: nn.Module, name: str = "the model") -> nn.Module:
    """Return the model inside torch.compile and DataParallel wrappers; it shares the parameters.

    Raises:
        ModelError: the model is TorchScript, or no module.
    """
    while (inner_model := _wrapped_model(model)) is not None:
        model = inner_model
    if not isinstance(model, nn.Module):
        raise ModelError(f"{name} must be a torch.nn.Module, got {kind_and_remedy(model)}")
    if isinstance(model, torch.jit.ScriptModule):
        raise ModelError(
            f"a model must be Python code that can be followed, and {name} is TorchScript; give"
            " the module that it was scripted or traced from"
        )
    return model


def computed_weights(model: nn.Module) -> list[str]:
    """List the tensors that are computed from others in every forward."""
    names = []
    for name, module in model.named_modules():
        prefix = f"{name}." if name else ""
        tensors = list(map(_computed_name, _weight_hooks(module)))
        if parametrize.is_parametrized(module):
            parametrizations: Any = module.parametrizations
            tensors = [*parametrizations, *tensors]
        names += [prefix + tensor for tensor in tensors]
    return names


def _wrapped_model(model: Any) -> nn.Module | None:
    """Return the model inside a wrapper; None if the model is no wrapper."""
    if isinstance(model, _PARALLEL_WRAPPERS):
        return model.module
    # by class name, because importing the compiler takes seconds
    if type(model).__name__ == "OptimizedModule":
        compiled: nn.Module = model._orig_mod
        return compiled
    return None


def _weight_hooks(module: nn.Module) -> list[Any]:
    return [hook for hook in module._forward_pre_hooks.values() if isinstance(hook, _WEIGHT_HOOKS)]


def _computed_name(hook: Any) -> str:
    """Return the name of the weight that a hook computes."""
    if isinstance(hook, BasePruningMethod):
        return str(hook._tensor_name)
    return str(hook.name)


def _fix_computed_weights(module: nn.Module) -> None:
    """Replace each computed weight by a parameter with its present value, in place."""
    for hook in _weight_hooks(module):
        if isinstance(hook, WeightNorm):
            remove_weight_norm(module, hook.name)
        elif isinstance(hook, SpectralNorm):
            remove_spectral_norm(module, hook.name)
        else:
            prune.remove(module, _computed_name(hook))
    if parametrize.is_parametrized(module):
        _remove_parametrizations(module)


def _remove_parametrizations(module: nn.Module) -> None:
    """Make each parametrized tensor of a module a parameter with its present value, in place.

    Unlike torch's `remove_parametrizations`, this does not change the class, which copies share.
    """
    parametrizations: Any = module.parametrizations
    parametrizations.eval()  # a spectral norm in train mode updates itself with each access
    parameters: dict[str, nn.Parameter] = {}
    for name, parametrization in parametrizations.items():
        value = getattr(module, name).detach().clone()
        is_trained = any(parameter.requires_grad for parameter in parametrization.parameters())
        parameters[name] = nn.Parameter(value, requires_grad=is_trained)
    del module._modules["parametrizations"]
    module.__class__ = type(module).__bases__[0]  # torch had given the module a class of its own
    for name, parameter in parameters.items():
        module.register_parameter(name, parameter)


def replace_submodule(model: nn.Module, name: str, replacement: nn.Module) -> None:
    """Replace the submodule `name`."""
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, replacement)


def tensor_of(model: nn.Module, name: object) -> Any:
    """Return the parameter, buffer or other attribute of a module with this qualified name."""
    owner, _, attribute = str(name).rpartition(".")
    return getattr(model.get_submodule(owner), attribute)


GIVE_EXPORTED_MODULE = "give the module that the program was exported from"


def refuse_reserved_names(model: nn.Module) -> None:
    """Raise `ModelError` if the model has a part named as `fx.GraphModule` needs."""
    for name in ("code", "graph", "meta"):
        if isinstance(getattr(model, name, None), nn.Module | torch.Tensor):
            raise ModelError(
                "torch.fx needs the names code, graph and meta for itself, got a model with a"
                f" part '{name}'; rename self.{name}, and its weights in the state dict"
            )


def refuse_nan(model: nn.Module) -> None:
    """Raise `ModelError` if a tensor is NaN, as each comparison would pass, or not yet made."""
    for name, value in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(value):
            raise ModelError(
                f"weights must have values, and '{name}' of a lazy module has none before its first"
                " run; run the model once"
            )
        if not value.is_meta and value.is_floating_point() and bool(value.isnan().any()):
            raise ModelError(
                f"weights must be finite, got NaN in '{name}'; the training diverged or the file is"
                " damaged: give a valid checkpoint"
            )


def kind_and_remedy(model: object) -> str:
    """Return the class of what should be a module, with a remedy for an exported program."""
    kind = type(model).__name__
    if kind == "ExportedProgram":
        kind += f"; {GIVE_EXPORTED_MODULE}"
    return kind
