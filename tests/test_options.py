"""Every option of every command has its help and section, and reaches its place or is refused."""

import re
import sys
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import click
import numpy as np
import onnx
import pytest

from deploy.cli import cli, main
from deploy.commands import base
from deploy.errors import ConfigError
from deploy.feed.sampling import Choice
from deploy.runtimes.ort import OrtSession
from deploy.targets import TARGETS, Ascend, OnnxRuntime, TensorRT
from deploy.targets.base import Built
from deploy.targets.options import check, option, options_of

MADE = ("build", "calibrate", "inspect", "bench")  # commands that are made from the tables


def commands(command=cli, words=()):
    context = click.Context(command)
    if not isinstance(command, click.Group):
        return [(words, command)]
    names = command.list_commands(context)
    return [
        found
        for name in names
        for found in commands(command.get_command(context, name), (*words, name))
    ]


def run(capsys, *words):
    """(exit code, output, errors) of one command line."""
    code = 0
    try:
        main([str(word) for word in words])
    except SystemExit as stop:
        code = int(stop.code or 0)
    said = capsys.readouterr()
    return code, said.out, said.err


def test_the_help_names_every_preset_and_shows_numbers_by_a_letter(capsys):
    from deploy.commands.image_options import PRESET_NAMES
    from deploy.feed.preprocess import PRESETS

    assert re.split(", | or ", PRESET_NAMES) == list(PRESETS)
    said = run(capsys, "build", "--help")[1]
    assert "ppocr-rec" in said and "--limit N " in said and "--power X " in said
    assert not re.search(r"INTEGER|FLOAT", said)


def test_every_option_has_a_sentence_for_help():
    wrong = [
        (words, param.opts[-1], said)
        for words, command in commands()
        for param in command.params
        if isinstance(param, click.Option) and not param.hidden
        if not re.fullmatch(r"[A-Z].*\.", said := param.help.partition("  [default")[0], re.DOTALL)
    ]
    assert not wrong


@pytest.mark.parametrize("name", MADE)
def test_every_option_stands_in_one_section_in_the_order_of_work(name, capsys):
    (command,) = [command for words, command in commands() if words == (name,)]
    _, out, _ = run(capsys, name, "--help")
    for param in command.params:
        if isinstance(param, base.SectionOption):
            part = out.split(f"\n{param.section}:\n")[1].split("\n\n")[0]
            assert re.search(rf"^ +(-\w, )?{param.opts[-1]}\b", part, re.MULTILINE), param.opts
    titles = re.findall(r"^([A-Z][\w ]+):$", out, re.MULTILINE)
    order = ["Model", "Images", "Calibration", "Cache", "Targets",
             *(f"Target {target}" for target in TARGETS), "Measuring", "General"]  # fmt: skip
    assert [title for title in order if title in titles] == [t for t in titles if t in order]
    assert titles[-1] == "General"


# -- what reaches the pipeline ----------------------------------------------------------------


@pytest.fixture
def told(monkeypatch):
    """What `build` and `calibrate` of the pipeline were called with."""
    import deploy.pipeline

    seen = {}

    def record(model, dataset, options):
        for value in (dataset, options, options.calibration):
            seen.update({field.name: getattr(value, field.name) for field in fields(value)})
        return SimpleNamespace(
            failed=seen.get("fails", False), unusable=seen.get("unusable", False)
        )

    monkeypatch.setattr(deploy.pipeline, "build_with", record)

    def screen(report, *, verbose):
        seen["verbose"] = verbose
        return ""

    monkeypatch.setattr("deploy.report.to_screen", screen)
    return seen


BUILD = ("build", "m.onnx", "--images", "p")


