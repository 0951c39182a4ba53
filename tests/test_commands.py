"""Commands, options and the configuration file."""

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import click
import numpy as np
import onnx
import pytest
from click.shell_completion import ShellComplete

import calib8
from calib8 import __version__
from deploy.analysis import environment
from deploy.calibration.reuse import CachePolicy
from deploy.cli import COMMANDS, cli, main
from deploy.commands import base
from deploy.errors import ConfigError, FeedError
from deploy.feed.sampling import Choice
from deploy.machine import this_machine
from deploy.report.verdict import Gates
from deploy.runtimes.ort import OrtSession
from deploy.targets import TARGETS, Ascend, OnnxRuntime, TensorRT, make_targets
from deploy.targets.base import BuildResult
from deploy.targets.options import check_options, declared_options, option
from deploy.tuning.repairs import parse_repairs
from deploy.tuning.search_options import Tuning

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

MADE = ("build", "calibrate", "inspect", "bench")  # commands that are made from the tables


def commands(command=cli, words=()):
    if not isinstance(command, click.Group):
        return [(words, command)]
    context = click.Context(command)
    rows = [(*words, name) for name in command.list_commands(context)]
    return [found for row in rows for found in commands(command.get_command(context, row[-1]), row)]


def test_the_help_names_every_preset_and_shows_numbers_by_a_letter(run):
    from deploy.commands.image_options import PRESET_NAMES
    from deploy.feed.preprocess import PRESETS

    assert re.split(", | or ", PRESET_NAMES) == list(PRESETS)
    said = run("build", "--help-all")[1]
    assert "ppocr-rec" in said
    assert "--limit N " in said
    assert "--power X " in said
    assert not re.search(r"INTEGER|FLOAT|<=None", said)


def test_every_option_has_a_sentence_for_help():
    wrong = [
        (words, param.opts[-1], said)
        for words, command in commands()
        for param in command.params
        if isinstance(param, click.Option)
        if not re.fullmatch(r"[A-Z].*\.", said := param.help.partition("  [default")[0], re.DOTALL)
    ]
    assert not wrong


@pytest.mark.parametrize("name", MADE)
def test_every_option_stands_in_one_section_in_the_order_of_work(name, run):
    (command,) = [command for words, command in commands() if words == (name,)]
    _, out, _ = run(name, "--help-all" if command.common else "--help")
    for param in command.params:
        if isinstance(param, base.SectionOption):
            part = out.split(f"\n{param.section}:\n")[1].split("\n\n")[0]
            assert re.search(rf"^ +(-\w, )?{param.opts[-1]}\b", part, re.MULTILINE), param.opts
    assert "None]" not in out  # as bounds that an option lacks
    titles = re.findall(r"^([A-Z][\w ]+):$", out, re.MULTILINE)
    order = [
        "Model",
        "Images",
        "Calibration",
        "Cache",
        "Targets",
        *(f"Target {target}" for target in TARGETS),
        "Measuring",
        "General",
    ]
    assert [title for title in order if title in titles] == [t for t in titles if t in order]
    assert titles[-1] == "General"


@pytest.fixture
def told(monkeypatch, named_files):
    """What `build` and `calibrate` of the pipeline were called with."""
    seen = {}

    def record(model, dataset, options):
        for value in (dataset, options, options.calibration):
            seen.update({field.name: getattr(value, field.name) for field in fields(value)})
        return SimpleNamespace(failed=seen.get("fails", False), unusable=False)

    monkeypatch.setattr("deploy.pipeline.build_with", record)
    for name, is_all in (("to_screen", False), ("to_markdown", True)):
        monkeypatch.setattr(
            f"deploy.report.{name}", lambda report, is_all=is_all: seen.update(verbose=is_all) or ""
        )
    return seen


BUILD = ("build", "m.onnx", "--images", "p")


@pytest.mark.parametrize(
    ("words", "target"),
    [
        ("", OnnxRuntime()),
        ("--int8-stem --weight-bits 7", OnnxRuntime(int8_stem=True, weight_bits=7)),
        (
            "--target tensorrt --engine-from cache --rest fp32 --workspace 64 --max-batch 4",
            TensorRT(form="cache", rest="fp32", workspace_mib=64, max_batch=4),
        ),
        (
            "--target tensorrt --rest bf16 --cuda-graph --calibrator minmax --parser caffe",
            TensorRT(rest="bf16", cuda_graph=True, calibrator="minmax", parser="caffe"),
        ),
        (
            "--target tensorrt --float-behind-concat --pair-behind-deconv",
            TensorRT(float_behind_concat=True, pair_behind_deconv=True),
        ),
        ("--target tensorrt --dla", TensorRT(dla=True)),
        (
            "--target ascend --soc Ascend310P3 --ascend-config q.cfg --exact-ifmr",
            Ascend(soc="Ascend310P3", config=Path("q.cfg"), exact=True),
        ),
        (
            "--target ascend --aipp --source-color bgr --atc-flag=--log=error --atc-flag=--x=1",
            Ascend(aipp=True, source_color="bgr", atc_flags=("--log=error", "--x=1")),
        ),
        ("--target ascend --no-aipp --first-layer-int8", Ascend(first_layer_int8=True)),
    ],
)
def test_the_options_of_a_target_reach_its_fields(words, target, told, run):
    assert run(*BUILD, *words.split())[0] == 0
    (made,) = told["targets"]
    assert type(made) is type(target)
    assert declared_options(int) == ()
    for declared in declared_options(type(target)):
        assert getattr(made, declared.name) == getattr(target, declared.name)


