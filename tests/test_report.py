"""The report: its values, text and page."""

import base64
import dataclasses
import hashlib
import json
import math
import re
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from calib8 import build
from calibrators.scales import Scale
from deploy.errors import ConfigError
from deploy.machine import this_machine
from deploy.metrics.accuracy import Accuracy
from deploy.metrics.latency import Latency, SpeedUp, Timing, speed_up
from deploy.metrics.output_errors import OutputAccuracy
from deploy.metrics.precision import MeanPrecision
from deploy.report import (
    Report,
    blocks,
    figures,
    parts,
    to_html,
    to_json,
    to_markdown,
    to_screen,
    to_text,
)
from deploy.report.charts import latency_figure, range_bar
from deploy.report.model import Findings, find_rivals, with_speed
from deploy.report.page import POLICY, SCRIPT, STYLE
from deploy.report.report_rows import float_groups, tensor_row, worst_first, worst_rows
from deploy.report.screen import next_steps
from deploy.report.tables import engine_lines
from deploy.report.verdict import Verdict
from deploy.targets import OnnxRuntime
from deploy.targets.base import BuildResult
from deploy.terminal import visible
from deploy.tuning.reasons import NOISE_NOTE

HOSTILE = "\x1b[31m\u202e\udcff<script>alert('x')</script>|`*_[a](b)&\"\n# no heading"


def latency_of(samples, **changes):
    timing = Timing.of(samples)
    result = Latency(
        queries=len(samples),
        warmup_queries=5,
        total_host_walltime_s=sum(samples) / 1e3,
        throughput_qps=1.0,
        latency=timing,
        host=timing,
        samples_ms=samples,
    )
    return dataclasses.replace(result, **changes)


def latency(ms):
    samples = (*(ms * (1 + 0.01 * (i % 7)) for i in range(200)), ms * 50)
    return latency_of(samples, warnings=("unstable",))


def errors(name, sqnr_db, cosine=0.9, cosine_min=0.8, largest=1.0):
    return OutputAccuracy(
        name=name, sqnr_db=sqnr_db, cosine_mean=cosine, cosine_min=cosine_min, max_abs_error=largest
    )


def tensor(name, sqnr_db=None, lo=-1, hi=1):
    return parts.TensorRow(
        name=name,
        observed_min=lo,
        observed_max=hi,
        lo=lo,
        hi=hi,
        amax=1,
        method="mse",
        sqnr_db=sqnr_db,
    )


def float_node(name, op, reason, precision="float32"):
    return parts.NodeRow(name=name, op=op, precision=precision, reason=reason)


def full_report(name="logits"):
    output = errors(name, math.inf, 0.9991, 0.98, 0.25)
    accuracy = Accuracy(
        samples=400,
        outputs=(output,),
        top1_reference=0.9225,
        top1_candidate=0.92,
        top1_agreement=0.99,
    )
    scale = Scale(lo=-1, hi=2, amax=2, observed_min=-1.5, observed_max=4, method="entropy")
    row = tensor_row(name, scale, clipped=0.01, sqnr_db=output.sqnr_db)
    split = parts.SplitRow(
        number=1,
        float_layers=2,
        layers=9,
        time=0.5,
        size=0.3,
        sqnr_db=20.0,
        figure=name,
        level=name,
    )
    exact_split = dataclasses.replace(split, number=2, time=0.7, sqnr_db=math.inf, taken=True)
    target = parts.TargetPart(
        name="onnxruntime",
        method="entropy",
        layers=(output,),
        nodes=(parts.NodeRow(name="c", op="Conv"), float_node(name, "Softmax", name)),
        tensors=(row,),
        files=(parts.FileRow(role=name, path=name, size_bytes=1000),),
        search=parts.SearchPart(reused=False, probes=3, settled=name, front=(split, exact_split)),
        notes=(f"{name} is noted",),
    )
    group = parts.GroupRow(variant=name, statistic="histogram", tensors=2, reused=False)
    return Report(
        title=f"{name} in int8",
        model=parts.ModelPart(path=name, inputs=(f"{name} float32 [N,3]",)),
        feed=parts.FeedPart(source=name, samples=100, preprocess={name: [0.5]}, skipped=(name,)),
        calibration=parts.CalibrationPart(
            method="entropy", reason=name, seconds=1.5, groups=(group,)
        ),
        targets=(target,),
        engines=(
            parts.EngineRow(label="FP32", reference=True, size_bytes=4000, latency=latency(2.0)),
            parts.EngineRow(
                label=f"int8 {name}",
                path=name,
                size_bytes=1000,
                latency=latency(1.0),
                accuracy=accuracy,
                threads=2,
                load_ms=3.0,
            ),
        ),
        machine=this_machine(),
        files=(parts.FileRow(role="report", path=name), parts.FileRow(role="plan", path=name)),
        work=parts.WorkPart(
            decodes=500,
            calibration_runs={name: 100},
            reference_runs=400,
            engine_runs={"onnxruntime": 400},
        ),
        notes=(name,),
    )


