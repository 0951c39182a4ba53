"""A copy of a user's model that is made of plain layers, to be changed without the user's knowing.

Taken off, since the model under them computes the same: torch.compile and DataParallel. Computed
once, since a layer's weight is then a parameter like any other: weights that a parametrization
(`torch.nn.utils.parametrizations`), a weight or spectral norm or a pruning makes of others.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize, prune, remove_spectral_norm, remove_weight_norm
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from deploy.errors import ModelError, first_line

_PARALLEL = (nn.DataParallel, nn.parallel.DistributedDataParallel)
_MAKERS = (WeightNorm, SpectralNorm, BasePruningMethod)


def plain_copy(model: nn.Module) -> nn.Module:
    """A deep copy without wrappers, each weight a parameter; in the mode of the model.

    Raises:
        ModelError: TorchScript, in which there is no Python left to follow; or no copy can be made.
    """
    model = unwrapped(model)
    _settle(model)
    try:
        own = copy.deepcopy(model)
    except Exception as error:  # whatever a module of the user's holds
        raise ModelError(
            f"a model must be copied before it is changed, got {type(error).__name__}:"
            f" {first_line(error)}; keep open files, locks and computed tensors out of its modules"
        ) from error
    for name, module in list(own.named_modules()):
        if name and unwrapped(module, name) is not module:
            _put(own, name, unwrapped(module, name))
    for module in own.modules():
        module._compiled_call_impl = None
        _compute_once(module)
    return own


def unwrapped(model: nn.Module, name: str = "the model") -> nn.Module:
    """The model under torch.compile and DataParallel, of the same parameters.

    Raises:
        ModelError: it is TorchScript.
    """
    while (inner := _inside(model)) is not None:
        model = inner
    if isinstance(model, torch.jit.ScriptModule):
        raise ModelError(
            f"a model must be Python code that can be followed, and {name} is TorchScript; give"
            " the module that it was scripted or traced from"
        )
    return model


def computed_weights(model: nn.Module) -> list[str]:
    """Names of the tensors that are computed from others in every forward."""
    return [
        f"{name}.{tensor}" if name else tensor
        for name, module in model.named_modules()
        for tensor in _made(module)
    ]


def _inside(model: Any) -> nn.Module | None:
    if isinstance(model, _PARALLEL):
        return model.module
    # by its name: to import the compiler takes seconds
    return model._orig_mod if type(model).__name__ == "OptimizedModule" else None


def _made(module: nn.Module) -> list[str]:
    parametrized: Any = module.parametrizations if parametrize.is_parametrized(module) else ()
    return [*parametrized, *(_tensor(hook) for hook in _makers(module))]


def _makers(module: nn.Module) -> list[Any]:
    return [hook for hook in module._forward_pre_hooks.values() if isinstance(hook, _MAKERS)]


def _tensor(hook: Any) -> str:
    name = hook._tensor_name if isinstance(hook, BasePruningMethod) else hook.name
    return str(name)


def _settle(model: nn.Module) -> None:
    """Let older norms and prunings hold a weight without a history, which alone can be copied."""
    for module in model.modules():
        for hook in _makers(module):
            with torch.no_grad():
                value = getattr(module, _tensor(hook))
                setattr(module, _tensor(hook), value.detach())


def _compute_once(module: nn.Module) -> None:
    """Make each weight that is computed a parameter of its present value."""
    for hook in _makers(module):
        if isinstance(hook, WeightNorm):
            remove_weight_norm(module, hook.name)
        elif isinstance(hook, SpectralNorm):
            remove_spectral_norm(module, hook.name)
        else:
            prune.remove(module, _tensor(hook))
    if parametrize.is_parametrized(module):
        _unparametrize(module)


def _unparametrize(module: nn.Module) -> None:
    """What torch's `remove_parametrizations` does, but for the class, which copies share."""
    made: Any = module.parametrizations
    made.eval()  # a spectral norm in train mode takes a step each time that it is asked
    values = {tensor: getattr(module, tensor).detach().clone() for tensor in made}
    trained = {tensor: any(p.requires_grad for p in made[tensor].parameters()) for tensor in made}
    del module._modules["parametrizations"]
    module.__class__ = type(module).__bases__[0]
    for tensor, value in values.items():
        module.register_parameter(tensor, nn.Parameter(value, requires_grad=trained[tensor]))


def _put(model: nn.Module, name: str, new: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, new)
