"""`file.py:factory` -> `nn.Module`: the user's own code is run, and nothing is unpickled.

Weights come from a file only where one is named, through `torch.load(weights_only=True)` or the
package safetensors.

A copy of a user's model that is made of plain layers, to be changed without the user's knowing.

Taken off, since the model under them computes the same: torch.compile and DataParallel. Computed
once, since a layer's weight is then a parameter like any other: weights that a parametrization
(`torch.nn.utils.parametrizations`), a weight or spectral norm or a pruning makes of others.

State dicts as people keep them: inside a checkpoint, under a wrapper's prefix.

Models by name from the packages that people take them from: `timm:resnet18`.

Weights are random, the same every time; nothing is downloaded and nothing unpickled. What they were
trained to comes from a file that is named (`--weights`).
"""

from __future__ import annotations

import copy
import inspect
import pickle
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any

import torch
from torch import nn
from torch.nn.utils import parametrize, prune, remove_spectral_norm, remove_weight_norm
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from deploy.errors import Calib8Error, ConfigError, ModelError, SdkMissingError, first_line
from deploy.files import usercode
from deploy.files.reading import MOST_BYTES, check_archive, opened
from deploy.files.usercode import is_named
from deploy.fx.device import seeded

_PARALLEL = (nn.DataParallel, nn.parallel.DistributedDataParallel)
_TENSOR_MAKERS = (WeightNorm, SpectralNorm, BasePruningMethod)


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
    return [hook for hook in module._forward_pre_hooks.values() if isinstance(hook, _TENSOR_MAKERS)]


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


# where training scripts put the weights, the more telling name first
KEYS = ("state_dict", "model_state_dict", "model_state", "model", "module", "net", "network")
_DEPTH = 3  # of checkpoints within each other


def found_state(read: Any, path: Path) -> Mapping[str, torch.Tensor]:
    """The state dict in what `torch.load` gave: itself, under one of `KEYS`, or the only one in it.

    Raises:
        ModelError: there is none, or several; the message lists what there is.
    """
    if not isinstance(read, dict):
        raise ModelError(
            f"{path} must hold a state dict, got {type(read).__name__}; save model.state_dict()"
        )
    found = list(_states(read))
    if len(found) == 1:
        return found[0][1]
    if found:
        names = " and ".join(repr(name) for name, _ in found[:8])
        raise ModelError(
            f"{path} must hold one state dict, got several under {names}; save the one that is"
            " meant by itself"
        )
    names = ", ".join(map(repr, list(read)[:8])) or "nothing"
    raise ModelError(
        f"{path} must hold a state dict, itself or under one of {', '.join(KEYS)}, got {names};"
        " save model.state_dict()"
    )


def _states(
    inside: Mapping[Any, Any], name: str = "", depth: int = _DEPTH
) -> Iterator[tuple[str, Mapping[str, torch.Tensor]]]:
    """The state dicts in a checkpoint by where they lie; that under one of `KEYS` before others."""
    if _is_state(inside):
        yield name, inside
        return
    parts = {key: part for key, part in inside.items() if isinstance(part, dict) and depth}
    known = next((key for key in KEYS if key in parts), None)
    for key in parts if known is None else (known,):
        if isinstance(key, str):  # an optimizer's states have numbers
            yield from _states(parts[key], f"{name}.{key}" if name else key, depth - 1)


def fitted(state: Mapping[str, torch.Tensor], model: nn.Module) -> Mapping[str, torch.Tensor]:
    """The state under the model's own names, where a prefix of all of them is what differs.

    DataParallel writes `module.`, torch.compile `_orig_mod.`, a training loop the name of its own
    attribute, beside which it may have other tensors.
    """
    wanted = set(model.state_dict())
    while state and set(state) != wanted:
        first = {name.partition(".")[0] for name in state}
        if len(first) != 1 or not all("." in name for name in state):
            break
        if all(name.partition(".")[0] in first for name in wanted):
            break  # the model's own names begin so
        state = {name.partition(".")[2]: value for name, value in state.items()}
    return state if set(state) == wanted else _part(state, wanted) or state