def target_report(**fields):
    return Report(targets=(parts.TargetPart(name="onnxruntime", **fields),))


def three_target_report():
    """Two targets that differ in method and coverage, and one that failed."""
    ranges = {
        name: Scale(lo=-1, hi=2, amax=2, observed_min=-1, observed_max=amax, method=method)
        for name, amax, method in (("t", 4, "mse"), ("u", 5, "IFMR"))
    }
    relu = float_node("r", "Relu", "the node before it is float")
    add = float_node("a", "Add", "the chip has none")
    targets = (
        parts.TargetPart(
            name="onnxruntime",
            method="mse",
            nodes=(*(parts.NodeRow(name=f"n{op}", op=op) for op in "VWXYZ"), relu),
            tensors=(tensor_row("t", ranges["t"]),),
            files=(parts.FileRow(role="int8 engine", path="m.int8.onnx"),),
        ),
        parts.TargetPart(
            name="ascend",
            method="ARQ and IFMR",
            tensors=(tensor_row("u", ranges["u"]),),
            nodes=(parts.NodeRow(name="c", op="Conv"), add, relu),
            files=(parts.FileRow(role="record", path="m_record.txt"),),
            notes=("set --soc",),
        ),
        parts.TargetPart(name="tensorrt", error="a cache must be writable, got <none>"),
    )
    accuracy = full_report().engines[1].accuracy
    engines = (
        parts.EngineRow(label="FP32", reference=True, size_bytes=4000),
        parts.EngineRow(
            label="onnxruntime", path="m.int8.onnx", size_bytes=1000, accuracy=accuracy
        ),
        parts.EngineRow(label="ascend", target="ascend", accuracy=accuracy),
        parts.EngineRow(label="tensorrt", target="tensorrt"),
    )
    mse = parts.CalibrationPart(method="mse")
    return Report(title="three", targets=targets, engines=engines, calibration=mse)


class Page(HTMLParser):
    """Every tag, attribute and text of a page; refuses tags that do not close in order."""

    VOID = frozenset({"meta", "img", "line", "rect", "path", "br", "wbr"})

    def __init__(self, text):
        super().__init__()
        self.tags = []
        self.attributes = []
        self.texts = []
        self.open = []
        self.broken = False  # whether the text so far ends where a line may be broken
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        self.broken = tag == "wbr"
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self.open.pop() == tag
        self.broken = False

    def handle_data(self, data):
        self.texts[-1:] = [self.texts[-1] + data] if self.broken else [*self.texts[-1:], data]


def test_json_has_schema_and_plain_types():
    data = to_json(full_report())
    text = json.dumps(data, allow_nan=False)
    assert data["schema"] == "calib8-report/2"
    assert json.loads(text)["engines"][1]["accuracy"]["outputs"][0]["sqnr_db"] == "inf"
    assert json.loads(text)["targets"][0]["tensors"][0]["clipped"] == 0.01
    assert "samples_ms" not in text
    feed = parts.FeedPart(
        source="s", samples=1, preprocess={"mean": np.float32(0.5), "at": Path("a/b")}
    )
    plain = to_json(Report(feed=feed))["feed"]["preprocess"]
    assert json.loads(json.dumps(plain)) == plain == {"mean": 0.5, "at": "a/b"}


def test_empty_report_has_every_form():
    report = Report(title="nothing")
    assert to_json(report) == {"schema": "calib8-report/2", "title": "nothing"}
    assert to_screen(report) == "nothing\n"
    assert to_markdown(report) == "# nothing\n"
    assert to_text(report) == "nothing\n"
    assert Page(to_html(report)).texts.count("nothing") == 2


@pytest.mark.parametrize(
    "part",
    [
        "model",
        "feed",
        "calibration",
        "targets",
        "engines",
        "machine",
        "files",
        "work",
        "notes",
    ],
)
def test_every_part_can_stand_alone(part):
    report = Report(**{part: getattr(full_report(), part)})
    for form in (to_screen, to_text, to_markdown, to_html):
        assert form(report)
    Page(to_html(report))
    json.dumps(to_json(report), allow_nan=False)