@pytest.mark.parametrize(
    ("words", "target"),
    [
        ("", OnnxRuntime()),
        ("--int8-stem --weight-bits 7", OnnxRuntime(int8_stem=True, weight_bits=7)),
        ("--target tensorrt --engine-from cache --rest fp32 --workspace 64 --max-batch 4",
         TensorRT(form="cache", rest="fp32", workspace_mib=64, max_batch=4)),
        ("--target tensorrt --rest bf16 --cuda-graph --calibrator minmax --parser caffe",
         TensorRT(rest="bf16", cuda_graph=True, calibrator="minmax", parser="caffe")),
        ("--target tensorrt --float-behind-concat --pair-behind-deconv",
         TensorRT(float_behind_concat=True, pair_behind_deconv=True)),
        ("--target ascend --soc Ascend310P3 --ascend-config q.cfg --exact-ifmr",
         Ascend(soc="Ascend310P3", config=Path("q.cfg"), exact=True)),
        ("--target ascend --aipp --source-color bgr --atc-flag=--log=error --atc-flag=--x=1",
         Ascend(aipp=True, source_color="bgr", atc_flags=("--log=error", "--x=1"))),
        ("--target ascend --no-aipp --first-layer-int8", Ascend(first_layer_int8=True)),
    ],
)  # fmt: skip
def test_the_options_of_a_target_reach_its_fields(words, target, told, capsys):
    assert run(capsys, *BUILD, *words.split())[0] == 0
    (made,) = told["targets"]
    assert type(made) is type(target)
    for declared in options_of(type(target)):
        assert getattr(made, declared.name) == getattr(target, declared.name)


@pytest.mark.parametrize(
    "words",
    [
        "--target ascend,tensorrt",
        "--target ascend --target tensorrt",
        "--target ascend,tensorrt,ascend --target tensorrt",
    ],
)
def test_targets_are_given_by_commas_or_one_by_one(words, told, capsys):
    assert run(capsys, *BUILD, *words.split())[0] == 0
    assert [target.name for target in told["targets"]] == ["ascend", "tensorrt"]


def test_the_options_of_build_reach_the_pipeline(told, tmp_path, capsys):
    labels = tmp_path / "labels.txt"
    labels.write_text("3\n1\n")
    words = (
        *(
            "--method",
            "percentile",
            "--percent",
            "99.9",
            "--keep-float",
            "a",
            "--keep-float",
            "/b*",
        ),
        *("--cache", "c", "--require-cache", "--trt-version", "10.3.0", "--skip-bad"),
        *("--eval-images", "e", "--labels", labels, "--duration", "0", "--verbose"),
        *("--limit", "9", "--threads", "1", "--out", "o"),
        *("--size", "8x9", "--resize", "letterbox", "--interpolation", "area", "--color", "bgr"),
        *("--scale", "1/255", "--mean", "0.5", "--std", "0.25,0.5,1", "--pad", "7"),
        *("--layout", "nhwc"),
    )
    assert run(capsys, *BUILD, *words)[0] == 0
    assert told["method"].label == "percentile 99.9"
    assert told["float_nodes"] == ("a", "/b*") and told["verbose"] is True
    policy = told["cache"]
    assert policy.path == Path("c") and policy.require and policy.trt_version == "10.3.0"
    assert (told["evaluation"].source, told["labels"], told["duration_s"]) == ("e", (3, 1), 0)
    assert told["limit"] == Choice(most=9) and told["skip_bad"]
    assert (told["threads"], told["out"]) == (1, Path("o"))
    assert told["preprocess"] == {  # without a preset, the rest is what the model carries
        **{"size": (8, 9), "resize": "letterbox", "interpolation": "area", "color": "bgr"},
        **{"scale": 1 / 255, "mean": (0.5,), "std": (0.25, 0.5, 1), "pad": (7,), "layout": "nhwc"},
    }
    run(capsys, *BUILD, "--preprocess", "imagenet", "--short-side", "300", "--refresh")
    assert told["preprocess"].short_side == 300 and told["cache"].refresh
    run(capsys, *BUILD, "--trust-cache")
    assert told["cache"].trust and told["method"] is None and not told["verbose"]


