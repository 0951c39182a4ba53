"""The builder's order of things, with a TensorRT of which only the calls are there."""

from __future__ import annotations

import ctypes
import enum
import hashlib
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from shutil import which
from typing import Any

import numpy as np
import pytest

from calibrators.errors import CalibrationError
from calibrators.tensorrt import Callbacks, HostMemory
from deploy.errors import BackendError
from deploy.targets.tensorrt import builder as builder_module
from deploy.targets.tensorrt import sdk
from deploy.targets.tensorrt.builder import Profile, Settings, build_engine
from deploy.targets.tensorrt.sdk import listening, process_logger

CACHE = b"TRT-8503-EntropyCalibration2\nx: 3c008912\n"


class Severity(enum.IntEnum):
    INTERNAL_ERROR, ERROR, WARNING, INFO, VERBOSE = range(5)


class BuilderFlag(enum.IntEnum):
    FP16, INT8, TF32, OBEY_PRECISION_CONSTRAINTS = range(4)


class TacticSource(enum.IntEnum):
    CUBLAS, CUBLAS_LT, CUDNN, EDGE_MASK_CONVOLUTIONS = range(4)


class Config:
    """As TensorRT makes it: TF32 allowed, every source of tactics in use."""

    def __init__(self) -> None:
        self.flags = {BuilderFlag.TF32}
        self.sources = 0b1111
        self.takes_sources = True
        self.int8_calibrator: Any = None
        self.set_flag = self.flags.add
        self.clear_flag = self.flags.discard

    def get_tactic_sources(self) -> int:
        return self.sources

    def set_tactic_sources(self, sources: int) -> bool:
        self.sources = sources if self.takes_sources else self.sources
        return self.takes_sources


class Fake:
    """A `tensorrt` whose build does what a test says; keeps the config of the last build."""

    def __init__(self) -> None:
        self.config = Config()
        self.loggers: list[Any] = []
        self.layers: list[Any] = []
        self.does: Callable[[Config, Any], bytes | None] = lambda config, log: b"plan"
        self.reads: Callable[[Any], bool] = lambda log: True

    def module(self) -> types.ModuleType:
        made: Any = types.ModuleType("tensorrt")
        made.BuilderFlag, made.TacticSource = BuilderFlag, TacticSource
        made.ProfilingVerbosity = types.SimpleNamespace(DETAILED=2)
        made.ILogger = type("ILogger", (), {"Severity": Severity})
        made.NetworkDefinitionCreationFlag = type("Flags", (), {})
        made.init_libnvinfer_plugins = lambda logger, _: self.loggers.append(logger)
        made.Builder, made.OnnxParser = self.builder, self.parser
        made.float16, made.float32 = "half", "float"
        module: types.ModuleType = made
        return module

    def builder(self, logger: Any) -> Any:
        self.loggers.append(logger)
        self.config = Config()
        return types.SimpleNamespace(
            create_network=lambda flags: types.SimpleNamespace(
                num_inputs=0, num_layers=len(self.layers), get_layer=self.layers.__getitem__
            ),
            create_builder_config=lambda: self.config,
            build_serialized_network=lambda network, config: self.does(config, logger),
        )

    def parser(self, network: Any, logger: Any) -> Any:
        self.loggers.append(logger)
        return types.SimpleNamespace(parse_from_file=lambda path: self.reads(logger), num_errors=0)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[Fake]:
    process_logger.cache_clear()  # it is a class of the module that is replaced
    made = Fake()
    monkeypatch.setitem(sys.modules, "tensorrt", made.module())
    yield made
    process_logger.cache_clear()


MODEL = Path("net.onnx")


def fed(count: int = 2, promised: int = 2, known: bytes | None = None) -> Callbacks:
    feed = [{"x": np.zeros(3, np.float32)}] * count
    return Callbacks(feed, batches=promised, shapes={"x": (3,)}, memory=HostMemory(), known=known)


