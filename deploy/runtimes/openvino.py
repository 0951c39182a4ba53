"""A model loaded in OpenVINO on the CPU, behind the `Session` protocol.

An optional runtime: nothing is built for it, but it reads the Q/DQ files that ONNX Runtime does,
and does not always compute the same.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from deploy.errors import BackendError, SdkMissingError, first_line
from deploy.machine import usable_cores
from deploy.runtimes.ort import source_of
from deploy.tensors import Array, TensorSpec

if TYPE_CHECKING:
    from onnx import ModelProto

_REFUSED = 3  # exit status of the process of `run_apart` that has printed a sentence


class OpenvinoSession:
    """An ONNX model ready to run in OpenVINO; made by `open`."""

    def __init__(self, compiled: Any, *, threads: int) -> None:
        self._compiled = compiled
        self.threads = threads
        self._inputs = [_spec(port) for port in compiled.inputs]
        self._outputs = [_spec(port) for port in compiled.outputs]

    @classmethod
    def open(
        cls,
        model: Path | str | bytes | ModelProto,
        *,
        threads: int | None = None,
        shapes: Mapping[str, Sequence[int]] | None = None,
    ) -> OpenvinoSession:
        """Load a model from a file or from memory.

        Float layers are computed in float32, even where the CPU has bfloat16, so that what differs
        from ONNX Runtime is the int8 arithmetic.

        Args:
            model: path of an ONNX file (with its external data beside it), its bytes, or itself.
            threads: threads of one inference; None takes every core this process may use.
            shapes: input name -> dimensions, to close those that the model leaves open.

        Raises:
            SdkMissingError: OpenVINO is not installed.
            BackendError: OpenVINO cannot load the model; its own words are in the message.
        """
        openvino = _openvino()
        threads = usable_cores() if threads is None else threads
        what = str(model) if isinstance(model, Path | str) else "the model"
        settings = {
            "INFERENCE_NUM_THREADS": threads,
            "INFERENCE_PRECISION_HINT": "f32",
            "PERFORMANCE_HINT": "LATENCY",
        }
        source = source_of(model)
        try:
            core = openvino.Core()
            read = core.read_model(source)
            if shapes:
                read.reshape({name: list(shape) for name, shape in shapes.items()})
            compiled = core.compile_model(read, "CPU", settings)
        except Exception as error:  # its exceptions share no base but RuntimeError
            raise BackendError(
                f"{what} must be a model that OpenVINO {openvino.__version__} can load, got:"
                f" {_sentence(error)}; run it in ONNX Runtime alone"
            ) from error
        return cls(compiled, threads=threads)

    @property
    def inputs(self) -> Sequence[TensorSpec]:
        """Specs of the inputs, in the model's order."""
        return self._inputs

    @property
    def outputs(self) -> Sequence[TensorSpec]:
        """Specs of the outputs, in the model's order."""
        return self._outputs

    def run(self, feed: Mapping[str, Array]) -> dict[str, Array]:
        """One inference: input name -> array in, output name -> array out.

        Raises:
            BackendError: a missing or unknown input, a wrong dtype or shape, a failing operator.
        """
        try:
            values = self._compiled(dict(feed))
        except Exception as error:  # its exceptions share no base but RuntimeError
            raise BackendError(f"OpenVINO could not run the model: {_sentence(error)}") from error
        # copied: the arrays are the request's own memory, which the next run writes to
        return {spec.name: np.array(values[number]) for number, spec in enumerate(self._outputs)}


def run_apart(
    model: ModelProto,
    samples: Sequence[Path],
    folder: Path,
    *,
    threads: int | None = None,
    closed: bool = False,
) -> list[Path]:
    """Run samples in a process of its own, which a crash of the library ends alone.

    Args:
        model: what to run.
        samples: one .npz a sample, of its inputs.
        folder: what is written goes here; files of an earlier run are written over.
        threads: as `OpenvinoSession.open`.
        closed: close what the inputs leave open by the shapes of the first sample.

    Returns:
        One .npz a sample, of the outputs.

    Raises:
        SdkMissingError: OpenVINO is not installed.
        BackendError: OpenVINO refused the model or a sample, or crashed.
    """
    _openvino()
    path = folder / "model.onnx"
    path.write_bytes(model.SerializeToString())
    results = [folder / f"outputs-{number}.npz" for number in range(len(samples))]
    words = [str(path), str(threads or usable_cores()), "closed" if closed else "open"]
    words += [str(file) for pair in zip(samples, results, strict=True) for file in pair]
    paths = [str(Path(__file__).parent.parent), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, "-m", "deploy.runtimes.openvino", *words],
        capture_output=True,
        text=True,
        errors="replace",
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        check=False,
    )
    if done.returncode == _REFUSED:
        raise BackendError(done.stdout.strip())
    if done.returncode:
        raise BackendError(
            "OpenVINO must stay alive while it loads and runs a model, got a process that ended"
            f" with status {done.returncode}"
        )
    return results


def _work(words: Sequence[str]) -> int:
    """The process of `run_apart`: model, threads, shapes, then files of samples and outputs."""
    path, threads, shapes, *files = words
    try:
        own = _shapes(files[0]) if shapes == "closed" else None
        session = OpenvinoSession.open(Path(path), threads=int(threads), shapes=own)
        for sample, result in zip(files[::2], files[1::2], strict=True):
            with np.load(sample, allow_pickle=False) as arrays:
                outputs = session.run({name: arrays[name] for name in arrays.files})
            # by number: a name may hold what a file in an archive must not
            np.savez(result, *[outputs[spec.name] for spec in session.outputs])
    except BackendError as error:
        print(error)
        return _REFUSED
    return 0


def _shapes(sample: str) -> dict[str, tuple[int, ...]]:
    with np.load(sample, allow_pickle=False) as arrays:
        return {name: arrays[name].shape for name in arrays.files}


def _openvino() -> Any:
    try:
        import openvino
    except ImportError as error:
        raise SdkMissingError(
            "the runtime openvino must be installed on this machine, got none;"
            " `pip install 'calib8[openvino]'`, or run the model in ONNX Runtime alone"
        ) from error
    return openvino


def _spec(port: Any) -> TensorSpec:
    """OpenVINO's port -> its name, numpy dtype and dimensions, open ones as None."""
    dims = tuple(
        int(dim.get_length()) if dim.is_static else None for dim in port.get_partial_shape()
    )
    return TensorSpec(
        str(port.get_any_name()), np.dtype(port.get_element_type().to_dtype()).name, dims
    )


def _sentence(error: Exception) -> str:
    """The last line of its message that says something: those before it are places in its code."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return first_line(RuntimeError(lines[-1] if lines else type(error).__name__))


if __name__ == "__main__":
    sys.exit(_work(sys.argv[1:]))