def test_a_target_that_failed_is_exit_code_1(told, capsys):
    told["fails"] = True
    assert run(capsys, *BUILD)[0] == 1


# -- what is refused --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--percent 99", "percent"),
        ("--method mse --batch-size 4", "--batch-size belongs to --method entropy-tensorrt"),
        ("--method entropy-tensorrt --percent 99", "percent"),
        ("--soc Ascend310P3", "--soc belongs to --target ascend, got --target onnxruntime"),
        ("--target tensorrt,ascend --int8-stem --weight-bits 7",
         "--int8-stem and --weight-bits belong to --target onnxruntime"),
        ("--target tensorrt --atc-flag=--a=b", "--atc-flag belongs to --target ascend"),
        ("--target tensorrtt", "'tensorrtt'; did you mean 'tensorrt'?"),
        ("--target tensorrt,", "got ''"),
        ("--target ascend --method entropy", "--method must have a target that follows it"),
        ("--method entropy --trust-cache", "--trust-cache"),
        ("--refresh --trust-cache", "leave one of them away"),
        ("--refresh --require-cache", "leave one of them away"),
        ("--target ascend --source-color bgr", "give --aipp too"),
        ("--target ascend --source-size 20x20", "give --aipp too"),
        ("--target ascend --dynamic-aipp", "give --aipp too"),
        ("--target tensorrt --calibrator minmax --engine-from qdq", "build from the cache"),
    ],
)  # fmt: skip
def test_an_option_without_a_meaning_is_refused(words, said, told, capsys):
    code, _, error = run(capsys, *BUILD, *words.split())
    assert code == 1 and said in error and not told
    assert error.startswith("calib8: error: ") and error.count("\n") == 1


def test_a_method_is_taken_where_one_target_follows_it(told, capsys):
    words = ("--target", "ascend,onnxruntime", "--method", "entropy")
    assert run(capsys, *BUILD, *words)[0] == 0 and told["method"].name == "entropy"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("build", "Missing argument 'MODEL'"),
        ("build m.onnx", "Missing option '--images'"),
        ("build m.onnx --images p --methud mse", "No such option"),
        ("build m.onnx --images p --method best", "Invalid value for '--method'"),
        ("build m.onnx --images p --weight-bits 9", "Invalid value for '--weight-bits'"),
        ("build m.onnx --images p --target tensorrt --engine-from x", "'--engine-from'"),
        ("calibrate m.onnx --images p --soc Ascend310P3", "No such option"),
        ("bench m.onnx --shape x", "must look like"),
        ("ascend", "Usage: "),
        ("biuld", "No such command 'biuld'"),
    ],
)
def test_a_wrong_command_line_is_one_sentence_and_exit_code_2(words, said, capsys):
    code, out, error = run(capsys, *words.split())
    assert code == 2 and said in error and not out
    if words != "ascend":  # a group alone shows its help
        assert error.startswith("calib8: error: ") and error.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--calibrator entropy2", "--method entropy-tensorrt (with --batch-size)"),
        ("--calibrator legacy", "--method legacy"),
        ("--order-independent", "--method entropy"),
    ],
)
def test_a_flag_that_is_gone_names_what_took_its_place(words, said, capsys):
    code, _, error = run(capsys, "calibrate", "m.onnx", "--images", "p", *words.split())
    assert code == 1 and said in error and error.count("\n") == 1
    shown = run(capsys, "calibrate", "--help")[1]
    assert not re.search(rf"{words.split()[0]}(?![\w-])", shown)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("cache check x --parser onnx --verbose", "--parser and --verbose go with --model"),
        ("ascend config x -o y --from z --batch-num 2", "--batch-num goes with"),
        ("ascend config x -o y --from z --symmetric", "--symmetric goes with"),
    ],
)
def test_an_option_that_needs_another_is_refused_without_it(words, said, capsys):
    code, _, error = run(capsys, *words.split())
    assert code == 1 and said in error and error.count("\n") == 1