def says(log: Any, *errors: str) -> None:
    for text in errors:
        log.log(Severity.ERROR, text)
    log.log(Severity.INFO, "by the way")


def calibrates(config: Config, log: Any) -> bytes | None:
    """TensorRT's part in a calibration that goes well."""
    while config.int8_calibrator.get_batch(["x"]):
        pass
    config.int8_calibrator.write_calibration_cache(memoryview(CACHE))
    return b"plan"


def test_a_build_allows_what_was_asked_for(fake: Fake) -> None:
    engine = build_engine(MODEL, Settings())
    assert (engine.plan, engine.cache) == (b"plan", None)
    assert fake.config.flags == {BuilderFlag.INT8, BuilderFlag.FP16, BuilderFlag.TF32}
    build_engine(MODEL, Settings(int8=False, fp16=False, tf32=False))
    assert fake.config.flags == set()


def test_calibrating_is_float32_alone(fake: Fake) -> None:
    fake.does = calibrates
    assert builder_module.calibrate(MODEL, Settings(), fed()) == CACHE
    assert fake.config.flags == {BuilderFlag.INT8}


def test_no_addresses_end_the_batches() -> None:
    """TensorRT asks until the list is empty; what went wrong is raised by `check`."""
    callbacks = fed()
    taken = [len(callbacks.get_batch(["x"])) for _ in range(3)]
    assert taken == [1, 1, 0] and callbacks.get_batch(["x"]) == []
    assert fed().get_batch(["another"]) == []


def test_a_batch_has_the_shape_of_the_profile_where_one_is_known(fake: Fake) -> None:
    fake.does = calibrates

    def made(**shapes: tuple[int, ...]) -> bytes:
        feed = [{"x": np.zeros(3, np.float32)}] * 2
        callbacks = Callbacks(feed, batches=2, shapes=shapes, memory=HostMemory())
        return builder_module.calibrate(MODEL, Settings(), callbacks)

    assert made(x=(3,)) == made() == CACHE
    with pytest.raises(CalibrationError, match=r"OPT shape \[1, 3\] only, got \[3\] in batch 0"):
        made(x=(1, 3))


