"""Load a PyTorch model and its weights, and make plain copies of models.

- Models come from the user's code (`file.py:factory`), which is run, or by name from timm,
  torchvision or ultralytics (`timm:resnet18`). Named models have random weights, the same every
  time; nothing is downloaded or unpickled.
- Weights come from a file (`--weights`), through `torch.load(weights_only=True)` or safetensors.
  State dicts are also found inside checkpoints and under a wrapper's prefix.
- A plain copy has computed weights (parametrizations, weight and spectral norm, pruning) as
  parameters.
"""

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
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize, prune, remove_spectral_norm, remove_weight_norm
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from deploy.errors import Calib8Error, ConfigError, ModelError, SdkMissingError, first_line
from deploy.files import usercode
from deploy.files.archives import check_archive
from deploy.files.reading import MAX_BYTES, open_regular_file
from deploy.files.usercode import is_library_model
from deploy.fx.device import fixed_seed

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


# keys under which training scripts store the weights, the more specific ones first
STATE_DICT_KEYS = (
    "state_dict",
    "model_state_dict",
    "model_state",
    "model",
    "module",
    "net",
    "network",
)
_DEPTH = 3  # of nested checkpoints


def find_state_dict(read: Any, path: Path) -> Mapping[str, torch.Tensor]:
    """Find the state dict in a loaded file: the file itself, under a key, or the only one in it.

    Keys of `STATE_DICT_KEYS` come first.

    Raises:
        ModelError: there is none, or several; the message lists the keys.
    """
    if not isinstance(read, dict):
        raise ModelError(
            f"{path} must hold a state dict, got {type(read).__name__}; save model.state_dict()"
        )
    states = list(_states(read))
    if len(states) == 1:
        return states[0][1]
    if states:
        names = " and ".join(repr(name) for name, _ in states[:8])
        raise ModelError(
            f"{path} must hold one state dict, got several under {names}; save only the one to load"
        )
    names = ", ".join(map(repr, list(read)[:8])) or "nothing"
    raise ModelError(
        f"{path} must hold a state dict, itself or under one of"
        f" {', '.join(STATE_DICT_KEYS)}, got {names}; save model.state_dict()"
    )


def _states(
    checkpoint: Mapping[Any, Any], name: str = "", depth: int = _DEPTH
) -> Iterator[tuple[str, Mapping[str, torch.Tensor]]]:
    """Yield (path, state dict) in a checkpoint; if it has a preferred key, only below that."""
    if _is_state(checkpoint):
        yield name, checkpoint
        return
    parts = {key: part for key, part in checkpoint.items() if isinstance(part, dict) and depth}
    preferred = next((key for key in STATE_DICT_KEYS if key in parts), None)
    for key in parts if preferred is None else (preferred,):
        if isinstance(key, str):  # the keys of optimizer states are integers
            yield from _states(parts[key], f"{name}.{key}" if name else key, depth - 1)


def strip_prefix(state: Mapping[str, torch.Tensor], model: nn.Module) -> Mapping[str, torch.Tensor]:
    """Return the state under the model's names, with a common prefix removed.

    DataParallel adds `module.`, torch.compile `_orig_mod.`, a training module the name of its
    attribute, possibly along with other tensors.
    """
    wanted = set(model.state_dict())
    while state and set(state) != wanted:
        first = {name.partition(".")[0] for name in state}
        if len(first) != 1 or not all("." in name for name in state):
            break
        if all(name.partition(".")[0] in first for name in wanted):
            break  # the model's own names have this prefix
        state = {name.partition(".")[2]: value for name, value in state.items()}
    return state if set(state) == wanted else _under_prefix(state, wanted) or state


def _under_prefix(
    state: Mapping[str, torch.Tensor], wanted: set[str]
) -> Mapping[str, torch.Tensor]:
    """Return the entries under the only prefix with exactly the wanted names, else {}.

    Other entries are for example the weights of a loss, or the step count of averaged weights.
    """
    first = min(wanted, default="")
    prefixes = [name.removesuffix(first) for name in state if name.endswith(f".{first}")]
    parts = [
        {name.removeprefix(prefix): state[name] for name in state if name.startswith(prefix)}
        for prefix in prefixes
    ]
    complete = [part for part in parts if set(part) == wanted]
    return complete[0] if len(complete) == 1 and not wanted <= set(state) else {}


