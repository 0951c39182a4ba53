"""The order of the page and its pieces; tests/test_browser.py looks at the whole."""

import base64
import dataclasses
import hashlib
import json
import math
import re
from html import unescape

import pytest

from deploy.metrics.latency import Latency, Timing
from deploy.metrics.output_errors import OutputAccuracy
from deploy.report import (
    EngineRow,
    NodeRow,
    Report,
    TargetPart,
    TensorRow,
    to_html,
    to_markdown,
    to_screen,
)
from deploy.report.charts import latency_figure
from deploy.report.page import POLICY, PRINTED, SCRIPT, STYLE, Section, breakable, contents, written
from deploy.report.report_rows import first, float_groups, worst_first


def tensor(name, sqnr_db):
    return TensorRow(name=name, observed_min=-1, observed_max=1, lo=-1, hi=1, amax=1,
                     method="mse", sqnr_db=sqnr_db)  # fmt: skip


def node(name, op, reason):
    return NodeRow(name=name, op=op, precision="float32", reason=reason)


KNOWN = {"a": 30.0, "b": None, "c": math.nan, "d": 9.5, "e": math.inf, "f": 9.5}
ROWS = [tensor(name, sqnr_db) for name, sqnr_db in KNOWN.items()]


def test_the_worst_come_first_and_the_unknown_last():
    assert [row.name for row in worst_first(ROWS)] == ["c", "d", "f", "a", "e", "b"]
    assert [row.name for row in first(ROWS, 5)] == ["c", "d", "f", "a"]
    assert [row.name for row in first(ROWS, 2)] == ["c", "d"]


def test_every_form_has_its_tensors_worst_first():
    report = Report(targets=(TargetPart(name="onnxruntime", tensors=tuple(ROWS)),))
    assert re.findall(r'<td data-head="tensor">(.)</td>', to_html(report)) == list("cdfaeb")
    assert re.findall(r"^\| (.) \|", to_markdown(report), re.MULTILINE) == list("cdfaeb")


def test_worst_layers_of_several_targets_are_told_apart():
    layers = tuple(
        OutputAccuracy(name=f"l{i}", sqnr_db=float(i), cosine_mean=0.9, cosine_min=0.8,
                       max_abs_error=1.0) for i in range(20)
    )  # fmt: skip
    targets = tuple(TargetPart(name=name, layers=layers) for name in ("x", "y"))
    for count, most in ((1, 10), (2, 5)):
        page = to_html(Report(targets=targets[:count]))
        (shown,) = re.findall(r'id="worst-layers".*?</section>', page, re.DOTALL)
        assert shown.count("<tr>") == 1 + count * most
        assert ('data-head="on">y<' in shown) == (count == 2)


def test_float_nodes_stand_by_what_they_cost():
    rows = [
        *(node(f"s{i}", "Shape", "Shape is not run in int8 on x") for i in range(9)),
        *(node(f"u{i}", "Add", f"/a/b_{i} is not float32") for i in range(5)),
        *(node(f"r{i}", "Relu", "an input of it is not int8") for i in range(3)),
        node("m", "Mul", "slower in int8: 20 us, 10 us in float"),
        node("c", "Conv", "alone in int8 it leaves 30.0 dB of y"),
        node("d", "Conv", "alone in int8 it leaves 12.5 dB of y"),
    ]
    target = TargetPart(name="x", nodes=tuple(rows))
    groups = float_groups([target])
    assert [group.names[0] for group in groups] == ["d", "c", "m", "r0", "s0", "u0"]
    assert groups[-1].reason == "a tensor of it is not float32" and len(groups[-1].names) == 5
    assert "float       Conv (d): alone" in to_screen(Report(targets=(target,)))