def _part(state: Mapping[str, torch.Tensor], wanted: set[str]) -> Mapping[str, torch.Tensor]:
    """What stands under the one prefix with all of the names and no other, beside something else.

    So a training module keeps its loss's weights, and an average of weights the number of steps.
    """
    first = min(wanted, default="")
    prefixes = [name.removesuffix(first) for name in state if name.endswith(f".{first}")]
    parts = [
        {name.removeprefix(prefix): state[name] for name in state if name.startswith(prefix)}
        for prefix in prefixes
    ]
    whole = [part for part in parts if set(part) == wanted]
    return whole[0] if len(whole) == 1 and not wanted <= set(state) else {}


def _is_state(value: Mapping[Any, Any]) -> bool:
    """Whether it maps names to tensors; a module may add a value of its own (`_extra_state`)."""
    if not value or not all(isinstance(name, str) for name in value):
        return False
    tensors = [isinstance(item, torch.Tensor) for item in value.values()]
    return any(tensors) and all(
        tensor or name.endswith("_extra_state") for tensor, name in zip(tensors, value, strict=True)
    )


def make_named(spec: str) -> Any:
    """The model of `package:name`, with random weights.

    Raises:
        SdkMissingError: the package is not installed, or cannot be imported here.
        ConfigError: a name of ultralytics that is no .yaml.
        ModelError: the package cannot make it; its own words are in the message.
    """
    package, _, name = spec.partition(":")
    _check_package(package, spec)
    try:
        with seeded():
            return _MAKERS[package](name)
    except ConfigError:
        raise
    except Exception as error:  # a package's own errors share no class
        raise ModelError(
            f"{package} must be able to make {name!r}, got {type(error).__name__}:"
            f" {first_line(error)}; look up the name in its own list of models"
        ) from error


def note(spec: object, weights: object) -> str | None:
    """A sentence where a named model keeps its random weights."""
    if not usercode.is_named(spec) or weights is not None:
        return None
    return (
        f"the weights of {spec} are random: its form and its time are its own, what it computes"
        " means nothing; --weights FILE loads trained ones"
    )


def _check_package(package: str, spec: str) -> None:
    if find_spec(package) is None:
        raise SdkMissingError(
            f"{spec} is a model of {package}, which is not installed:"
            f" pip install {usercode.MODEL_LIBRARIES[package]}"
        )
    try:
        import_module(package)
    except Exception as error:  # one that was built for another torch raises anything
        raise SdkMissingError(
            f"{spec} needs {package}, which is installed and cannot be imported here:"
            f" {type(error).__name__}: {first_line(error)}; install the one made for torch"
            f" {torch.__version__}"
        ) from error


def _timm(name: str) -> Any:
    return import_module("timm").create_model(name, pretrained=False)


def _torchvision(name: str) -> Any:
    models = import_module("torchvision.models")
    builder = models.get_model_builder(name)
    # a detector would fetch the weights of its backbone
    named = set(inspect.signature(builder).parameters) & {"weights", "weights_backbone"}
    return builder(**dict.fromkeys(named))


def _ultralytics(name: str) -> Any:
    if not name.endswith((".yaml", ".yml")):
        raise ConfigError(
            f"a model of ultralytics is named by its form, such as ultralytics:yolov8n.yaml, got"
            f" {name!r}; a .pt file holds pickled code, which is not run here"
        )
    return import_module("ultralytics").YOLO(name).model


_MAKERS = {"timm": _timm, "torchvision": _torchvision, "ultralytics": _ultralytics}

_EXPORTED = "give the module that the program was exported from"
_HELD = re.compile(r"(?:GLOBAL|class|type) ([A-Za-z_][\w]*\.[\w.]*\w)")


def load_factory(spec: str) -> Callable[[], Any]:
    """`path/to/net.py:make` -> the function `make` of that file.

    Raises:
        ConfigError: the spec is not `file.py:name`, or there is no such file or name.
        ModelError: importing the file failed; the message gives the user's file and line.
    """
    return usercode.load_function(  # type: ignore[no-any-return]
        spec, what="a model in PyTorch", form="file.py:factory", error=ModelError
    )


def call_factory(spec: str) -> Any:
    """What the factory of `spec` gives, called with no argument.

    Raises:
        ConfigError, ModelError: as `load_factory`, or the factory itself failed.
    """
    factory = load_factory(spec)
    with users_errors(spec):
        return factory()