def _is_state(value: Mapping[Any, Any]) -> bool:
    """Return whether `value` maps names to tensors; `_extra_state` entries may be anything."""
    if not value or not all(isinstance(name, str) for name in value):
        return False
    tensors = [isinstance(item, torch.Tensor) for item in value.values()]
    return any(tensors) and all(
        tensor or name.endswith("_extra_state") for tensor, name in zip(tensors, value, strict=True)
    )


def create_named_model(spec: str) -> Any:
    """Create the model `package:name` with random weights.

    Raises:
        SdkMissingError: the package is not installed, or cannot be imported.
        ConfigError: a name for ultralytics is not a .yaml file.
        ModelError: the package cannot create it; the message quotes its error.
    """
    package, _, name = spec.partition(":")
    if find_spec(package) is None:
        raise SdkMissingError(
            f"{spec} is a model of {package}, which is not installed:"
            f" pip install {usercode.MODEL_LIBRARIES[package]}"
        )
    try:
        import_module(package)
    except Exception as error:  # a build for another torch version may raise anything
        raise SdkMissingError(
            f"{spec} needs {package}, which is installed and cannot be imported here:"
            f" {type(error).__name__}: {first_line(error)}; install the one made for torch"
            f" {torch.__version__}"
        ) from error
    try:
        with fixed_seed():
            return _MAKERS[package](name)
    except ConfigError:
        raise
    except Exception as error:  # the packages have no common error class
        raise ModelError(
            f"{package} must be able to make {name!r}, got {type(error).__name__}:"
            f" {first_line(error)}; look up the name in its own list of models"
        ) from error


def random_weights_note(spec: object, weights: object) -> str | None:
    """Return a note if a named model has random weights, else None."""
    if not usercode.is_library_model(spec) or weights is not None:
        return None
    return (
        f"the weights of {spec} are random: its structure and speed are real, its outputs mean"
        " nothing; --weights FILE loads trained weights"
    )


def _torchvision(name: str) -> Any:
    builder = import_module("torchvision.models").get_model_builder(name)
    # None for each, because a detector would download the weights of its backbone
    options = set(inspect.signature(builder).parameters) & {"weights", "weights_backbone"}
    return builder(**dict.fromkeys(options))


def _ultralytics(name: str) -> Any:
    if not name.endswith((".yaml", ".yml")):
        raise ConfigError(
            f"a model of ultralytics is named by its .yaml file, such as ultralytics:yolov8n.yaml,"
            f" got {name!r}; a .pt file holds pickled code, which is not run here"
        )
    return import_module("ultralytics").YOLO(name).model


_MAKERS: dict[str, Callable[[str], Any]] = {
    "timm": lambda name: import_module("timm").create_model(name, pretrained=False),
    "torchvision": _torchvision,
    "ultralytics": _ultralytics,
}

_EXPORTED = "give the module that the program was exported from"
_PICKLED_CLASS = re.compile(r"(?:GLOBAL|class|type) ([A-Za-z_][\w]*\.[\w.]*\w)")


def load_factory(spec: str) -> Callable[[], Any]:
    """Return the function `make` for the spec `path/to/net.py:make`.

    Raises:
        ConfigError: the spec is not `file.py:name`, or there is no such file or name.
        ModelError: importing the file failed; the message gives the user's file and line.
    """
    return usercode.load_function(  # type: ignore[no-any-return]
        spec, what="a model in PyTorch", form="file.py:factory", error=ModelError
    )


def call_factory(spec: str) -> Any:
    """Call the factory of `spec` without arguments and return its result.

    Raises:
        ConfigError, ModelError: as `load_factory`, or the factory itself failed.
    """
    factory = load_factory(spec)
    with wrap_user_errors(spec):
        return factory()