def test_html_page_fetches_nothing():
    text = to_html(full_report())
    page = Page(text)
    assert not {"link", "img", "iframe", "object"} & set(page.tags)
    assert page.tags.count("script") == 1
    assert not [k for k, _ in page.attributes if k in ("src", "style") or k.startswith("on")]
    links = {value for key, value in page.attributes if key == "href"}
    ids = [value for key, value in page.attributes if key == "id"]
    assert len(ids) == len(set(ids))
    assert {f"#{anchor}" for anchor in ids} == links
    assert "url(" not in text
    assert "@import" not in text
    assert "http:" not in text
    # latency in two parts, ranges, front with three points
    assert page.tags.count("svg") == 7


def test_hostile_names_stay_text():
    page = Page(to_html(full_report(HOSTILE)))
    assert page.tags.count("script") == 1
    assert page.texts.count(SCRIPT) == 1
    written = "\n".join(map(visible, HOSTILE.split("\n")))
    assert sum(written in text for text in page.texts) >= 8
    markdown = to_markdown(full_report(HOSTILE))
    assert not re.search(r"^# no heading", markdown, re.MULTILINE)
    assert not [line for line in markdown.splitlines() if line[:1] == "|" and "<script>" in line]
    assert "\x1b" not in to_screen(full_report(HOSTILE))
    for form in (to_html, to_markdown, to_text):
        assert all(line.isprintable() for line in form(full_report(HOSTILE)).split("\n"))
    for form in (
        to_screen,
        to_text,
        to_markdown,
        to_html,
        lambda report: json.dumps(to_json(report)),
    ):
        form(full_report(HOSTILE)).encode("utf-8")


def test_long_sections_are_folded():
    nodes = tuple(float_node(f"n{i}", "Op", "r") for i in range(9))
    tensors = tuple(tensor(f"t{i}") for i in range(41))
    page = Page(to_html(target_report(nodes=nodes, tensors=tensors)))
    assert page.tags.count("details") == 3  # both sections, and the cell of names
    assert "Tensors (41)" in page.texts
    assert "16" in page.texts  # rows that are not printed
    assert "n0, n1, n2, n3, n4, n5, n6, n7, n8" in page.texts


def test_markdown_rows_have_equal_cell_counts():
    tables: list[list[int]] = [[]]
    for line in to_markdown(full_report(HOSTILE)).splitlines():
        if line.startswith("| "):
            tables[-1].append(len(re.findall(r"(?<!\\)\|", line)))
        elif tables[-1]:
            tables.append([])
    assert len(tables) > 5
    assert all(len(set(cells)) <= 1 for cells in tables)


def test_markdown_escapes_only_marks_that_format():
    command = "pip 'tensorrt>=10,<11'; net_a.sh _x_ a__b *.sh <b> </b> <!-- -->"
    escaped = r"pip 'tensorrt>=10,<11'; net_a.sh \_x\_ a\_\_b \*.sh &lt;b> &lt;/b> &lt;!-- -->"
    assert blocks.escape_markdown(command) == escaped
    assert blocks.escape_markdown("> x") == "&gt; x"


def test_text_has_everything_without_escapes():
    command = "pip install 'tensorrt>=10,<11'; make\\_[x]_*.sh | #`"
    text = to_text(full_report(command))
    markdown = to_markdown(full_report(command))
    assert command in text
    assert text.count(command) == markdown.count(blocks.escape_markdown(command))
    assert "\n|" not in text
    titles = re.findall("^## (.*)$", markdown.replace("\\", ""), re.MULTILINE)
    assert re.findall("^(.*)\n=+$", text, re.MULTILINE) == titles


def test_screen_shows_speed_size_and_accuracy():
    fp32, int8 = full_report().engines
    timed_int8 = with_speed(int8, find_rivals((fp32, int8), int8))
    engines = fp32, dataclasses.replace(timed_int8, verdict=Verdict("good", ()))
    text = to_screen(dataclasses.replace(full_report(), engines=engines))
    assert "2.00x (2.00 to 2.00)" in text
    assert "4.00x smaller" in text
    assert "-0.25 points" in text
    assert len(text.splitlines()) <= 16
    assert "Ship          logits" in text
    assert "Next          calib8 bench logits\n" in text  # the model was in memory
    assert "entropy, calibrated in 1.5 s: logits" in to_markdown(full_report())


@pytest.mark.parametrize("level", ["keep FP32", "unusable"])
def test_float_model_ships_where_int8_is_not_worth_it(level):
    fp32, int8 = full_report("m.onnx").engines
    int8 = dataclasses.replace(int8, path="o/m.int8.onnx", verdict=Verdict(level, ()))
    text = to_screen(dataclasses.replace(full_report("m.onnx"), engines=(fp32, int8)))
    assert "Ship          m.onnx  (the float model; the engine is o/m.int8.onnx)" in text