@pytest.mark.parametrize(
    "words",
    [
        "ascend,tensorrt",
        "ascend --target tensorrt",
        "ascend,tensorrt,ascend --target tensorrt",
    ],
)
def test_targets_are_given_by_commas_or_one_by_one(words, told, run):
    assert run(*BUILD, "--target", *words.split())[0] == 0
    assert [target.name for target in told["targets"]] == ["ascend", "tensorrt"]


def test_the_options_of_build_reach_the_pipeline(told, tmp_path, run):
    labels = tmp_path / "labels.txt"
    labels.write_text("3\n1\n")
    words = (
        "--method percentile --percent 99.9 --keep-float a --keep-float /b* --cache c "
        "--require-cache --trt-version 10.3.0 --skip-bad --eval-images e --duration 0 --verbose "
        "--limit 9 --threads 1 --out o --size 8x9 --resize letterbox --interpolation area "
        "--color bgr --scale 1/255 --mean 0.5 --std 0.25,0.5,1 --pad 7 --layout nhwc"
    )
    assert run(*BUILD, *words.split(), "--labels", labels)[0] == 0
    assert told["method"].label == "percentile 99.9"
    assert told["float_nodes"] == ("a", "/b*")
    assert told["verbose"] is True
    policy = told["cache"]
    assert policy.path == Path("c")
    assert policy.require
    assert policy.trt_version == "10.3.0"
    assert (told["evaluation"].source, told["labels"], told["duration_s"]) == ("e", (3, 1), 0)
    assert told["limit"] == Choice(limit=9)
    assert told["skip_bad"]
    assert (told["threads"], told["out"]) == (1, Path("o"))
    assert told["preprocess"] == {  # without a preset, the rest is what the model carries
        **{"size": (8, 9), "resize": "letterbox", "interpolation": "area", "color": "bgr"},
        **{"scale": 1 / 255, "mean": (0.5,), "std": (0.25, 0.5, 1), "pad": (7,), "layout": "nhwc"},
    }
    run(*BUILD, "--preprocess", "imagenet", "--short-side", "300", "--refresh")
    assert told["preprocess"].short_side == 300
    assert told["cache"].refresh
    run(*BUILD, "--trust-cache", "--for", "avx2", "--prefer", "size")
    assert told["cache"].trust
    assert told["method"] is None
    assert not told["verbose"]
    tuning = told["tuning"]
    assert (tuning.cpu, tuning.prefer, told["duration_s"]) == ("avx2", "size", None)
    words = ("--target", "ascend,onnxruntime", "--method", "entropy")  # which one of them follows
    assert run(*BUILD, *words)[0] == 0
    assert told["method"].name == "entropy"
    told["fails"] = True  # a target
    assert run(*BUILD)[0] == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--percent 99", "percent"),
        ("--method mse --batch-size 4", "--batch-size belongs to --method entropy-tensorrt"),
        ("--method entropy-tensorrt --percent 99", "percent"),
        ("--soc Ascend310P3", "--soc belongs to --target ascend, got --target onnxruntime"),
        (
            "--target tensorrt,ascend --int8-stem --weight-bits 7",
            "--int8-stem and --weight-bits belong to --target onnxruntime",
        ),
        ("--target tensorrt --atc-flag=--a=b", "--atc-flag belongs to --target ascend"),
        ("--target tensorrtt", "'tensorrtt'; did you mean 'tensorrt'?"),
        ("--target tensorrt,", "got ''"),
        ("--target ascend --method entropy", "--method must have a target that follows it"),
        ("--method entropy --trust-cache", "--trust-cache"),
        ("--refresh --trust-cache", "leave one of them out"),
        ("--refresh --require-cache", "leave one of them out"),
        ("--target ascend --source-color bgr", "give --aipp too"),
        ("--target ascend --source-size 20x20", "give --aipp too"),
        ("--target ascend --dynamic-aipp", "give --aipp too"),
        ("--target tensorrt --calibrator minmax --engine-from qdq", "build from the cache"),
    ],
)
def test_an_option_without_a_meaning_is_refused(words, said, told, run):
    code, _, error = run(*BUILD, *words.split())
    assert code == 1
    assert said in error
    assert not told
    assert error.startswith("calib8: error: ")
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ("build", 2, "Missing argument 'MODEL'"),
        ("build m.onnx", 2, "Missing option '--images'"),
        ("build m.onnx --images p --methud mse", 2, "No such option"),
        ("build m.onnx --images p --method best", 2, "Invalid value for '--method'"),
        ("build m.onnx --images p --weight-bits 9", 2, "Invalid value for '--weight-bits'"),
        ("build m.onnx --images p --target tensorrt --engine-from x", 2, "'--engine-from'"),
        ("calibrate m.onnx --images p --soc Ascend310P3", 2, "No such option"),
        ("bench m.onnx --shape x", 2, "must look like"),
        ("biuld", 2, "No such command 'biuld'; did you mean 'build'?"),
        ("cache check x --parser onnx --verbose", 1, "--parser and --verbose go with --model"),
        ("ascend config x -o y --from z --batch-num 2", 1, "--batch-num goes with"),
        ("ascend config x -o y --from z --symmetric", 1, "--symmetric goes with"),
    ],
)
@pytest.mark.usefixtures("named_files")
def test_a_wrong_command_line_is_one_sentence_and_an_exit_code(words, code, said, run):
    got, out, error = run(*words.split())
    assert got == code
    assert said in error
    assert not out
    assert error.startswith("calib8: error: ")
    assert error.count("\n") == 1