def test_real_libraries_leave_tensorrt_its_own_choice(
    fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(builder_module, "stand_ins", lambda: ())  # whatever this environment has
    build_engine(MODEL, Settings())
    assert fake.config.sources == 0b1111
    monkeypatch.setattr(builder_module, "stand_ins", lambda: ("CUBLAS", "CUDNN"))
    build_engine(MODEL, Settings())
    assert fake.config.sources == 0b1010


def test_stand_ins_that_cannot_be_left_out_are_refused(fake: Fake) -> None:
    fake.config.takes_sources = False
    with pytest.raises(BackendError, match="CUDNN, whose libraries are empty"):
        builder_module._leave_out(fake.config, ("CUDNN",))  # type: ignore[arg-type]


def test_a_library_is_a_stand_in_by_its_mark_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = which("gcc")
    if compiler is None:
        pytest.skip("gcc is missing")
    known = {}
    for name, text in (("real", "int cublasCreate_v2;"), ("empty", f"int {sdk.MARK};")):
        (tmp_path / f"{name}.c").write_text(text)
        known[name] = str(tmp_path / f"lib{name}.so")
        command = [compiler, "-shared", "-fPIC", "-o", known[name], str(tmp_path / f"{name}.c")]
        subprocess.run(command, check=True)
    known["absent"] = "libcalib8_is_not_there.so.8"
    monkeypatch.setattr(sdk, "_LIBRARIES", known)
    assert sdk.stand_ins() == ()  # none is loaded by this process yet
    loaded = [sdk.ctypes.CDLL(known[name]) for name in ("real", "empty")]
    assert sdk.stand_ins() == ("empty",)
    del loaded


def test_a_build_that_fails_before_calibrating_gives_tensorrts_words(fake: Fake) -> None:
    def gives_up(config: Config, log: Any) -> None:
        says(log, "Network has dynamic inputs", "no profile")

    fake.does = gives_up
    for calibrator in (None, fed(), fed(0, known=CACHE)):
        with pytest.raises(BackendError) as caught:
            build_engine(MODEL, Settings(), calibrator=calibrator)
        assert str(caught.value) == (
            "TensorRT could not build net.onnx: Network has dynamic inputs | no profile"
        )


def test_a_parser_that_lists_no_error_has_said_it_in_the_log(fake: Fake) -> None:
    def cannot(log: Any) -> bool:
        says(log, "Failed to parse ONNX model from file")
        return False

    fake.reads = cannot
    with pytest.raises(BackendError, match=r"cannot read net\.onnx: Failed to parse ONNX model"):
        build_engine(MODEL, Settings())


def test_a_build_that_fails_while_calibrating_says_how_far_it_came(fake: Fake) -> None:
    def stops(config: Config, log: Any) -> None:
        config.int8_calibrator.get_batch(["x"])
        says(log, "out of memory")

    fake.does = stops
    with pytest.raises(BackendError, match=r"net\.onnx: out of memory; .*got 1 of 2"):
        build_engine(MODEL, Settings(), calibrator=fed())
    with pytest.raises(BackendError, match=r"out of memory; .*refused it"):
        build_engine(MODEL, Settings(), calibrator=fed(0, known=CACHE))


def test_what_a_callback_raised_comes_before_tensorrts_words(fake: Fake) -> None:
    def stumbles(config: Config, log: Any) -> None:
        config.int8_calibrator.get_batch(["another"])
        says(log, "Calibration failure occurred")

    fake.does = stumbles
    with pytest.raises(CalibrationError, match=r"without 'another'$"):
        build_engine(MODEL, Settings(), calibrator=fed())


def test_an_engine_from_a_short_calibration_is_not_believed(fake: Fake) -> None:
    def short(config: Config, log: Any) -> bytes:
        says(log, "skipped a tensor")
        return calibrates(config, log) or b""

    fake.does = short
    with pytest.raises(CalibrationError, match=r"got 1 of 2; .*; TensorRT said: skipped a tensor"):
        build_engine(MODEL, Settings(), calibrator=fed(1))
    assert build_engine(MODEL, Settings(), calibrator=fed()).cache == CACHE


def test_every_build_has_the_same_logger_and_its_own_words(fake: Fake) -> None:
    def speaks(config: Config, log: Any) -> bytes:
        says(log)
        return b"plan"

    fake.does = speaks
    with listening() as all_along:
        logs = [build_engine(MODEL, Settings()).log for _ in range(2)]
    assert logs == [("by the way",)] * 2
    assert all_along.lines == ["by the way"] * 2
    assert len({id(logger) for logger in fake.loggers}) == 1
    fake.loggers[0].log(Severity.ERROR, "to nobody")
    assert all_along.errors == []


def test_a_batch_is_read_in_the_networks_own_types(fake: Fake) -> None:
    def first(array: np.ndarray, dtype: str) -> np.ndarray:
        live = Callbacks([{"x": array}], batches=1, shapes={"x": array.shape}, memory=HostMemory())
        live.expect({"x": dtype})
        addresses = live.get_batch(["x"])
        if live.error is not None:
            raise live.error
        kind = np.dtype("float32" if "float" in dtype else dtype)
        return np.frombuffer(ctypes.string_at(addresses[0], array.size * kind.itemsize), kind)

    assert first(np.array([3, 4]), "int32").tolist() == [3, 4]
    assert first(np.array([3, 4], np.int32), "int64").tolist() == [3, 4]
    assert first(np.float32([1.5]), "float16").tolist() == [1.5]  # float32, as Polygraphy gives
    assert first(np.float16([1.5]), "bfloat16").tolist() == [1.5]
    with pytest.raises(CalibrationError, match=r"'x' as int32 .*, got 4294967296 in batch 0"):
        first(np.array([1 << 32]), "int32")
    assert first(np.float32([1e5]), "float16").tolist() == [1e5]


def test_another_tactic_source_or_precision_is_another_engine() -> None:
    from deploy.targets.tensorrt.sdk import Sdk

    keys = [
        builder_module.engine_key(
            Sdk("8.5.3.1", True, "GPU", stand_ins=left_out),
            Settings(tf32=tf32, profiles={"x": Profile((1,), (1,), (1,))}),
            model_sha256="m",
            cache_sha256="c",
        )
        for left_out, tf32 in (((), True), (("CUDNN",), True), ((), False))
    ]
    assert all(a != b for i, a in enumerate(keys) for b in keys[:i])


def test_an_engine_depends_on_the_bytes_of_its_plugins(tmp_path: Path) -> None:
    from deploy.targets.tensorrt.sdk import Sdk

    library = tmp_path / "plugin.so"
    keys = []
    for data in (b"one", b"other"):
        library.write_bytes(data)
        key = builder_module.engine_key(
            Sdk("8.5.3.1", True, "GPU"),
            Settings(plugins=(library,)),
            model_sha256="m",
            cache_sha256="c",
        )
        assert key["plugins"] == {"plugin.so": hashlib.sha256(data).hexdigest()}
        keys.append(key)
    assert keys[0] != keys[1]


def layer(name: str, tensor: str) -> Any:
    output = types.SimpleNamespace(name=tensor)
    made: dict[int, str] = {}
    return types.SimpleNamespace(
        name=name, num_outputs=1, get_output=lambda _: output, precision=None,
        made=made, set_output_type=made.__setitem__,
    )  # fmt: skip


@pytest.mark.parametrize(("fp16", "precision"), [(True, "half"), (False, "float")])
def test_float_layers_are_bound_by_name_or_by_what_they_give(
    fake: Fake, fp16: bool, precision: str
) -> None:
    fake.layers = [layer("/a", "a"), layer("/b", "b"), layer("(Unnamed Layer* 2) [Add]", "c")]
    kept = Settings(float_layers={"/a": "a", "/c": "c"}, fp16=fp16)
    build_engine(MODEL, kept, calibrator=fed(known=CACHE))
    assert [one.precision for one in fake.layers] == [precision, None, precision]
    assert BuilderFlag.OBEY_PRECISION_CONSTRAINTS in fake.config.flags


def test_wide_layers_are_bound_to_float32_with_what_they_give(fake: Fake) -> None:
    fake.layers = [layer("/a", "a"), layer("/b", "b"), layer("(Unnamed Layer* 2) [Add]", "c")]
    wide = {"/a": "a", "/c": "c", "/gone": "d"}
    build_engine(MODEL, Settings(float_layers={"/a": "a"}, wide_layers=wide))
    assert [one.precision for one in fake.layers] == ["float", None, "float"]
    assert [one.made for one in fake.layers] == [{0: "float"}, {}, {0: "float"}]
    assert BuilderFlag.OBEY_PRECISION_CONSTRAINTS in fake.config.flags


def test_a_float_layer_that_the_network_lacks_is_told(fake: Fake) -> None:
    fake.layers = [layer("/a", "a")]
    with pytest.raises(BackendError, match="'/b' is none"):
        build_engine(MODEL, Settings(float_layers={"/b": "b"}), calibrator=fed(known=CACHE))


def test_without_float_layers_tensorrt_chooses(fake: Fake) -> None:
    fake.layers = [layer("/a", "a")]
    build_engine(MODEL, Settings(), calibrator=fed(known=CACHE))
    assert fake.layers[0].precision is None
    assert BuilderFlag.OBEY_PRECISION_CONSTRAINTS not in fake.config.flags
