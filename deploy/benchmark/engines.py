"""The files that are measured: what opens each, how large it is, how long opening takes."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from deploy.errors import ConfigError
from deploy.openvino import OpenvinoSession
from deploy.reading import read_bytes
from deploy.targets import TARGETS, OnnxRuntime, Target
from deploy.tensors import Session

_LOAD_BUDGET_MS = 200


class Opens(Protocol):
    """A target, or a runtime that is none."""

    def open(self, engine: Path, *, threads: int | None = None) -> Session:
        """A session of an engine's file."""
        ...


def open_timed(path: Path, target: Opens, *, threads: int | None = None) -> tuple[Session, float]:
    """Load an engine; gives the session and the best of up to three load times in ms.

    An engine that loads slowly is loaded once, as a second and third time would cost too much.

    Raises:
        BackendError: the target's runtime cannot load it.
    """
    import onnxruntime  # noqa: F401 (its own start-up is no part of a model's load time)

    taken: list[float] = []
    while len(taken) < 3 and sum(taken) < _LOAD_BUDGET_MS:
        start = time.perf_counter()
        session = target.open(path, threads=threads)
        taken.append((time.perf_counter() - start) * 1e3)
    return session, min(taken)


def model_size(path: Path) -> int:
    """Bytes of an ONNX file and of the external data that it names.

    A file in ONNX Runtime's own format names none.

    Raises:
        ConfigError: the file is not there.
    """
    import onnx
    from onnx.external_data_helper import uses_external_data

    data = read_bytes(path, what="a model", error=ConfigError)
    total = len(data)
    try:
        model = onnx.load_model_from_string(data)
    except Exception:  # protobuf's DecodeError: the session was opened, so this is no ONNX protobuf
        return total
    beside = {
        entry.value
        for tensor in model.graph.initializer
        if uses_external_data(tensor)
        for entry in tensor.external_data
        if entry.key == "location"
    }
    files = (path.parent / name for name in beside)
    return total + sum(int(file.stat().st_size) for file in files if file.is_file())


def labelled(engine: Path, against: Path | None) -> dict[str, Path]:
    """Label -> path, the one compared with first; labels are file names, or paths where alike."""
    if against is None:
        return {engine.name: engine}
    if engine.name != against.name:
        return {against.name: against, engine.name: engine}
    if engine == against:
        raise ConfigError(f"--against needs another model than the engine, got {engine} twice")
    return {str(against): against, str(engine): engine}


def runtime_of(path: Path, targets: Sequence[Target]) -> Target:
    """The target whose engines have this suffix; of any other file ONNX Runtime tells its fault."""
    own = {target.name: target for target in targets}
    for name, kind in TARGETS.items():
        if path.suffix in kind.engines:
            return own[name] if name in own else kind()
    return OnnxRuntime()


def in_both(
    paths: Mapping[str, Path], runtimes: Mapping[str, Opens]
) -> tuple[dict[str, Path], dict[str, Opens]]:
    """One engine in ONNX Runtime and in OpenVINO.

    Raises:
        ConfigError: there is a second engine, or it is no ONNX model.
    """
    (label, path), *others = paths.items()
    if others:
        raise ConfigError(
            f"two runtimes take one engine, got {' and '.join(paths)}; leave --against away, or"
            " --runtime"
        )
    if not isinstance(runtimes[label], OnnxRuntime):
        raise ConfigError(
            f"OpenVINO reads ONNX models, got {path}; name the .onnx file, or leave --runtime away"
        )
    here, there = f"{label} in ONNX Runtime", f"{label} in OpenVINO"
    return {here: path, there: path}, {here: runtimes[label], there: _Openvino()}


class _Openvino:
    """What opens a model there."""

    def open(self, engine: Path, *, threads: int | None = None) -> Session:
        return OpenvinoSession.open(engine, threads=threads)