def test_a_group_alone_shows_its_help(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["ascend"])
    assert stop.value.code == 2
    assert "Usage: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("target", "options", "said"),
    [
        (OnnxRuntime, {"weight_bits": 6}, "weight_bits of OnnxRuntime is 7 or more, got 6"),
        (OnnxRuntime, {"weight_bits": 9}, "is 8 or less"),
        (TensorRT, {"max_batch": 0}, "is 1 or more"),
        (TensorRT, {"workspace_mib": 0}, "is 1 or more"),
        (TensorRT, {"calibrator": "x"}, "is one of entropy2, entropy, minmax, legacy"),
        (Ascend, {"aipp": True, "source_color": "hsv"}, "is one of rgb, bgr, nv12, nv21"),
        (Gates, {"max_loss": 5}, "a share, 0 to 1, got 5"),
        (Tuning, {"max_loss": -1}, "got -1"),
        (Gates, {"min_speedup": float("nan")}, "0 or more, got nan"),
    ],
)
def test_a_value_that_breaks_an_options_rule_is_refused_from_python_too(target, options, said):
    with pytest.raises(ConfigError, match=said):
        target(**options)


def test_text_from_python_is_a_path_or_a_target_as_on_the_command_line(small_cnn, wording):
    assert Ascend(config="x.cfg").config == Path("x.cfg")  # type: ignore[arg-type]
    assert TensorRT(plugins=("a.so",)).plugins == (Path("a.so"),)  # type: ignore[arg-type]
    assert CachePolicy(path="a.cache").path == Path("a.cache")  # type: ignore[arg-type]
    assert [one.name for one in make_targets("tensorrt")] == ["tensorrt"]
    assert parse_repairs("bias") == ("bias",)
    for words in ({"engine": onnx.ModelProto()}, {"engine": small_cnn, "against": 3}):
        with pytest.raises(ConfigError) as refusal:
            calib8.bench(**words)
        wording.check(refusal.value)
    images = np.zeros((4, 3, 16, 16), np.float32)
    with pytest.raises(FeedError, match="got 3 labels for 4"):  # of an array too
        calib8.build(small_cnn, images, eval_images=images, labels=np.arange(3))


def test_keep_float_takes_patterns_in_every_command(small_cnn, pictures, tmp_path, run):
    (tmp_path / "float.txt").write_text("# the head\nop:Gemm\n")
    words = ("--keep-float", "Conv_c[12]", "--keep-float", f"@{tmp_path / 'float.txt'}")
    _, out, _ = run("inspect", small_cnn, "--all", "--target", "onnxruntime,tensorrt", *words)
    kept = {line.split()[2] for line in out.splitlines() if "as asked" in line}
    assert kept == {"Conv_c1", "Conv_c2", "Gemm_logits"}
    assert "on onnxruntime" in out
    assert "on tensorrt" in out
    images = ("--images", pictures, "--size", "16x16", "--limit", "4")
    run.ok("build", small_cnn, *images, "--out", tmp_path, "--duration", "0", *words)
    made = onnx.load(tmp_path / "small_cnn.int8.onnx").graph
    quantized = {node.output[0] for node in made.node if node.op_type == "DequantizeLinear"}
    convs = {node.name: node.input[0] in quantized for node in made.node if node.op_type == "Conv"}
    assert convs == {"Conv_c1": False, "Conv_c2": False, "Conv_c3": True}
    cache = ("-o", tmp_path / "c.cache", "--keep-float", "Convx*")
    assert "'Convx*'" in run.fails("calibrate", small_cnn, *images, *cache)