def load_module(spec: str, weights: Path | None = None) -> nn.Module:
    """The model that `spec` makes, in eval mode, with `weights` loaded where given.

    Args:
        spec: `file.py:factory`, or a name such as timm:resnet18 (`deploy.fx.source`).
        weights: file of a state dict.

    Raises:
        ConfigError, ModelError: as `load_factory`; or not a module, TorchScript, or weights that do
            not fit.
        SdkMissingError: the package of a named model, or safetensors, is not installed.
    """
    model = make_named(spec) if is_named(spec) else call_factory(spec)
    if not isinstance(model, nn.Module):
        kind = type(model).__name__
        way = f"; {_EXPORTED}" if kind == "ExportedProgram" else ""
        raise ModelError(f"{spec} must return a torch.nn.Module, got {kind}{way}")
    model = unwrapped(model)
    if weights is not None:
        load_weights(model, weights)
    try:
        return model.eval()
    except NotImplementedError as error:
        raise ModelError(f"{spec} must return a module with an eval mode; {_EXPORTED}") from error


def load_weights(model: nn.Module, path: Path) -> None:
    """Load a state dict, or a checkpoint that holds one, into `model`, strictly.

    Raises:
        ModelError: not a file of plain tensors, or names or shapes that are not the model's.
        SdkMissingError: a file of safetensors, without the package.
    """
    read = read_safetensors if path.suffix == ".safetensors" else read_tensors
    state = fitted(found_state(read(path), path), model)
    try:
        model.load_state_dict(state)
    except (RuntimeError, TypeError, AttributeError) as error:
        said = " ".join(str(error).split())
        raise ModelError(f"{path} must hold this model's weights: {said[:400]}") from error


def read_tensors(path: Path, *, own: bool = False) -> Any:
    """What `torch.save` wrote, if it is tensors and plain containers only.

    Args:
        path: of the file.
        own: it is a checkpoint that the run writes again.

    Raises:
        ModelError: the file is missing, broken, or would run code when unpickled.
    """
    try:
        with opened(
            path, what="a file of tensors", error=ModelError, most=MOST_BYTES, own=own
        ) as file:
            _refuse_bomb(file, path)
            with warnings.catch_warnings(action="ignore"):  # of TorchScript, which is told below
                return torch.load(file, map_location="cpu", weights_only=True)
    except Calib8Error:
        raise
    except Exception as error:  # torch raises half a dozen kinds for a broken or unsafe file
        raise ModelError(
            f"{path} must be a file of tensors that torch.load(weights_only=True) accepts,"
            f" got {_told(error)}; save model.state_dict()"
        ) from error


def read_safetensors(path: Path) -> dict[str, torch.Tensor]:
    """Tensors by name, of a file that holds nothing else.

    Raises:
        ModelError: the file is missing or broken.
        SdkMissingError: the package is not installed.
    """
    try:
        from safetensors.torch import load_file
    except ImportError as error:
        raise SdkMissingError(
            f"{path} needs the package safetensors, which is not installed: pip install safetensors"
        ) from error
    what = "a file of safetensors"
    with opened(path, what=what, error=ModelError, most=MOST_BYTES):
        try:
            found: dict[str, torch.Tensor] = load_file(path)
            return found
        except Exception as error:  # its own error, and whatever torch says of a type
            said = " ".join(str(error).split())[:200]
            raise ModelError(f"{path} must be {what}, got: {said}; save it again") from error


def _told(error: Exception) -> str:
    """What torch's message comes down to; it is about its own options."""
    said = str(error)
    if "TorchScript" in said:
        return "TorchScript, which torch.jit.load reads"
    if held := _HELD.search(said):
        return f"an object of {held[1]}, which only unpickling could make"
    first = (said.strip().splitlines() or [""])[0]
    if isinstance(error, pickle.UnpicklingError | KeyError):
        return "what torch.save did not write"
    return f"{type(error).__name__}: {first[:200]}"


def _refuse_bomb(file: IO[bytes], path: Path) -> None:
    """Refuse an archive that unpacks to more than a file of tensors has; older ones are none."""
    if file.read(2) == b"PK":
        check_archive(file, path, what="a file of tensors", error=ModelError, most=MOST_BYTES)
    file.seek(0)


def users_line(error: BaseException) -> str:
    """`file:line: the code there` of the deepest frame outside torch and this package, or ''."""
    return usercode.users_line(error, besides=(str(Path(torch.__file__).parent),))


def users_errors(what: str) -> AbstractContextManager[None]:
    """Turn any exception of the user's code into one `ModelError` with its file and line."""
    return usercode.users_errors(what, error=ModelError, where=users_line)