def load_module(spec: str, weights: Path | None = None) -> nn.Module:
    """Load the model of `spec` in eval mode, with `weights` if given.

    `spec`: `file.py:factory`, or a name such as timm:resnet18.

    Raises:
        ConfigError, ModelError: as `load_factory`; or the result is not a module or is TorchScript,
            or the weights do not fit.
        SdkMissingError: the package of a named model, or safetensors, is not installed.
    """
    model = create_named_model(spec) if is_library_model(spec) else call_factory(spec)
    if not isinstance(model, nn.Module):
        raise ModelError(f"{spec} must return a torch.nn.Module, got {_kind_and_hint(model)}")
    model = unwrap(model)
    if weights is not None:
        load_weights(model, weights)
    refuse_nan(model)
    try:
        return model.eval()
    except NotImplementedError as error:
        raise ModelError(f"{spec} must return a module with an eval mode; {_EXPORTED}") from error


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


def load_weights(model: nn.Module, path: Path) -> None:
    """Load a state dict, or a checkpoint that holds one, into `model`, strictly.

    Raises:
        ModelError: the file has more than plain tensors, or names or shapes differ.
        SdkMissingError: safetensors is needed and not installed.
    """
    read = read_safetensors if path.suffix == ".safetensors" else read_tensors
    state = strip_prefix(find_state_dict(read(path), path), model)
    try:
        model.load_state_dict(state)
    except (RuntimeError, TypeError, AttributeError) as error:
        text = " ".join(str(error).split())
        raise ModelError(f"{path} must hold this model's weights: {text[:400]}") from error


def read_tensors(path: Path) -> Any:
    """Load a file of `torch.save` that has only tensors and plain containers, a run's own.

    Raises:
        ModelError: the file is missing, broken, or would run code when unpickled.
    """
    try:
        what = "a file of tensors"
        with open_regular_file(
            path, what=what, error=ModelError, max_bytes=MAX_BYTES, rewritable=True
        ) as file:
            if file.read(2) == b"PK":  # files of old torch versions are not zip archives
                check_archive(file, path, what=what, error=ModelError, max_bytes=MAX_BYTES)
            file.seek(0)
            with warnings.catch_warnings(action="ignore"):  # on TorchScript, reported below
                return torch.load(file, map_location="cpu", weights_only=True)
    except Calib8Error:
        raise
    except Exception as error:  # torch raises several classes for a broken or unsafe file
        raise ModelError(
            f"{path} must be a file of tensors that torch.load(weights_only=True) accepts,"
            f" got {_describe(error)}; save model.state_dict()"
        ) from error


def read_safetensors(path: Path) -> dict[str, torch.Tensor]:
    """Load a safetensors file; return name -> tensor.

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
    with open_regular_file(path, what=what, error=ModelError, max_bytes=MAX_BYTES):
        try:
            tensors: dict[str, torch.Tensor] = load_file(path)
            return tensors
        except Exception as error:  # SafetensorError, or torch's for an unknown dtype
            text = " ".join(str(error).split())[:200]
            raise ModelError(f"{path} must be {what}, got: {text}; save it again") from error


def _describe(error: Exception) -> str:
    """Summarize torch's message, which mostly explains the options of torch.load."""
    text = str(error)
    if "TorchScript" in text:
        return "TorchScript, which torch.jit.load reads"
    if match := _PICKLED_CLASS.search(text):
        return f"an object of {match[1]}, which only unpickling could make"
    first = (text.strip().splitlines() or [""])[0]
    if isinstance(error, pickle.UnpicklingError | KeyError):
        return "what torch.save did not write"
    return f"{type(error).__name__}: {first[:200]}"


def user_code_line(error: BaseException) -> str:
    """Return `file:line: code` of the deepest frame outside torch and this package, or ''."""
    return usercode.find_user_line(error, besides=(str(Path(torch.__file__).parent),))


def wrap_user_errors(what: str) -> AbstractContextManager[None]:
    """Turn any exception of the user's code into a `ModelError` with its file and line."""
    return usercode.wrap_user_errors(what, error=ModelError, where=user_code_line)