def test_a_value_that_breaks_an_options_rule_is_refused_from_python_too():
    for wrong, said in (
        (lambda: OnnxRuntime(weight_bits=6), "weight_bits of OnnxRuntime is 7 or more, got 6"),
        (lambda: OnnxRuntime(weight_bits=9), "is 8 or less"),
        (lambda: TensorRT(max_batch=0), "is 1 or more"),
        (lambda: TensorRT(workspace_mib=0), "is 1 or more"),
        (lambda: TensorRT(calibrator="x"), "is one of entropy2, entropy, minmax, legacy"),
        (lambda: Ascend(aipp=True, source_color="hsv"), "is one of rgb, bgr, nv12, nv21"),
    ):
        with pytest.raises(ConfigError) as caught:
            wrong()
        assert said in str(caught.value)


# -- through the commands ---------------------------------------------------------------------


def test_keep_float_takes_patterns_in_every_command(small_cnn, pictures, tmp_path, capsys):
    listed = tmp_path / "float.txt"
    listed.write_text("# the head\nop:Gemm\n")
    words = ("--keep-float", "Conv_c[12]", "--keep-float", f"@{listed}")
    _, out, _ = run(
        capsys, "inspect", small_cnn, "--all", "--target", "onnxruntime,tensorrt", *words
    )
    kept = {line.split()[2] for line in out.splitlines() if "as asked" in line}
    assert kept == {"Conv_c1", "Conv_c2", "Gemm_logits"}
    assert "on onnxruntime" in out and "on tensorrt" in out
    images = ("--images", pictures, "--size", "16x16", "--limit", "4")
    out = tmp_path / "out"
    code, _, _ = run(capsys, "build", small_cnn, *images, "--out", out, "--duration", "0", *words)
    assert code == 0
    made = onnx.load(out / "small_cnn.int8.onnx").graph
    quantized = {node.output[0] for node in made.node if node.op_type == "DequantizeLinear"}
    convs = {node.name: node.input[0] in quantized for node in made.node if node.op_type == "Conv"}
    assert convs == {"Conv_c1": False, "Conv_c2": False, "Conv_c3": True}
    cache = ("-o", tmp_path / "c.cache", "--keep-float", "Convx*")
    code, _, error = run(capsys, "calibrate", small_cnn, *images, *cache)
    assert code == 1 and "'Convx*'" in error


def test_inspect_refuses_options_of_a_model_for_a_cache(tmp_path, capsys):
    cache = tmp_path / "m.cache"
    cache.write_bytes(b"TRT-8503-EntropyCalibration2\nx: 3c008912\n")
    assert run(capsys, "inspect", cache)[0] == 0
    code, _, error = run(capsys, "inspect", cache, "--target", "ascend", "--all")
    assert code == 1 and "go with a model" in error


def test_bench_refuses_what_no_engine_makes_use_of(small_cnn, capsys):
    words = ("bench", small_cnn, "--duration", "0", "--warmup", "0", "--seed", "3")
    code, out, _ = run(capsys, *words, "--streams", "2")
    assert code == 0 and "2 streams at once" in out
    code, _, error = run(capsys, *words, "--cuda-graph")
    assert code == 1 and ".engine, .plan" in error


