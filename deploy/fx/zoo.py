"""Models by name from the packages that people take them from: `timm:resnet18`.

Weights are random, the same every time; nothing is downloaded and nothing unpickled. What they were
trained to comes from a file that is named (`--weights`).
"""

from __future__ import annotations

import inspect
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

from deploy.errors import ConfigError, ModelError, SdkMissingError, first_line
from deploy.files import usercode
from deploy.fx.randomness import seeded


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