@pytest.mark.parametrize(
    ("float_path", "shipped", "against"),
    [
        (
            "net.onnx",
            "net.onnx  (the float model; the engine is m.int8.onnx)",
            " --against net.onnx",
        ),
        ("m.onnx", "m.int8.onnx", ""),  # built without --float
    ],
)
def test_qdq_model_is_no_float_model(float_path, shipped, against):
    report = full_report("m.onnx")
    fp32, int8 = report.engines
    fp32 = dataclasses.replace(fp32, path=float_path)
    int8 = dataclasses.replace(int8, path="m.int8.onnx", verdict=Verdict("keep FP32", ()))
    request = parts.RequestPart(is_quantized=True)
    text = to_screen(dataclasses.replace(report, engines=(fp32, int8), request=request))
    assert f"Ship          {shipped}\n" in text
    assert f"run it: calib8 bench m.int8.onnx{against}\n" in text


@pytest.mark.parametrize(
    ("verdict", "speed", "effort", "message"),
    [
        (Verdict("good", ()), (1.5, 1.4, 1.6), 1, "calib8 bench m.int8.onnx --against m.onnx"),
        (
            Verdict("good", ()),
            (1.5, 0.9, 2),
            1,
            "on a quiet machine: calib8 bench m.int8.onnx --against m.onnx",
        ),
        (
            Verdict("keep FP32", ()),
            (0.9, 0.8, 1),
            1,
            "on the CPU that will run it: calib8 bench",
        ),
        (
            Verdict("unusable", ()),
            (2, 2, 2),
            0,
            "calib8 build --config o/calib8.toml --effort 1",
        ),
        (
            Verdict("doubtful", ()),
            (2, 2, 2),
            1,
            "calib8.toml --prefer accuracy --effort 2",
        ),
        (Verdict("unusable", (), gated=True), (2, 2, 2), 1, "calib8 explain o"),
        (
            Verdict("unusable", (), blames_float=True),
            (2, 2, 2),
            1,
            "calib8.toml --preprocess NAME, or --mean",
        ),
        (
            Verdict("doubtful", (), missing_calibration="100 or more"),
            (2, 2, 2),
            1,
            "with 100 or more images: calib8 build --config o/calib8.toml --images FOLDER",
        ),
    ],
)
def test_every_verdict_has_a_next_step(verdict, speed, effort, message):
    report = full_report("m.onnx")
    (target,), (fp32, int8) = report.targets, report.engines
    ratio, low, high = speed
    speed_up = SpeedUp(ratio=ratio, low=low, high=high)
    row = dataclasses.replace(int8, path="m.int8.onnx", verdict=verdict, speed=speed_up)
    paths = {"report": "o/report.html", "options": "o/calib8.toml"}
    files = tuple(parts.FileRow(role=role, path=path) for role, path in paths.items())
    request = parts.RequestPart(effort={target.name: effort})
    report = dataclasses.replace(report, engines=(fp32, row), files=files, request=request)
    (step,) = [*next_steps(report)] or [""]
    assert message in step
    assert bool(message) == bool(step)


@pytest.mark.parametrize(
    ("size", "message"), [(5000, "1.25x larger"), (4001, ""), (2000, "2.00x smaller")]
)
def test_size_change_is_larger_or_smaller(size, message):
    """As of weights that a layer in float reads too."""
    reference, *engines = full_report().engines
    engines = (reference, *(dataclasses.replace(e, size_bytes=size) for e in engines))
    report = dataclasses.replace(full_report(), engines=engines)
    screen = to_screen(report)
    page = to_html(report)
    assert message in screen
    assert message[6:] in page
    other_words = {"larger", "smaller"} - {message[6:]}
    assert not any(word in screen or f"{word} on disk" in page for word in other_words)


def test_every_form_shows_every_target():
    report = three_target_report()
    text = to_screen(report)
    markdown = to_markdown(report)
    page = to_html(report)
    assert "| onnxruntime | 5 of 6 nodes int8 | V 1, W 1, X 1, Y 1, Z 1 | mse |" in markdown
    assert "| ascend | 1 of 3 nodes int8 | Conv 1 | ARQ and IFMR |" in markdown
    assert "Calibration: calibrated" in markdown
    assert "the chip has none" in markdown
    assert "ascend: set --soc" in markdown
    assert len(text.splitlines()) <= 24
    assert [file.role for file in report.written] == ["int8 engine", "record"]
    ort, ascend = markdown.split("## Tensors of onnxruntime")[1].split("## Tensors of ascend")
    assert "| t |" in ort
    assert "mse" in ort
    assert "IFMR" not in ort
    assert "| u |" in ascend
    assert "IFMR" in ascend
    assert "mse" not in ascend.split("##")[0]
    assert "Tensors of onnxruntime (1)" in page
    assert "Tensors of ascend (1)" in page
    names = [t.get("tensors", [{}])[0].get("name") for t in to_json(report)["targets"]]
    assert names == ["t", "u", None]


