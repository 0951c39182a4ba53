import dataclasses
import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from calibrators.scales import Scale, Scales
from deploy.machine import this_machine
from deploy.metrics.accuracy import Accuracy, OutputAccuracy
from deploy.metrics.latency import Latency, Timing
from deploy.report import (
    CalibrationPart,
    EngineRow,
    FeedPart,
    FileRow,
    ModelPart,
    NodeRow,
    Report,
    TensorRow,
    figures,
    tensor_rows,
    to_html,
    to_json,
    to_markdown,
    to_screen,
)
from deploy.report.svg import latency_figure, range_bar

HOSTILE = "\x1b[31m\udcff<script>alert('x')</script>|`*_[a](b)&\"\n# no heading"


def latency(ms: float) -> Latency:
    samples = (*(ms * (1 + 0.01 * (i % 7)) for i in range(200)), ms * 50)
    timing = Timing.of(samples)
    return Latency(
        queries=len(samples),
        warmup_queries=5,
        total_host_walltime_s=sum(samples) / 1e3,
        throughput_qps=1e3 / ms,
        latency=timing,
        host=timing,
        samples_ms=samples,
        warnings=("unstable",),
    )


def full(name: str = "logits") -> Report:
    output = OutputAccuracy(
        name=name, sqnr_db=math.inf, cosine_mean=0.9991, cosine_min=0.98, max_abs_error=0.25
    )
    accuracy = Accuracy(
        samples=400,
        outputs=(output,),
        top1_reference=0.9225,
        top1_candidate=0.92,
        top1_agreement=0.99,
    )
    scale = Scale(lo=-1, hi=2, amax=2, observed_min=-1.5, observed_max=4, method="entropy")
    return Report(
        title=f"{name} in int8",
        model=ModelPart(path=name, size_bytes=4000, inputs=(f"{name} float32 [N,3]",)),
        feed=FeedPart(source=name, samples=100, preprocess={name: [0.5]}, skipped=(name,)),
        calibration=CalibrationPart(method="entropy", reason=name, seconds=1.5),
        nodes=(
            NodeRow(name="c", op="Conv", int8=True),
            NodeRow(name=name, op="Softmax", int8=False, reason=name),
        ),
        tensors=tensor_rows(Scales({name: scale}), clipped={name: 0.01}, layers=(output,)),
        engines=(
            EngineRow(label="FP32", reference=True, size_bytes=4000, latency=latency(2.0)),
            EngineRow(label=f"int8 {name}", path=name, size_bytes=1000, latency=latency(1.0),
                      accuracy=accuracy, threads=2, load_ms=3.0),
        ),
        layers=(output,),
        machine=this_machine(),
        files=(FileRow(role=name, path=name, size_bytes=1000),),
        seconds={"observe": 1.0},
        notes=(name,),
    )  # fmt: skip


