"""Load a PyTorch model from the user's code or from a library.

- `file.py:factory` is the user's code, which is run.
- `timm:resnet18`, or a name of torchvision or ultralytics, has random weights, the same every time;
  nothing is downloaded or unpickled.
- `ultralytics:net.yaml` is run too if the file is not the package's own: ultralytics evaluates it.
"""

import inspect
import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn

from deploy.errors import ConfigError, ModelError, SdkMissingError, first_line
from deploy.files import usercode
from deploy.files.usercode import is_library_model, refuse_foreign_code
from deploy.fx.device import fixed_seed
from deploy.fx.plain_copy import GIVE_EXPORTED_MODULE, kind_and_remedy, refuse_nan, unwrap
from deploy.fx.weights import load_weights


def create_named_model(spec: str) -> Any:
    """Create the model `package:name` with random weights.

    Raises:
        SdkMissingError: the package is not installed, or cannot be imported.
        ConfigError: no name, such as a path, or for ultralytics no .yaml file.
        ModelError: the package cannot create it; the message quotes its error.
    """
    package, _, name = spec.partition(":")
    if package != "ultralytics" and not _MODEL_NAME.fullmatch(name):
        raise ConfigError(
            f"a model of {package} is given by its name there, such as {package}:resnet18, got"
            f" {name!r}; paths and hubs are not read"
        )
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
    package = import_module("ultralytics")
    package_file = _find_ultralytics_file(Path(package.__file__ or "").parent, name)
    if package_file is None:
        refuse_foreign_code(f"ultralytics:{name}")
    return package.YOLO(str(package_file or name)).model


def _find_ultralytics_file(package: Path, name: str) -> Path | None:
    """Return the path of the package's own file for a name; None if it has none.

    A name such as yolov8n.yaml means yolov8.yaml at size n: ultralytics reads both from the path.
    """
    if not _MODEL_NAME.fullmatch(name):
        return None
    family = re.sub(r"(\d+)[nslmx]", r"\1", name, count=1)
    for path in sorted(package.glob("cfg/models/**/*.y*ml")):
        if path.name in (name, family):
            return path.with_name(name)
    return None


_MODEL_NAME = re.compile(r"[\w.-]+")  # of a model or file in a library, never a path

_MAKERS: dict[str, Callable[[str], Any]] = {
    "timm": lambda name: import_module("timm").create_model(name, pretrained=False),
    "torchvision": _torchvision,
    "ultralytics": _ultralytics,
}


def call_factory(spec: str) -> Any:
    """Call the function of the spec `path/to/net.py:make` without arguments; return its result.

    Raises:
        ConfigError: the spec is not `file.py:name`, or there is no such file or name.
        ModelError: importing the file or the call failed; the message gives the user's file and
            line.
    """
    factory = usercode.load_function(
        spec, what="a model in PyTorch", form="file.py:factory", error=ModelError
    )
    with wrap_user_errors(spec):
        return factory()


def load_module(spec: str, weights: Path | None = None) -> nn.Module:
    """Load the model of `spec` in eval mode, with `weights` if given.

    `spec`: `file.py:factory`, or a name such as timm:resnet18.

    Raises:
        ConfigError, ModelError: as `call_factory`; or the result is not a module or is TorchScript,
            or the weights do not fit.
        SdkMissingError: the package of a named model, or safetensors, is not installed.
    """
    model = create_named_model(spec) if is_library_model(spec) else call_factory(spec)
    if not isinstance(model, nn.Module):
        raise ModelError(f"{spec} must return a torch.nn.Module, got {kind_and_remedy(model)}")
    model = unwrap(model)
    if weights is not None:
        load_weights(model, weights)
    refuse_nan(model)
    try:
        return model.eval()
    except NotImplementedError as error:  # of ExportedProgram.module()
        raise ModelError(
            f"{spec} must return a module with an eval mode; {GIVE_EXPORTED_MODULE}"
        ) from error


def user_code_line(error: BaseException) -> str:
    """Return `file:line: code` of the deepest frame outside torch and this package, or ''."""
    return usercode.find_user_line(error, library_folders=(str(Path(torch.__file__).parent),))


def wrap_user_errors(what: str) -> AbstractContextManager[None]:
    """Turn any exception of the user's code into a `ModelError` with its file and line."""
    return usercode.wrap_user_errors(what, error=ModelError, find_line=user_code_line)