def test_failed_target_row_has_its_error():
    report = three_target_report()
    assert report.failed
    assert not full_report().failed
    error = "a cache must be writable, got <none>"
    message = f"tensorrt: {error}"
    note = f"tensorrt failed: {error}"
    assert f"Failed        {message}" in to_screen(report)
    (size,) = [line for line in to_screen(report).splitlines() if line.startswith("Size")]
    assert size.split()[-4:-2] == ["-", "failed"]
    assert blocks.escape_markdown(note) in to_markdown(report)
    page = Page(to_html(report))
    assert ("class", "troubles") in page.attributes
    assert note in page.texts
    assert to_json(report)["targets"][2]["error"] == error


def test_precisions_are_counted_separately():
    nodes = (
        *(parts.NodeRow(name=f"c{i}", op="Conv") for i in range(2)),
        parts.NodeRow(name="g", op="Gemm", precision="int16"),
        float_node("s", "Softmax", "no kernel", "float16"),
    )
    assert [node.quantized for node in nodes] == [True, True, True, False]
    text = to_markdown(target_report(nodes=nodes))
    assert "| 2 of 4 nodes int8, 1 int16 | Conv 2, Gemm 1 |" in text
    assert "| Softmax | s | no kernel |" in text
    assert "3 / 4" in to_html(target_report(nodes=nodes))


def test_work_of_a_build_is_reported():
    report = full_report()
    assert "Work" not in to_screen(report)
    text = to_markdown(report)
    assert "- 500 images decoded\n- 100 calibration inferences (logits 100)\n" in text
    assert "- 400 reference inferences\n- 400 engine inferences (onnxruntime 400)" in text
    assert "Observed: logits, histogram: 2 tensors, observed now" in text
    assert to_json(report)["work"] == {
        "decodes": 500,
        "calibration_runs": {"logits": 100},
        "reference_runs": 400,
        "engine_runs": {"onnxruntime": 400},
    }
    assert "\n## Work\n" in to_markdown(report)
    assert ">Work</h2></summary>" in to_html(report)


def test_partly_reused_cache_is_reported():
    groups = tuple(
        parts.GroupRow(variant=v, statistic="histogram", tensors=1, reused=v == "folded")
        for v in ("folded", "unfolded")
    )
    part = parts.CalibrationPart(method="mse", groups=groups, reason="ascend is new")
    text = to_markdown(Report(calibration=part))
    assert "reused in part: ascend" in text
    assert "folded, histogram: 1 tensor, reused" in text
    assert "unfolded, histogram: 1 tensor, observed now" in text


def test_repr_is_screen_and_notebook_iframe():
    assert repr(full_report()) == to_screen(full_report()).rstrip("\n")
    assert len(repr(full_report(HOSTILE)).splitlines()) < 60
    page = Page(full_report(HOSTILE)._repr_html_())
    assert page.tags == ["iframe"]
    iframe = dict(page.attributes)
    assert iframe["srcdoc"] == to_html(full_report(HOSTILE))
    assert iframe["sandbox"] == ""


def test_engine_is_found_by_name(wording):
    rows = [
        parts.EngineRow(label="FP32", reference=True),
        parts.EngineRow(label="FP16", target="tensorrt", baseline=True),
        parts.EngineRow(label="int8", target="tensorrt"),
    ]
    report = Report(engines=tuple(rows))
    assert [report.engine(name) for name in ("FP32", "FP16", "int8")] == rows
    assert report.engine("tensorrt") is rows[2]
    with pytest.raises(ConfigError) as refusal:
        report.engine("ascend")
    wording.check(refusal.value)


def test_repr_of_broken_report_never_fails():
    broken = Report(title="broken", engines=(None,))
    assert "Report" in repr(broken)
    assert broken._repr_html_().startswith("<pre>&lt;")


class HalvedRanges(OnnxRuntime):
    """ONNX Runtime under another name, which says that its files hold two halved ranges."""

    def build(self, request):
        kept = dict(list(request.ranges.find(self.demand(request.subject)).scales.items())[:2])
        kept = {n: dataclasses.replace(s, hi=s.hi / 2, method="half") for n, s in kept.items()}
        return dataclasses.replace(super().build(request), method="halving", ranges=kept)