def test_options_that_this_input_has_no_use_for_are_refused(small_cnn, tmp_path, run, wording):
    cache = tmp_path / "m.cache"
    cache.write_bytes(b"TRT-8503-EntropyCalibration2\nx: 3c008912\n")
    assert run("inspect", cache)[0] == 0
    wording.check(run.fails("inspect", cache, "--target", "ascend", "--all"))
    words = ("bench", small_cnn, "--duration", "0", "--warm-up", "0", "--seed", "3")
    assert "2 streams at once" in run.ok(*words, "--streams", "2")
    assert ".engine, .plan" in run.fails(*words, "--cuda-graph")


@dataclass(frozen=True, kw_only=True)
class Toy:
    """A target as CONTRIBUTING tells to write it."""

    steps: int = option(
        4, help="Steps of the toy.", minimum=1, changes_placement=True, changes_observations=True
    )
    tag: tuple[str, ...] = option((), help="A tag of the toy.")
    rate: float = option(0.5, help="Rate of the toy.", maximum=1)
    turbo: bool = option(True, help="Let the toy run fast.", changes_runs=True)
    name: str = "toy"
    engines: ClassVar[tuple[str, ...]] = (".toy",)
    writes: ClassVar[tuple[str, ...]] = (".toy",)
    runs_here: ClassVar[bool] = False
    own_method: ClassVar[str] = ""
    configured: ClassVar[bool] = False
    opened: ClassVar[list[object]] = []

    def __post_init__(self):
        check_options(self)

    scaled_tensors = staticmethod(OnnxRuntime().scaled_tensors)
    plan = staticmethod(OnnxRuntime().plan)
    trial = staticmethod(OnnxRuntime().trial)

    def demand(self, subject):
        return subject.histogram_observations(
            self.scaled_tensors(subject.model, subject.float_nodes)
        )

    def build(self, request):
        path = request.folder / f"{request.name}.toy"
        path.write_bytes(request.model.SerializeToString())
        return BuildResult(
            target=self.name,
            engine=path,
            runnable=path,
            files={"toy": path},
            decisions=self.plan(request.model).decisions,
            notes=(f"{self.steps} steps, {self.tag}",),
        )

    def describe_sdk(self):
        return "toys"

    def open(self, engine, *, threads=None):
        self.opened.append(self)
        return OrtSession.open(engine.read_bytes(), threads=threads)


@pytest.fixture
def toy(monkeypatch, named_files):
    """The row, and the commands made anew from the table."""
    monkeypatch.setitem(TARGETS, "toy", Toy)
    for name in (*MADE, "diagnose"):  # inspect is there
        monkeypatch.delitem(sys.modules, f"deploy.commands.{name}", raising=False)


@pytest.mark.slow
@pytest.mark.usefixtures("toy")
def test_a_toy_target_works_from_the_command_line(small_cnn, tmp_path, run):
    _, out, _ = run("build", "--help-all")
    for flag in ("--steps", "--tag", "--rate", "--turbo / --no-turbo"):
        assert flag in out.split("Target toy:")[1]
    assert "onnxruntime, tensorrt, ascend, toy" in " ".join(out.split())
    assert "--steps" in run("inspect", "--help")[1]
    assert "--turbo" in run("bench", "--help-all")[1]
    assert "--turbo" not in run("calibrate", "--help-all")[1]
    np.save(tmp_path / "x.npy", np.ones((2, 3, 16, 16), np.float32))
    feed = ("--images", tmp_path / "x.npy", "--target", "toy")
    words = ("--steps", "7", "--tag", "a", "--tag", "b", "--rate", "1", "--no-turbo")
    run.ok("build", small_cnn, *feed, *words, "--out", tmp_path, "--duration", "0")
    (target,) = json.loads((tmp_path / "report.json").read_text())["targets"]
    assert "7 steps, ('a', 'b')" in target["notes"]
    assert "on toy" in run.ok("inspect", small_cnn, "--target", "toy", "--steps", "2")
    assert "observations" in run.ok("calibrate", small_cnn, *feed, "-o", tmp_path / "t.cache")
    Toy.opened.clear()
    code, out, error = run("bench", tmp_path / "small_cnn.toy", "--duration", "0", "--no-turbo")
    assert code == 0, error
    assert "small_cnn.toy" in out, error
    assert Toy.opened
    assert not Toy.opened[0].turbo


@pytest.mark.usefixtures("toy")
@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ("--target onnxruntime --steps 3", 1, "--steps belongs to --target toy"),
        ("--target toy --steps 0", 2, "'--steps'"),
        ("--target toyy", 1, "did you mean 'toy'?"),
    ],
)
def test_a_toy_targets_options_are_held_to_their_rules(words, code, said, run):
    got, _, error = run(*BUILD, *words.split())
    assert got == code
    assert said in error


def test_one_flag_of_two_options_is_refused(toy, monkeypatch, run, wording):
    @dataclass(frozen=True, kw_only=True)
    class Clash(Toy):
        soc: str | None = option(None, help="A chip.")
        limits: list[int] = field(default_factory=list)

    monkeypatch.setitem(TARGETS, "toy", Clash)
    wording.check(run.fails(*BUILD))