def test_sections_have_ids_of_their_own_and_a_place_in_the_contents():
    titles = ("Tensors of a", "Tensors  of <a>", "...", "!", "Notes")
    sections = [Section(title=title, html="<p>x</p>", rows=3) for title in titles]
    ids = re.findall(r'<h2 id="(.+?)"', "".join(written(sections)))
    assert ids == ["tensors-of-a", "tensors-of-a-1", "section", "section-1", "notes"]
    assert re.findall(r'href="#(.+?)"', contents(sections)) == ids
    assert "Tensors  of &lt;a&gt; (3)</h2>" in "".join(written(sections))
    assert contents(sections[:2]) == ""


@pytest.mark.parametrize(
    "text",
    ["", "Conv", "a b", "/model.22/cv2.0/cv2.0.1/act/Mul_output_0", "x" * 99, "<b>&amp;\n" * 9,
     "output0[4:22]", "a very long sentence of short words, of which none must be broken"],
)  # fmt: skip
def test_names_may_be_broken_and_stay_what_they_are(text):
    html = breakable(text)
    assert unescape(html.replace("<wbr>", "")) == text and "<b>" not in html
    runs = [unescape(run) for run in re.split(r"<wbr>| ", html)]
    assert max(map(len, runs)) <= 22
    if max(map(len, text.split(" "))) <= 20:
        assert "<wbr>" not in html  # ConstantOfShape stays in one piece


def test_the_policy_names_the_script_and_the_style_as_they_stand():
    page = to_html(Report(title="x"))
    for tag, text in (("script", SCRIPT), ("style", STYLE)):
        assert re.findall(f"<{tag}>(.*?)</{tag}>", page, re.DOTALL) == [text]
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in POLICY
    assert POLICY.startswith("default-src 'none';") and "unsafe" not in POLICY
    assert f'content="{POLICY}"' in page


def test_long_tables_say_what_paper_lacks():
    def page(rows):
        tensors = tuple(tensor(f"t{i}", 1.0) for i in range(rows))
        return to_html(Report(targets=(TargetPart(name="x", tensors=tensors),)))

    assert "not printed" not in page(PRINTED)
    assert '<p class="unprinted">and <span>1</span> more rows' in page(PRINTED + 1)


def test_the_p50_is_the_figure_of_speed():
    samples = (1.0, 1.0, 1.0, 3.0)  # median 1, as trtexec counts the p50; and of two in the middle
    timing = dataclasses.replace(Timing.of(samples), median=1.7)
    one = Latency(queries=4, warmup_queries=1, total_host_walltime_s=1, throughput_qps=1,
                  latency=timing, host=timing, samples_ms=samples)  # fmt: skip
    slow = dataclasses.replace(one, latency=dataclasses.replace(timing, p50=2.0, median=9.0))
    rows = (
        EngineRow(label="FP32", reference=True, latency=slow),
        EngineRow(label="q", latency=one),
    )
    assert "2.00x faster" in to_screen(Report(engines=rows))
    figure = latency_figure(rows)
    assert "FP32 <b>p50 2.00 ms</b>" in figure and "q <b>p50 1.00 ms</b>" in figure
    assert "1.70" not in to_html(Report(engines=rows))


def test_many_engines_have_letters_of_their_own():
    samples = tuple(1.0 + 0.01 * i for i in range(20))
    timing = Timing.of(samples)
    one = Latency(queries=20, warmup_queries=1, total_host_walltime_s=1, throughput_qps=1,
                  latency=timing, host=timing, samples_ms=samples)  # fmt: skip
    figure = latency_figure([EngineRow(label=f"e{i}", latency=one) for i in range(28)])
    letters = re.findall(r'<i class="c\d">(\w+)</i>', figure)
    assert len(set(letters)) == 28 and letters[:2] == ["A", "B"] and letters[-1] == "BB"


def test_the_json_beside_a_page_keeps_the_models_order(small_cnn, pictures, run, tmp_path):
    words = "--out", tmp_path / "o", "--effort", 0, "--duration", 0, "--accept"
    code, _, err = run("build", small_cnn, "--images", pictures, *words)
    assert code == 0, err
    (target,) = json.loads((tmp_path / "o" / "report.json").read_text())["targets"]
    assert target["tensors"][0]["name"] == "x"