class UnseenRanges(HalvedRanges):
    """Ranges of values that were not seen."""

    def build(self, request):
        found = super().build(request)
        moved = {
            n: dataclasses.replace(s, observed_max=s.observed_max * 2)
            for n, s in found.ranges.items()
        }
        return dataclasses.replace(found, ranges=moved)


class FailingTarget(OnnxRuntime):
    def build(self, request):
        why = "a chip must be there, got none"
        return BuildResult(target=self.name, engine=None, runnable=None, files={}, error=why)


@pytest.mark.slow
def test_report_shows_ranges_targets_really_used(small_cnn, pictures, tmp_path):
    targets = [
        HalvedRanges(name="narrow"),
        UnseenRanges(name="elsewhere"),
        FailingTarget(name="broken"),
    ]
    report = build(small_cnn, pictures, targets=targets, out=tmp_path, duration_s=0)
    halved, unseen, failing = report.targets
    assert report.failed
    assert failing.error
    assert not failing.files
    assert not failing.nodes
    assert halved.method == "halving"
    assert len(halved.tensors) == 2
    assert {row.method for row in halved.tensors} == {"half"}
    assert all(0 < row.clipped < 1 for row in halved.tensors)  # of the statistics, at these ranges
    assert [row.clipped for row in unseen.tensors] == [None, None]
    assert halved.layers
    assert not failing.layers
    assert report.calibration.method == ""  # mse was the default, and no target used it
    document = json.loads((tmp_path / "report.json").read_text())
    assert [target["name"] for target in document["targets"]] == ["narrow", "elsewhere", "broken"]
    assert "halving, calibrated" in to_markdown(report)
    assert "Failed        broken: a chip must be there, got none" in repr(report)


def test_gpu_engine_has_no_cpu_speedup():
    report = full_report("m")
    reference, engine = report.engines
    assert "2.00x" in to_html(report)
    on_gpu = dataclasses.replace(latency(1.0), gpu_compute=latency(1.0).latency)
    engines = (reference, dataclasses.replace(engine, latency=on_gpu))
    for form in (to_screen, to_html):
        text = form(dataclasses.replace(report, engines=engines))
        assert "2.00x" not in text
        assert "faster" not in text


def test_worst_of_several_engines_is_named():
    def accuracy(share):
        precision = MeanPrecision(
            reference=0.95, candidate=share, reference_50=0.95, candidate_50=share, objects=9
        )
        figures = full_report().engines[1].accuracy
        return dataclasses.replace(figures, top1_candidate=share, precision=precision)

    engines = (
        parts.EngineRow(label="FP32", reference=True),
        *(parts.EngineRow(label=str(s), accuracy=accuracy(s)) for s in (0.93, 0.9, 0.92)),
    )
    screen = to_screen(Report(engines=engines))
    assert "worst -2.25 points" in screen
    assert "worst -5.00 points" in screen


def test_warnings_are_unique_and_name_engines():
    report = Report(notes=("same", "same"), engines=full_report().engines)
    assert report.warnings == ("same", "FP32, int8 logits: unstable")
    accuracy = full_report().engines[1].accuracy
    engines = [
        parts.EngineRow(label=s, accuracy=accuracy, path=p) for s, p in (("a", "a.om"), ("b", None))
    ]
    (warning,) = Report(engines=tuple(engines)).warnings
    assert warning.startswith("b: not run on its device")


def timed_engines(*is_cpu_time):
    """A report with an engine for each, timed by either clock."""
    engines = [
        parts.EngineRow(label=f"engine{n}", latency=latency_of((2.0, 3.0) * 60, is_cpu_time=is_cpu))
        for n, is_cpu in enumerate(is_cpu_time)
    ]
    return Report(engines=(*engines, parts.EngineRow(label="untimed")))


@pytest.mark.parametrize("form", [to_screen, to_markdown, to_html])
def test_time_is_named_by_its_clock(form):
    for report, name, missing_name in (
        (timed_engines(True, True), "CPU time p50", "Latency p50"),
        (timed_engines(False, False), "Latency p50", "CPU time p50"),
        (timed_engines(True, False), "Latency p50", "CPU time p50"),
    ):
        assert name in form(report)
        assert missing_name not in form(report)


def test_caption_names_the_clock_of_its_engines():
    caption = "of every measured iteration"
    assert f"CPU time {caption}" in to_html(timed_engines(True, True))
    assert f"Latency {caption}" in to_html(timed_engines(False))


def test_note_names_engines_timed_in_cpu_time():
    (note,) = timed_engines(True, False, True).warnings
    assert note.startswith("engine0, engine2: ")
    assert "CPU time" in note