ROOT = Path(__file__).parent.parent


def test_help_is_whole_and_loads_nothing_heavy():
    code = """
import sys; from deploy.cli import COMMANDS, main
for words in [], *([name] for name in COMMANDS):
    try: main([*words, "--help"])
    except SystemExit as stop: assert not stop.code
    heavy = {"numpy", "onnx", "onnxruntime", "cv2", "torch", "tensorrt"} & sys.modules.keys()
    room = [m for m in sys.modules if m.startswith("deploy.commands.")]
    assert not heavy and (words or not room), (words, heavy, room)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for name, (_, summary) in COMMANDS.items():
        assert f"  {name} " in done.stdout
        assert summary.split()[0] in done.stdout
        assert f"Usage: calib8 {name} " in done.stdout
        assert cli.get_command(click.Context(cli), name).help
    assert "\\b" not in done.stdout
    assert "\b" not in done.stdout  # click's mark for kept lines


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (ConfigError("a rule, what was got"), 1, "calib8: error: a rule, what was got\n"),
        (KeyboardInterrupt(), 130, "calib8: interrupted"),
        (click.Abort(), 130, "calib8: interrupted"),
        (click.UsageError("no"), 2, "calib8: error: no\n"),
        (MemoryError(), 1, "calib8: error: memory did not suffice; use fewer --threads"),
        (
            PermissionError(13, "Permission denied", "/x"),
            1,
            "refused /x: Permission denied; fix that",
        ),
        (BrokenPipeError(), 1, ""),
        (ModuleNotFoundError("no", name="onnx.helper"), 1, "needs the package onnx, which is not"),
        (ModuleNotFoundError("no", name="deploy.gone"), 70, "a fault of calib8 itself"),
    ],
)
def test_failures_are_one_sentence_and_a_code(error, code, words, monkeypatch, capsys):
    def fail(*args, **options):
        raise error

    monkeypatch.setattr(cli, "main", fail)
    with pytest.raises(SystemExit) as stop:
        main([])
    assert stop.value.code == code
    assert words in capsys.readouterr().err


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_a_full_screen_is_one_sentence():
    with Path("/dev/full").open("w") as full:
        words = [sys.executable, "-m", "deploy", "--help"]
        done = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "No space left on device" in done.stderr


@pytest.mark.parametrize("module", ["deploy", "calib8"])
def test_python_dash_m_is_calib8(module):
    words = [sys.executable, "-m", module, "--version"]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert done.stdout.startswith(f"calib8, version {__version__}\ncounting: ")


def documented():
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    text = "\n".join(page.read_text("utf-8").replace("\\\n", "") for page in pages)
    lines = [line.strip().removeprefix("$ ") for line in text.splitlines()]
    return [line.partition(" #")[0].strip() for line in lines if line.startswith("calib8 ")]


def unknown(line):
    """Words of a command line that name no command or option."""
    words = line.split()[1:]
    command = cli
    while isinstance(command, click.Group):
        context = click.Context(command)
        if not words or words[0] not in command.list_commands(context):
            return set(words[:1]) or {"no command"}
        command = command.get_command(context, words.pop(0))
    known = {option for parameter in command.params for option in parameter.opts}
    known |= {"--help", "--help-all"}
    return {word.partition("=")[0] for word in words if word[:1] == "-"} - known


def test_documented_commands_and_options_exist():
    lines = documented()
    assert len(lines) > 100
    assert not {line: words for line in lines if (words := unknown(line))}


@pytest.mark.parametrize("target", TARGETS)
def test_inspect_judges_a_model_by_every_target(small_cnn, target, run):
    said = run.ok("inspect", small_cnn, "--target", target, "--all")
    word = "uint8" if target == "onnxruntime" else "int8 "
    assert "tensors need a scale" in said
    assert f"{word} Conv" in said


def completed(*words, begun=""):
    shell = ShellComplete(cli, {}, "calib8", "_CALIB8_COMPLETE")
    return [item.value for item in shell.get_completions(list(words), begun)]


@pytest.mark.parametrize(
    ("option", "begun", "found"),
    [
        ("--target", "", ["onnxruntime", "tensorrt", "ascend"]),
        ("--target", "tensorrt,", ["tensorrt,onnxruntime", "tensorrt,ascend"]),
        ("--preprocess", "ima", ["imagenet", "imagenet-tf"]),
        ("--resize", "s", ["stretch", "short-side"]),
        ("--interpolation", "l", ["linear", "lanczos"]),
        ("--color", "g", ["grey"]),
        ("--layout", "nc", ["nchw"]),
        ("--repair", "b", ["bias"]),
        ("--method", "per", ["percentile"]),
        ("--rest", "fp", ["fp16", "fp32"]),
    ],
)
def test_values_of_an_option(option, begun, found):
    assert completed("build", "net.onnx", option, begun=begun) == found
    assert completed(begun="do") == ["doctor"]
    assert "--config" in completed("build", begun="--c")


def test_the_script_of_a_shell(monkeypatch, run):
    monkeypatch.setenv("_CALIB8_COMPLETE", "zsh_source")
    assert "#compdef calib8" in run.ok()


QUICK = "--effort", 0, "--duration", 0, "--accept"


def files_of(folder):
    """Name -> bytes, but for what tells the time."""
    timed = "report.", "manifest.json"
    files = (p for p in folder.rglob("*") if p.is_file() and not p.name.startswith(timed))
    return {p.name: p.read_bytes() for p in files}


@pytest.fixture
def built(run, small_cnn, pictures, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = "--target tensorrt,ascend --keep-float Conv_c1 --keep-float op:Gemm --rest fp32"
    more = (*words.split(), *QUICK, "--mean", "0.4", "--limit", 12, "--out", "o")
    run.ok("build", small_cnn, "--images", pictures, *more)
    return tmp_path / "o"


def test_a_build_leaves_its_options(built, small_cnn, pictures):
    table = tomllib.loads((built / "calib8.toml").read_text("utf-8"))
    assert table == {
        "build": {
            "model": str(small_cnn),
            "images": str(pictures),
            "rest": "fp32",
            "target": ["tensorrt,ascend"],
            "keep-float": ["Conv_c1", "op:Gemm"],
            "mean": "0.4",
            "limit": 12,
            "effort": 0,
            "duration": 0.0,
            "accept": True,
        }
    }


def test_the_file_repeats_the_same_bytes(built, run):
    before = files_of(built)
    run.ok("build", "--config", "o/calib8.toml", "--out", "again", "--threads", 3)
    assert files_of(built.parent / "again") == before
    out = run.ok("build", "--config", "o/calib8.toml")  # over itself
    assert files_of(built) == before
    assert "reused" in out
    assert run("verify", "o")[0] == 0


def test_what_is_typed_stands_before_the_file(built, run):
    words = ("--config", "o/calib8.toml", "--out", "p", "--target", "onnxruntime", "--limit", 5)
    error = run.fails("build", *words)
    assert "--rest" in error
    assert "tensorrt" in error  # an option of a target left out
    file = built / "calib8.toml"
    file.write_text(file.read_text("utf-8").replace('rest = "fp32"\n', ""), "utf-8")
    out = run.ok("build", *words)
    table = tomllib.loads((built.parent / "p" / "calib8.toml").read_text("utf-8"))["build"]
    assert (table["target"], table["limit"]) == (["onnxruntime"], 5)
    assert "5 samples" in out


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[build", "must be a TOML file of the options of a command"),
        ("model = 'm.onnx'", "must have its options under [build], got 'model'"),
        ("[build]\nimagse = 'p'", "'imagse' in c.toml is no option of build; did you mean"),
        ("[build]\nforce = true", "'force' in c.toml is no option of build"),
        ("[build]\naccept = 'yes'", "accept in c.toml must be true or false, got 'yes'"),
        ("[build]\nimages = ['a', 'b']", "images in c.toml must be a text or number, got"),
        ("[build]\nkeep-float = [1, true]", "keep-float in c.toml must be texts or numbers"),
        ("[build]\nlimit = {}", "limit in c.toml must be a text or number, got {}"),
        ("[build]\nmodel = 'm.onnx'\nimages = 'p'\nlimit = 'few'", "'few' is not a valid integer"),
        ("[build]\nx" + ".x" * 100 + " = 1", "got keys of over 64 dots"),
    ],
)
def test_a_wrong_file_is_told(text, message, run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.toml").write_text(text, "utf-8")
    code, _, err = run("build", "--config", "c.toml")
    assert code in (1, 2)
    assert message in err.replace("\n", " ")
    assert "none.toml" in run.fails("build", "--config", "none.toml")


def test_a_file_of_ones_own_builds_as_build_does(run, small_cnn, pictures, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.toml").write_text(
        f"[build]\nmodel = '{small_cnn}'\nimages = '{pictures}'\nkeep-float = 'Conv_c1'\n"
        "effort = 0\nduration = 0\naccept = true\nthreads = 1\n"
    )
    run.ok("build", "--config", "mine.toml")
    table = tomllib.loads((tmp_path / "build" / "calib8.toml").read_text("utf-8"))["build"]
    assert table["keep-float"] == ["Conv_c1"]
    assert "threads" not in table


def test_a_name_that_is_no_text_is_left_to_be_typed(run, small_cnn, pictures, tmp_path):
    folder = tmp_path / os.fsdecode(b"im\xffages")
    shutil.copytree(pictures, folder)
    run.ok("build", small_cnn, "--images", folder, "--out", tmp_path / "o", *QUICK)
    file = tmp_path / "o" / "calib8.toml"
    assert "# images" in file.read_text("utf-8")
    code, _, err = run("build", "--config", file)
    assert code == 2
    assert "'--images'" in err
    assert run("build", "--config", file, "--images", folder)[0] == 0


@pytest.mark.parametrize("whose", ["theirs/c.toml", "theirs"])
def test_code_that_another_user_names_needs_trust(whose, run, tmp_path, monkeypatch):
    """Also for root, who may read every file."""
    config = tmp_path / "theirs" / "c.toml"
    stat = os.stat
    config.parent.mkdir()

    def owned(path, *words, **more):
        found = stat(path, *words, **more)
        uid = found.st_uid + (path == tmp_path / whose)
        return os.stat_result((*found[:4], uid, *found[5:]))

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("deploy.commands.settings.os.stat", owned)
    for key, value in {
        "metric": "'m.py:score'",
        "images": "'l.py:make'",
        "eval-images": "'l.py:make'",
        "calibrator-script": "'c.py:make'",
        "scheduler": "'tcp://x:1'",
        "plugin": "'a.so'",
        "model": "'net.py:make'",
    }.items():
        config.write_text(f"[build]\n{key} = {value}\n")
        error = run.fails("build", "--config", config)
        assert f"--trust-config, got {key} = {value} in {config}" in error
    for words in (["--trust-config"], ["none.onnx"]):  # the latter names another model
        assert "trust-config" not in run("build", *words, "--config", config)[2]
    monkeypatch.undo()
    assert "trust-config" not in run("build", "--config", config)[2]


# --- Outputs over what calib8 did not write.
# Options with a rule of their own, then those that are only read.
OTHER_PATHS = {
    "build --out",
    "build --cache",
    "calibrate --out",
    "merge --out",
    "qat --checkpoint",
    "ascend auto --out",
    "ascend convert --out",
    "ascend deploy --out",
    "build --labels",
    "build --config",
    "explain --model",
    "cache check --model",
    "ascend check --model",
    "ascend config --from",
    "qat --teacher-weights",
}
OUTPUTS = [
    (" ".join(words), param.opts[-1], number)
    for words, command in commands()
    for param in command.params
    for number, kind in enumerate(getattr(param.type, "types", [param.type]))
    if isinstance(kind, base.OutputFile)
]


def test_every_path_is_read_or_has_a_rule_of_what_it_replaces():
    paths = {
        f"{' '.join(words)} {param.opts[-1]}"
        for words, command in commands()
        for param in command.params
        if isinstance(param, click.Option) and type(param.type) is click.Path
    }
    assert paths == OTHER_PATHS
    assert len(OUTPUTS) > 20


@pytest.mark.parametrize(("words", "flag", "number"), OUTPUTS)
def test_an_output_never_replaces_a_text_of_the_users(words, flag, number, run, tmp_path):
    """Refused while the words are parsed: the rest of the command is not even there."""
    mine = tmp_path / "mine"
    files = [tmp_path / "a", tmp_path / "b"]
    mine.write_text("precious\n")
    files[number] = mine
    given = files if words == "cache from-qdq" else [mine]
    assert f"wrote, and none of a build, got {mine};" in run.fails(*words.split(), flag, *given)
    given[number if given is files else 0] = mine / "below"
    assert f"can be written to, got {mine};" in run.fails(*words.split(), flag, *given)
    assert mine.read_text() == "precious\n"


@pytest.fixture(scope="module")
def own(small_cnn, pictures, tmp_path_factory):
    """A folder with a build, its cache and a Q/DQ model."""
    out = tmp_path_factory.mktemp("own")
    words = ("--target", "onnxruntime,tensorrt", "--effort", 0, "--duration", 0, "--accept")
    main(["build", str(small_cnn), "--images", str(pictures), "--out", str(out), *map(str, words)])
    return out


@pytest.mark.parametrize(
    "words",
    [
        "inspect MODEL --json p",
        "quantize [1,2] --json p",
        "explain OUT --json p",
        "report OUT OUT --json p --html q",
        "compare MODEL OUT/small_cnn.int8.onnx IMAGES --json p",
        "bench MODEL --duration 0 --warm-up 0 --json p --html q",
        "calibrate MODEL IMAGES --json p",
        "build MODEL IMAGES --effort 0 --duration 0 --accept --json p",
        "ascend config MODEL -o p",
        "ascend config MODEL -o p.cfg",
        "cache to-qdq MODEL OUT/small_cnn.tensorrt.cache -o p",
        "cache from-qdq OUT/small_cnn.tensorrt.qdq.onnx -o p q",
        "cache relabel OUT/small_cnn.tensorrt.cache --trt-version 10.5.0 -o p",
        "cache merge OUT/small_cnn.tensorrt.cache -o p",
    ],
)
def test_outputs_replace_calib8s_own(words, own, run, small_cnn, pictures, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = words.replace("MODEL", str(small_cnn)).replace("OUT", str(own))
    words = words.replace("IMAGES", f"--images {pictures}").split()
    outputs = [Path(one) for one in ("p", "q", "p.cfg") if one in words]
    for one in outputs:
        one.touch()  # as mktemp leaves it
    for _ in range(2):
        run.ok(*words)
        assert all(one.stat().st_size for one in outputs)


def test_an_output_is_no_other_output_and_no_file_of_a_build(
    own, run, small_cnn, pictures, tmp_path, monkeypatch, wording
):
    monkeypatch.chdir(tmp_path)
    build = ("build", small_cnn, "--images", pictures, "--out", "o", *QUICK, "--force", "--json")
    for name in ("small_cnn.int8.onnx", "report.json", "calib8/small_cnn.cache.json"):
        wording.check(run.fails(*build, f"o/{name}"))
    Path("c.toml").write_text("[build]\njson = 'mine'\n")
    Path("mine").write_text("precious")
    assert "got mine;" in run.fails(*build[:-1], "--config", "c.toml")
    wording.check(run.fails("bench", small_cnn, "--json", "p", "--html", "./p"))
    for name in ("report.json", "calib8/manifest.json", f"../{own.name}/report.json"):
        wording.check(run.fails("inspect", small_cnn, "--json", own / name))
    assert run.ok("verify", own)
    assert sorted(os.listdir()) == ["c.toml", "mine"]


def found(run):
    code, out, err = run("doctor", "--json")
    assert code == 0
    assert not err
    return {one["what"]: one for one in json.loads(out)}


def test_a_machine_without_sdks_is_told_what_to_install(run, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    lines = {line.split()[1]: line for line in run.ok("doctor").splitlines()}
    rows = {"calib8", "counting", "packages", "CPU", "torch", "distributed", "openvino"}
    assert set(lines) == {*rows, *TARGETS}
    assert lines["onnxruntime"].startswith("+")
    assert "ONNX Runtime 1." in lines["onnxruntime"]
    assert lines["tensorrt"].startswith("-")
    assert "pip install" in lines["tensorrt"]
    assert "`atc`" in lines["ascend"]


def test_tensorrt_and_its_gpu_are_named(run, tensorrt):
    tensorrt("10.13.0.35")
    here = found(run)["tensorrt"]
    assert here["there"]
    assert "TensorRT 10.13.0.35 on " in here["words"]


def test_atc_is_named(run, monkeypatch, tmp_path):
    (tmp_path / "atc").write_text("#!/bin/sh\n")
    (tmp_path / "atc").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert found(run)["ascend"]["words"].startswith("builds and runs engines: " + str(tmp_path))


def test_a_cpu_without_int8_is_told(run, monkeypatch):
    monkeypatch.setattr(environment, "this_machine", lambda: replace(this_machine(), int8=()))
    cpu = found(run)["CPU"]
    assert not cpu["there"]
    assert "may saturate" in cpu["words"]


def test_a_missing_package_says_what_it_is_for(run, monkeypatch):
    def gone(name):
        raise environment.PackageNotFoundError(name)

    monkeypatch.setattr(environment, "version", gone)
    assert "pip install '.[torch]'" in found(run)["torch"]["words"]


def test_the_help_of_a_command_with_many_options_shows_a_dozen_and_help_all_the_rest(run):
    for words, command in commands():
        every = [one for one in command.params if isinstance(one, click.Option)]
        common = getattr(command, "common", [])
        assert bool(common) == (len(every) > 16), words
        if not common:
            continue
        short, everything = run.ok(*words, "--help"), run.ok(*words, "--help-all")
        assert 8 <= len(common) <= 12
        assert short.endswith(f"lists all {len(every) + 2} options.\n")
        listed = short.partition("\nOptions:\n")[2]
        assert re.findall(r"^  (?:-\w, )?(--[\w-]+)", listed, re.MULTILINE) == common
        assert all(re.search(rf"^  .*{one.opts[-1]}\b", everything, re.MULTILINE) for one in every)


@pytest.mark.parametrize(
    "words",
    [
        "build nope.onnx --images p",
        "build m.onnx --images nope",
        "calibrate m.onnx --images nope/x.txt",
        "merge m.onnx nope.shard",
        "bench m.onnx --against nope.onnx",
        "compare m.onnx nope.onnx --images p",
        "explain nope",
        "ascend deploy m.onnx nope.txt --out o",
    ],
)
def test_a_path_that_is_not_there_is_told_before_anything_is_imported(words, named_files):
    code = f"""
import sys; from deploy.cli import main
try: main({words.split()})
except SystemExit as stop: print(stop.code, *{{"numpy", "onnx", "cv2"}} & sys.modules.keys())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "1\n"
    assert "got nothing there; check the path\n" in done.stderr
    assert "error: nope" in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_pattern_a_loader_and_a_torch_model_are_no_paths_to_look_for():
    for text in ("photos/*.jpg", "loader.py:make", "timm:resnet18", "p[0].png"):
        base.IMAGE_SOURCE.check(text)


@pytest.mark.parametrize("words", ["cache shwo", "ascend atuo"])
def test_a_command_of_a_group_is_suggested_once(words, run):
    code, _, error = run(*words.split())
    assert code == 2
    assert error.count("did you mean") == 1