class Page(HTMLParser):
    """Every tag, attribute and text of a page; refuses tags that do not close in order."""

    VOID = frozenset({"meta", "line", "rect", "path"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.words: list[str] = []
        self.open: list[str] = []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)


def test_json_has_a_schema_and_only_json_types():
    data = to_json(full())
    text = json.dumps(data, allow_nan=False)
    assert data["schema"] == "calib8-report/1"
    assert json.loads(text)["engines"][1]["accuracy"]["outputs"][0]["sqnr_db"] == "inf"
    assert json.loads(text)["tensors"][0]["clipped"] == 0.01
    assert "samples_ms" not in text


def test_json_takes_numpy_scalars_and_paths():
    feed = FeedPart(source="s", samples=1, preprocess={"mean": np.float32(0.5), "at": Path("a/b")})
    plain = to_json(Report(feed=feed))["feed"]["preprocess"]
    assert plain == {"mean": 0.5, "at": "a/b"}
    json.dumps(plain)


def test_an_empty_report_has_every_form():
    report = Report(title="nothing")
    assert to_json(report) == {"schema": "calib8-report/1", "title": "nothing"}
    assert to_screen(report) == "nothing\n"
    assert to_markdown(report) == "# nothing\n"
    assert Page(to_html(report)).words.count("nothing") == 2


@pytest.mark.parametrize("part", ["model", "feed", "calibration", "nodes", "tensors", "engines",
                                  "layers", "machine", "files", "seconds", "notes"])  # fmt: skip
def test_each_part_stands_alone(part):
    report = Report(**{part: getattr(full(), part)})
    for form in (to_screen, to_markdown, to_html):
        assert form(report)
    Page(to_html(report))
    json.dumps(to_json(report), allow_nan=False)


def test_the_page_is_whole_and_fetches_nothing():
    text = to_html(full())
    page = Page(text)
    assert not {"script", "link", "img", "iframe", "object"} & set(page.tags)
    assert not {"src", "href", "onclick"} & {key for key, _ in page.attributes}
    assert "url(" not in text and "@import" not in text and "http" not in text
    assert page.tags.count("svg") == 2  # the latency figure and one tensor


def test_hostile_names_stay_words():
    page = Page(to_html(full(HOSTILE)))
    assert "script" not in page.tags
    written = HOSTILE.replace("\udcff", "?")
    assert sum(written in words for words in page.words) >= 8
    text = to_markdown(full(HOSTILE))
    assert not re.search(r"^# no heading", text, re.MULTILINE)
    for line in text.splitlines():
        if line.startswith("|"):
            assert "<script>" not in line


def test_names_can_be_written_and_do_not_steer_the_terminal():
    for form in (to_screen, to_markdown, to_html):
        form(full(HOSTILE)).encode("utf-8")
    json.dumps(to_json(full(HOSTILE))).encode("utf-8")
    assert "\x1b" not in to_screen(full(HOSTILE))


def test_many_rows_and_names_are_folded():
    nodes = tuple(NodeRow(name=f"n{i}", op="Op", int8=False, reason="r") for i in range(9))
    tensors = tuple(
        TensorRow(name=f"t{i}", observed_min=0, observed_max=1, lo=0, hi=1, amax=1, method="m")
        for i in range(41)
    )
    page = Page(to_html(Report(nodes=nodes, tensors=tensors)))
    assert page.tags.count("details") == 2
    assert "n0, n1, n2, n3, n4, n5, n6, n7, n8" in page.words


def test_inner_tensors_are_listed_unless_the_tensor_table_has_them():
    layers = full().layers
    assert "Inner tensors" in to_html(Report(layers=layers))
    assert "Inner tensors" not in to_html(full())


def test_markdown_tables_have_as_many_cells_in_every_row():
    tables: list[list[int]] = [[]]
    for line in to_markdown(full(HOSTILE)).splitlines():
        if line.startswith("| "):
            tables[-1].append(len(re.findall(r"(?<!\\)\|", line)))
        elif tables[-1]:
            tables.append([])
    assert len(tables) > 5 and all(len(set(cells)) <= 1 for cells in tables)


def test_the_screen_shows_what_changed():
    text = to_screen(full())
    assert "2.00x faster" in text and "4.00x smaller" in text and "-0.25 points" in text
    assert "1 of 2 nodes int8 (Conv 1)" in text and "Softmax (logits): logits" in text
    assert "entropy, calibrated anew in 1.5 s: logits" in text
    assert len(text.splitlines()) < 45


def test_a_slower_engine_is_called_slower():
    engines = (
        EngineRow(label="FP32", reference=True, latency=latency(1.0)),
        EngineRow(label="int8", latency=latency(2.0)),
    )
    assert "2.00x slower" in to_screen(Report(engines=engines))


def test_the_worst_of_several_engines_is_named():
    def accuracy(share):
        found = full().engines[1].accuracy
        return dataclasses.replace(found, top1_candidate=share)

    engines = (
        EngineRow(label="FP32", reference=True),
        *(EngineRow(label=str(s), accuracy=accuracy(s)) for s in (0.93, 0.9, 0.92)),
    )
    assert "worst -2.25 points" in to_screen(Report(engines=engines))


def test_accuracy_without_an_engine_is_said_to_be_a_stand_ins():
    judged = full().engines[1].accuracy
    engines = [EngineRow(label=s, accuracy=judged, path=p) for s, p in (("a", "a.om"), ("b", None))]
    (said,) = Report(engines=tuple(engines)).warnings
    assert said.startswith("b: not run on its device")


def test_many_float_groups_are_cut_with_a_count():
    nodes = tuple(NodeRow(name=f"n{i}", op=f"Op{i}", int8=False, reason="r") for i in range(9))
    assert "and 4 more float nodes; the report has all" in to_screen(Report(nodes=nodes))


def test_a_warning_is_said_once():
    report = Report(notes=("same", "same"), engines=full().engines)
    assert report.warnings == ("same", "FP32, int8 logits: unstable")


def test_the_latency_figure_counts_what_it_leaves_out():
    text = latency_figure(full().engines)
    assert "2 slower iterations not drawn" in text and text.count("<path") == 2
    assert latency_figure([EngineRow(label="unmeasured")]) == ""


def test_a_long_tail_does_not_squeeze_the_figure():
    samples = (1.0,) * 90 + (100.0,) * 10
    timing = Timing.of(samples)
    tail = Latency(queries=100, warmup_queries=1, total_host_walltime_s=1, throughput_qps=1,
                   latency=timing, host=timing, samples_ms=samples)  # fmt: skip
    assert "10 slower iterations not drawn" in latency_figure([EngineRow(label="x", latency=tail)])


def test_nan_stands_at_the_top_of_the_page():
    output = full().layers[0]
    found = Accuracy(samples=1, outputs=(output,), problems=("output 'y' holds NaN",))
    page = Page(to_html(Report(engines=(EngineRow(label="int8", accuracy=found),))))
    assert ("class", "troubles") in page.attributes
    assert page.words.count("output 'y' holds NaN") == 1


def test_constant_latency_can_be_drawn():
    timing = Timing.of([1.0])
    one = Latency(queries=1, warmup_queries=1, total_host_walltime_s=1e-3, throughput_qps=1e3,
                  latency=timing, host=timing, samples_ms=(1.0,))  # fmt: skip
    assert "NaN" not in latency_figure([EngineRow(label="one", latency=one)])


@pytest.mark.parametrize("ends", [(0.0, 0.0), (math.nan, 1.0), (-math.inf, 1.0)])
def test_a_tensor_of_no_width_has_no_bar(ends):
    row = TensorRow(name="dead", observed_min=ends[0], observed_max=ends[1], lo=0, hi=0, amax=0,
                    method="minmax")  # fmt: skip
    assert range_bar(row) == ""
    to_html(Report(tensors=(row,)))


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0376, "0.0376 ms"), (0.5, "0.500 ms"), (12.34, "12.3 ms"), (1234.5, "1234 ms"), (None, "-"),
     (0.0, "0 ms")],
)  # fmt: skip
def test_milliseconds_keep_three_digits(value, text):
    assert figures.milliseconds(value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0 B"), (1000, "1000 B"), (233528, "228 KiB"), (5 << 30, "5 GiB")]
)
def test_sizes_are_in_binary_units(value, text):
    assert figures.size(value) == text


@pytest.mark.parametrize("order", [(1, -1), (-1, 1)])
def test_nan_of_one_output_is_not_hidden_by_another(order):
    outputs = [
        OutputAccuracy(name=str(v), sqnr_db=v, cosine_mean=v, cosine_min=v, max_abs_error=v)
        for v in (math.nan, 30.0)
    ][:: order[0]]
    engine = EngineRow(label="int8", accuracy=Accuracy(samples=1, outputs=tuple(outputs)))
    assert to_screen(Report(engines=(engine,))).count("NaN") == 3