def test_speedup_interval_comes_from_ten_stretches():
    """Without the outermost of them; the fastest runs widen it where p50 compares waiting."""
    fp32 = latency_of((2.0,) * 100)
    steady = speed_up(fp32, latency_of(tuple([1.0] * 90 + [4.0] * 10)))
    assert (steady.ratio, steady.low, steady.high) == (2.0, 2.0, 2.0)
    uneven = speed_up(fp32, latency_of(tuple([1.0] * 50 + [1.25] * 50)))
    assert (uneven.low, uneven.high, uneven.is_noisy) == (1.6, 2.0, False)
    waiting = speed_up(latency_of(tuple([2.0] + [10.0] * 99)), latency_of((1.0,) * 100))
    assert (waiting.ratio, waiting.low) == (10.0, 2.0)
    assert speed_up(fp32, latency_of((1.0, 3.0) * 50)).is_noisy


def test_latency_figure_counts_undrawn_iterations():
    text = latency_figure(full_report().engines)
    assert "2 slower iterations not drawn" in text
    assert text.count("<path") == 2
    assert latency_figure([parts.EngineRow(label="unmeasured")]) == ""
    assert "NaN" not in latency_figure([parts.EngineRow(label="one", latency=latency_of((1.0,)))])


def test_few_iterations_have_no_curve():
    times_ms = (1.0,) * 9 + (40.0,)
    text = latency_figure([parts.EngineRow(label="slow", latency=latency_of(times_ms))])
    assert "<path" not in text
    assert "1 slower iteration not drawn" in text


@pytest.mark.parametrize("ends", [(0.0, 0.0), (math.nan, 1.0), (-math.inf, 1.0)])
def test_range_bar_needs_a_finite_width(ends):
    row = dataclasses.replace(tensor("dead", None, *ends), lo=0, hi=0, amax=0)
    assert range_bar(row) == ""
    to_html(target_report(tensors=(row,)))


@pytest.mark.parametrize(
    ("figure", "value", "text"),
    [
        (figures.milliseconds, 0.0376, "0.0376 ms"),
        (figures.milliseconds, 0.5, "0.500 ms"),
        (figures.milliseconds, 12.34, "12.3 ms"),
        (figures.milliseconds, 1234.5, "1234 ms"),
        (figures.milliseconds, None, "-"),
        (figures.milliseconds, 0.0, "0 ms"),
        (figures.real, -0.0, "0"),
        (figures.size, 0, "0 B"),
        (figures.size, 1000, "1000 B"),
        (figures.size, 233528, "228 KiB"),
        (figures.size, 5 << 30, "5 GiB"),
    ],
)
def test_milliseconds_and_sizes_are_formatted(figure, value, text):
    assert figure(value) == text


@pytest.mark.parametrize("values", [(math.nan, 30.0), (30.0, math.nan)])
def test_nan_of_one_output_stays_visible(values):
    outputs = tuple(errors(str(v), v, v, v, v) for v in values)
    engine = parts.EngineRow(label="int8", accuracy=Accuracy(samples=1, outputs=outputs))
    assert to_screen(Report(engines=(engine,))).count("NaN") == 3


def test_tensors_are_listed_worst_first():
    sqnr_by_name = {"a": 30.0, "b": None, "c": math.nan, "d": 9.5, "e": math.inf, "f": 9.5}
    rows = tuple(tensor(name, sqnr_db) for name, sqnr_db in sqnr_by_name.items())
    assert [row.name for row in worst_first(rows)] == list("cdfaeb")
    assert [row.name for row in worst_rows(rows, 5)] == list("cdfa")
    assert [row.name for row in worst_rows(rows, 2)] == list("cd")
    report = target_report(tensors=rows)
    assert re.findall(r'<td data-head="tensor">(.)</td>', to_html(report)) == list("cdfaeb")
    assert re.findall(r"^\| (.) \|", to_markdown(report), re.MULTILINE) == list("cdfaeb")
    (target,) = to_json(report)["targets"]
    assert [row["name"] for row in target["tensors"]] == list("abcdef")  # the model's order


def test_worst_layers_name_their_target():
    layers = tuple(errors(f"l{i}", float(i)) for i in range(20))
    targets = tuple(parts.TargetPart(name=name, layers=layers) for name in ("x", "y"))
    for count, row_limit in ((1, 10), (2, 5)):
        page = to_html(Report(targets=targets[:count]))
        (shown,) = re.findall(r'<h2 id="\S+">Worst layers<.*?</section>', page, re.DOTALL)
        assert shown.count("<tr>") == 1 + count * row_limit
        assert ('data-head="on">y<' in shown) == (count == 2)