# -- a new target -----------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Toy:
    """A target as CONTRIBUTING tells to write it."""

    steps: int = option(4, help="Steps of the toy.", least=1, places=True, observes=True)
    tag: tuple[str, ...] = option((), help="A tag of the toy.")
    rate: float = option(0.5, help="Rate of the toy.", most=1)
    turbo: bool = option(True, help="Let the toy run fast.", runs=True)
    name: str = "toy"
    engines: ClassVar[tuple[str, ...]] = (".toy",)
    writes: ClassVar[tuple[str, ...]] = (".toy",)
    runs_here: ClassVar[bool] = False
    own_method: ClassVar[str] = ""
    float_way: ClassVar[str] = ""
    opened: ClassVar[list[object]] = []

    def __post_init__(self):
        check(self)

    def wanted(self, model, float_nodes):
        return OnnxRuntime().wanted(model, float_nodes)

    def plan(self, model, float_nodes=()):
        return OnnxRuntime().plan(model, float_nodes)

    def demand(self, subject):
        return subject.histograms(self.wanted(subject.model, subject.float_nodes))

    def trial(self, request):
        return OnnxRuntime().trial(request)

    def build(self, request):
        path = request.folder / f"{request.name}.toy"
        path.write_bytes(request.model.SerializeToString())
        return Built(
            target=self.name, engine=path, runnable=path, files={"toy": path},
            decisions=self.plan(request.model).decisions,
            notes=(f"{self.steps} steps, {self.tag}",),
        )  # fmt: skip

    def at_hand(self):
        return "toys"

    def open(self, engine, *, threads=None):
        self.opened.append(self)
        return OrtSession.open(engine.read_bytes(), threads=threads)


@pytest.fixture
def toy(monkeypatch):
    """The row, and the commands made anew from the table."""
    monkeypatch.setitem(TARGETS, "toy", Toy)
    for name in MADE:
        monkeypatch.delitem(sys.modules, f"deploy.commands.{name}", raising=False)


@pytest.mark.slow
@pytest.mark.usefixtures("toy")
def test_a_toy_target_works_from_the_command_line(small_cnn, tmp_path, capsys):
    _, out, _ = run(capsys, "build", "--help")
    for flag in ("--steps", "--tag", "--rate", "--turbo / --no-turbo"):
        assert flag in out.split("Target toy:")[1]
    assert "onnxruntime, tensorrt, ascend, toy" in " ".join(out.split())
    assert "--steps" in run(capsys, "inspect", "--help")[1]
    assert "--turbo" in run(capsys, "bench", "--help")[1]
    assert "--turbo" not in run(capsys, "calibrate", "--help")[1]
    np.save(tmp_path / "x.npy", np.ones((2, 3, 16, 16), np.float32))
    feed = ("--images", tmp_path / "x.npy", "--target", "toy")
    words = ("--steps", "7", "--tag", "a", "--tag", "b", "--rate", "1", "--no-turbo")
    code, out, error = run(
        capsys, "build", small_cnn, *feed, *words, "--out", tmp_path, "--duration", "0"
    )
    assert code == 0, error
    assert "7 steps, ('a', 'b')" in " ".join(out.split())
    code, out, _ = run(capsys, "inspect", small_cnn, "--target", "toy", "--steps", "2")
    assert code == 0 and "on toy" in out
    code, out, _ = run(capsys, "calibrate", small_cnn, *feed, "-o", tmp_path / "t.cache")
    assert code == 0 and "observations" in out
    Toy.opened.clear()
    code, out, error = run(
        capsys, "bench", tmp_path / "small_cnn.toy", "--duration", "0", "--no-turbo"
    )
    assert code == 0 and "small_cnn.toy" in out, error
    assert Toy.opened and not Toy.opened[0].turbo


@pytest.mark.usefixtures("toy")
@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ("--target onnxruntime --steps 3", 1, "--steps belongs to --target toy"),
        ("--target toy --steps 0", 2, "'--steps'"),
        ("--target toyy", 1, "did you mean 'toy'?"),
    ],
)
def test_a_toy_targets_options_are_held_to_their_rules(words, code, said, capsys):
    got, _, error = run(capsys, *BUILD, *words.split())
    assert got == code and said in error


def test_one_flag_of_two_options_is_refused(toy, monkeypatch, capsys):
    @dataclass(frozen=True, kw_only=True)
    class Clash(Toy):
        soc: str | None = option(None, help="A chip.")
        limits: list[int] = field(default_factory=list)

    monkeypatch.setitem(TARGETS, "toy", Clash)
    code, _, error = run(capsys, *BUILD)
    assert code == 1 and "--soc in Target ascend and in Target toy" in error


def test_a_class_without_options_has_none():
    assert options_of(int) == ()
