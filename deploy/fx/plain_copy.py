"""Make plain copies of models: without wrappers, with computed weights as parameters.

Computed weights are those of parametrizations, weight and spectral norm, and pruning.
"""

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


_WEIGHT_HOOKS = (WeightNorm, SpectralNorm, BasePruningMethod)


def plain_copy(model: nn.Module) -> nn.Module:
    """Return a deep copy without wrappers, each weight a parameter, in the mode of the model.

    Raises:
        ModelError: see `unwrap`; or the model cannot be copied, or has NaN among its weights.
    """
    model = unwrap(model)
    refuse_nan(model)
    # detach weights that hooks compute, as a grad_fn cannot be deep-copied
    hooks = [(module, hook) for module in model.modules() for hook in _weight_hooks(module)]
    names = [(module, _tensor_name(hook)) for module, hook in hooks]
    computed = [(module, name, getattr(module, name)) for module, name in names]
    for module, name, value in computed:
        setattr(module, name, value.detach())
    try:
        own = copy.deepcopy(model)
    except Exception as error:  # a user's module may hold anything
        raise ModelError(
            f"a model must be copied before it is changed, got {type(error).__name__}:"
            f" {first_line(error)}; keep open files, locks and computed tensors out of its modules"
        ) from error
    finally:
        for module, name, value in computed:
            setattr(module, name, value)
    for name, module in list(own.named_modules()):
        if name and unwrap(module, name) is not module:
            replace_submodule(own, name, unwrap(module, name))
    for module in own.modules():
        module._compiled_call_impl = None
        _compute_once(module)
    return own


def unwrap(model: nn.Module, name: str = "the model") -> nn.Module:
    """Return the model inside torch.compile and DataParallel wrappers; it shares the parameters.

    Raises:
        ModelError: the model is TorchScript, or no module.
    """
    while (inner := _wrapped(model)) is not None:
        model = inner
    if not isinstance(model, nn.Module):
        raise ModelError(f"{name} must be a torch.nn.Module, got {_kind_and_hint(model)}")
    if isinstance(model, torch.jit.ScriptModule):
        raise ModelError(
            f"a model must be Python code that can be followed, and {name} is TorchScript; give"
            " the module that it was scripted or traced from"
        )
    return model


def computed_weights(model: nn.Module) -> list[str]:
    """List the tensors that are computed from others in every forward."""
    return [
        f"{name}.{tensor}" if name else tensor
        for name, module in model.named_modules()
        for tensor in _computed_tensors(module)
    ]


def _wrapped(model: Any) -> nn.Module | None:
    if isinstance(model, _PARALLEL):
        return model.module
    # by class name, because importing the compiler takes seconds
    return model._orig_mod if type(model).__name__ == "OptimizedModule" else None


def _computed_tensors(module: nn.Module) -> list[str]:
    parametrized: Any = module.parametrizations if parametrize.is_parametrized(module) else ()
    return [*parametrized, *(_tensor_name(hook) for hook in _weight_hooks(module))]


def _weight_hooks(module: nn.Module) -> list[Any]:
    return [hook for hook in module._forward_pre_hooks.values() if isinstance(hook, _WEIGHT_HOOKS)]


def _tensor_name(hook: Any) -> str:
    name = hook._tensor_name if isinstance(hook, BasePruningMethod) else hook.name
    return str(name)


def _compute_once(module: nn.Module) -> None:
    """Replace each computed weight by a parameter with its present value."""
    for hook in _weight_hooks(module):
        if isinstance(hook, WeightNorm):
            remove_weight_norm(module, hook.name)
        elif isinstance(hook, SpectralNorm):
            remove_spectral_norm(module, hook.name)
        else:
            prune.remove(module, _tensor_name(hook))
    if parametrize.is_parametrized(module):
        # as torch's `remove_parametrizations`, without changing the class that copies share
        computed: Any = module.parametrizations
        computed.eval()  # a spectral norm in train mode updates itself with each access
        values = {tensor: getattr(module, tensor).detach().clone() for tensor in computed}
        trained = {t: any(p.requires_grad for p in computed[t].parameters()) for t in computed}
        del module._modules["parametrizations"]
        module.__class__ = type(module).__bases__[0]
        for tensor, value in values.items():
            module.register_parameter(tensor, nn.Parameter(value, requires_grad=trained[tensor]))


def replace_submodule(model: nn.Module, name: str, new: nn.Module) -> None:
    """Replace the submodule `name` by `new`."""
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, new)


def tensor_of(model: nn.Module, name: object) -> Any:
    """Return the parameter, buffer or other attribute of a module with this qualified name."""
    owner, _, attribute = str(name).rpartition(".")
    return getattr(model.get_submodule(owner), attribute)


_EXPORTED = "give the module that the program was exported from"


def refuse_nan(model: nn.Module) -> None:
    """Raise `ModelError` if a weight or a buffer is NaN: each comparison would pass."""
    for name, value in (*model.named_parameters(), *model.named_buffers()):
        if not value.is_meta and value.is_floating_point() and bool(value.isnan().any()):
            raise ModelError(
                f"weights must be finite, got NaN in '{name}'; the training diverged or the file is"
                " damaged: give a valid checkpoint"
            )


def _kind_and_hint(model: object) -> str:
    kind = type(model).__name__
    return f"{kind}; {_EXPORTED}" if kind == "ExportedProgram" else kind