def test_float_nodes_are_grouped_by_cost():
    rows = [
        *(float_node(f"s{i}", "Shape", "Shape is not run in int8 on x") for i in range(9)),
        *(float_node(f"u{i}", "Add", f"/a/b_{i} is not float32") for i in range(5)),
        *(float_node(f"r{i}", "Relu", "an input of it is not int8") for i in range(3)),
        float_node("m", "Mul", "slower in int8: 20 us, 10 us in float"),
        float_node("c", "Conv", "alone in int8 it leaves 30.0 dB of y"),
        float_node("d", "Conv", "alone in int8 it leaves 12.5 dB of y"),
    ]
    groups = float_groups(target_report(nodes=tuple(rows)).targets)
    names_by_group = [next(iter(group.nodes.values())) for group in groups]
    assert [names[0] for names in names_by_group] == ["d", "c", "m", "r0", "s0", "u0"]
    assert groups[-1].reason == "a tensor of it is not float32"
    assert len(names_by_group[-1]) == 5
    for count in (0, len(rows)):
        text = to_markdown(target_report(nodes=tuple(rows[:count])))
        assert (NOISE_NOTE in text) == (count > 0)


def test_contents_link_to_every_section():
    titles = ("Tensors of a", "Tensors  of <a>", "Notes")
    sections = [blocks.Section(title, (blocks.Drawing("<p>x</p>"),), rows=3) for title in titles]
    ids = re.findall(r'<h2 id="(.+?)"', "".join(blocks.sections_html(sections)))
    assert len(set(ids)) == len(sections)
    assert re.findall(r'href="#(.+?)"', blocks.table_of_contents(sections)) == ids
    assert "Tensors  of &lt;a&gt; (3)</h2>" in "".join(blocks.sections_html(sections))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Conv",
        "a b",
        "/model.22/cv2.0/cv2.0.1/act/Mul_output_0",
        "x" * 99,
        "<b>&amp;\n" * 9,
        "output0[4:22]",
        "a very long sentence of short words, of which none must be broken",
    ],
)
def test_breakable_names_keep_their_text(text):
    html = blocks.breakable(text)
    assert unescape(html.replace("<wbr>", "")) == text
    assert "<b>" not in html
    assert max(map(len, [unescape(run) for run in re.split(r"<wbr>| ", html)])) <= 22
    if max(map(len, text.split(" "))) <= 20:
        assert "<wbr>" not in html  # ConstantOfShape stays in one piece


def test_content_policy_names_script_and_style():
    page = to_html(Report(title="x"))
    for tag, text in (("script", SCRIPT), ("style", STYLE)):
        assert re.findall(f"<{tag}>(.*?)</{tag}>", page, re.DOTALL) == [text]
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in POLICY
    assert POLICY.startswith("default-src 'none';")
    assert "unsafe" not in POLICY
    assert f'content="{POLICY}"' in page


def test_long_tables_count_unprinted_rows():
    rows = tuple(tensor(f"t{i}", 1.0) for i in range(blocks.PRINTED + 1))
    short_page = to_html(target_report(tensors=rows[:-1]))
    long_page = to_html(target_report(tensors=rows))
    assert "not printed" not in short_page
    assert '<p class="unprinted">and <span>1</span> more rows' in long_page


def test_speed_is_compared_by_p50():
    samples = (1.0, 1.0, 1.0, 3.0)  # median 1, as trtexec counts the p50; and of two in the middle
    timing = dataclasses.replace(Timing.of(samples), median=1.7)
    fast = latency_of(samples, latency=timing, host=timing)
    slow = dataclasses.replace(fast, latency=dataclasses.replace(timing, p50=2.0, median=9.0))
    rows = (
        parts.EngineRow(label="FP32", reference=True, latency=slow),
        parts.EngineRow(label="q", latency=fast),
    )
    assert "2.00x" in to_screen(Report(engines=rows))
    figure = latency_figure(rows)
    assert "FP32 <b>p50 2.00 ms</b>" in figure
    assert "q <b>p50 1.00 ms</b>" in figure
    assert "1.70" not in to_html(Report(engines=rows))


def test_precision_gain_of_int8_is_positive():
    precision = MeanPrecision(
        reference=0.4, candidate=0.41, reference_50=0.6, candidate_50=0.59, objects=9
    )
    accuracy = Accuracy(samples=4, outputs=(errors("y", 30.0),), precision=precision)
    engines = (
        parts.EngineRow(label="FP32", reference=True),
        parts.EngineRow(label="int8", accuracy=accuracy),
    )
    lines = {line.label: line for line in engine_lines(Findings(engines=engines))}
    assert lines["mAP .50:.95"].cells == ("40.00 %", "41.00 %")
    assert lines["mAP .50:.95"].change == "+1.00 points"
    assert lines["mAP .50"].change == "-1.00 points"
