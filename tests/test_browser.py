"""The page as a browser shows it: headless Chromium, driven by Playwright."""

import dataclasses
import math
import re
from functools import partial
from itertools import cycle, pairwise
from pathlib import Path

import numpy as np
import pytest

from deploy.metrics.accuracy import Accuracy
from deploy.metrics.latency import Latency, Timing
from deploy.metrics.levels import DOUBTFUL, FLOAT, GOOD, UNUSABLE
from deploy.metrics.output_errors import OutputAccuracy
from deploy.metrics.output_form import SliceAccuracy
from deploy.report import Report, parts, to_html
from deploy.report.blocks import PRINTED
from deploy.report.page import page
from deploy.report.profile_page import Tile, tree_map
from deploy.report.verdict import Verdict

pytest.importorskip("playwright", reason="the browser's tests need playwright")
from scripts.chromium import find_chromium, open_tab

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_chromium() is None, reason="no Chromium is installed here"),
]
ROOT = Path(__file__).parent.parent
LEVELS = (GOOD, DOUBTFUL, UNUSABLE, FLOAT)
HOSTILE = "</script><script>window.bad=1</script><img src=x onerror=bad=1>\x1b[31m|\"&'\n"
LONG = "/" + "Unsqueezed" * 25
PAPER_PX = 710  # A4 without its margins


def latency(ms):
    samples = tuple(ms * (1 + 0.02 * (i % 9)) for i in range(90))
    return Latency(
        queries=90,
        warmup_queries=5,
        total_host_walltime_s=1,
        throughput_qps=1e3 / ms,
        latency=Timing.of(samples),
        host=Timing.of(samples),
        samples_ms=samples,
        warnings=("unstable",),
    )


def accuracy(name):
    figures = {"sqnr_db": 12.5, "cosine_mean": 0.99, "cosine_min": 0.9, "max_abs_error": 200.9}
    labels = (f"{name}[{part_range}]" for part_range in ("0:4", "4:22"))
    parts = tuple(SliceAccuracy(output=name, label=label, **figures) for label in labels)
    return Accuracy(
        samples=60,
        outputs=(OutputAccuracy(name=name, **figures),),
        top1_reference=0.9225,
        top1_candidate=0.92,
        top1_agreement=0.99,
        parts=parts,
        problems=(f"{name} holds NaN",),
    )


FLOAT_ROW = parts.EngineRow(label="FP32", reference=True)


def target_part(name, text, tensors):
    """A target of so many tensors; one in 10 without an SQNR, one NaN."""
    rows = []
    for i in range(tensors):
        sqnr_db = 60 - i % 50
        if i % 10 == 9:
            sqnr_db = None
        elif i == 4:
            sqnr_db = math.nan
        rows.append(
            parts.TensorRow(
                name=f"{text}.{i % 22}/cv{i % 3}/conv_{i}_output_0",
                observed_min=-1.5 * i - 1,
                observed_max=4.25 + i,
                lo=-1.0,
                hi=2.0 + i,
                amax=2.0 + i,
                method="percentile",
                clipped=0.001 * (i % 40),
                sqnr_db=sqnr_db,
            )
        )
    figures = {"cosine_mean": 0.99, "cosine_min": 0.9, "max_abs_error": 1.0}
    sqnr_values = [row for row in rows if row.sqnr_db is not None]
    layers = tuple(
        OutputAccuracy(name=row.name, sqnr_db=row.sqnr_db, **figures) for row in sqnr_values
    )
    float_ops = ("Shape", "Unsqueeze", "ConstantOfShape", "Sigmoid", "Resize", "Softmax", "Add")
    nodes = []
    for i, op in zip(range(tensors), cycle(float_ops)):
        reason = f"{op} of {text}"
        is_float = i % 3 > 0
        kind, precision = (op, "float32") if is_float else ("Conv", "int8")
        node = parts.NodeRow(name=f"{text}/node_{i}", op=kind, reason=reason, precision=precision)
        nodes.append(node)
    split = partial(parts.SplitRow, layers=40, size=0.3, figure=text, level="good")
    front = tuple(
        split(number=i, float_layers=i, time=0.5 + i / 20, sqnr_db=20.0 + i, taken=i == 1)
        for i in range(1, 5)
    )
    return parts.TargetPart(
        name=name,
        method="percentile",
        nodes=tuple(nodes),
        tensors=tuple(rows),
        layers=layers,
        files=(
            parts.FileRow(role="int8 engine", path=f"out/{text}.onnx", size_bytes=3 << 20),
            parts.FileRow(role="record", path=f"out/{text}.txt", size_bytes=900),
        ),
        search=parts.SearchPart(reused=False, probes=4, settled=text, front=front),
        notes=(text,),
    )


def make_report(text="/model", *, engines=2, targets=1, tensors=40):
    """A report with every part, in which the text stands wherever a name may."""
    names = ["onnxruntime"] if targets == 1 else [f"t{i}" for i in range(targets)]
    rows = [dataclasses.replace(FLOAT_ROW, size_bytes=12 << 20, latency=latency(2.0))]
    rows += [
        parts.EngineRow(
            label=f"{text} {i}",
            target=names[i % targets],
            path="m.onnx",
            size_bytes=3 << 20,
            load_ms=3.0,
            latency=latency(1.0 + 0.1 * i),
            accuracy=accuracy(text),
            verdict=Verdict(LEVELS[i % 4], (f"2 of 7 boxes of {text} kept", "1.70x (1.6 to 1.8)")),
        )
        for i in range(engines - 1)
    ]
    return Report(
        title=f"calib8: {text} in int8",
        model=parts.ModelPart(path=text, inputs=(f"{text} float32 [1,3,640,640]",)),
        feed=parts.FeedPart(source=text, samples=60, preprocess={"mean": [0.5], text: text}),
        targets=tuple(target_part(name, text, tensors) for name in names),
        engines=tuple(rows),
        files=(parts.FileRow(role="plan", path="out/m.plan.toml"),),
        notes=(text, "another"),
    )


def failed_report():
    targets = (parts.TargetPart(name="tensorrt", error="a cache must be writable, got none"),)
    rows = (FLOAT_ROW, parts.EngineRow(label="tensorrt", target="tensorrt"))
    return dataclasses.replace(make_report(), targets=targets, engines=rows)


REPORT_BY_CASE = {
    "plain": lambda: make_report(),
    "long": lambda: make_report(LONG),
    "hostile": lambda: make_report(HOSTILE, engines=5),
    "many engines": lambda: make_report(engines=9, targets=3),
    "failed": failed_report,
    "no engines": lambda: dataclasses.replace(make_report(), engines=()),
    "empty": lambda: Report(title="nothing"),
}


@pytest.fixture(scope="module")
def tab():
    with open_tab() as opened_tab:
        yield opened_tab


@pytest.fixture
def show(tab, tmp_path):
    """(report, width, dark) -> the page, shown."""

    def call(shown, *, width=1280, dark=False):
        path = tmp_path / "report.html"
        path.write_text(to_html(shown), encoding="utf-8", newline="")
        tab.show(path, width=width, dark=dark)
        return tab

    return call


def unfold(tab):
    tab.page.evaluate("document.querySelectorAll('details').forEach(one => { one.open = true; })")


def check_page(tab, path):
    """What every page must be at every width, folded and open."""
    assert tab.errors == []
    assert tab.requests == [path.resolve().as_uri()]
    for _ in range(2):
        assert tab.page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
        assert tab.page.evaluate(OVERFULL_CELLS) == []
        unfold(tab)
    assert tab.page.evaluate("document.querySelectorAll('script').length") == 1


# Cells with more lines than words of six letters would take.
OVERFULL_CELLS = """
[...document.querySelectorAll("td, th")].map(cell => {
  const range = document.createRange();
  range.selectNodeContents(cell);
  const lines = new Set([...range.getClientRects()].map(box => Math.round(box.top / 8)));
  return [cell.textContent, lines.size];
}).filter(([text, lines]) => lines > 2 + text.length / 6)
"""

# Lines of the cells that hold a number with a unit.
NUMBER_LINES = """
[...document.querySelectorAll('td')].filter(c => /^[-\\d.]+ (dB|%)$/.test(c.innerText)).map(c => {
  const range = document.createRange();
  range.selectNodeContents(c);
  return range.getClientRects().length;
})
"""

# How far tables are wider than their places.
TABLE_OVERFLOW = "[...document.querySelectorAll('.scroll')].map(s => s.scrollWidth - s.clientWidth)"


@pytest.mark.parametrize("width", [400, 1280])
@pytest.mark.parametrize("case", [*REPORT_BY_CASE, "dark"])
def test_page_fits_its_window(show, tmp_path, case, width):
    shown = REPORT_BY_CASE["plain" if case == "dark" else case]()
    check_page(show(shown, width=width, dark=case == "dark"), tmp_path / "report.html")


@pytest.mark.parametrize("case", ["plain", "long", "many engines"])
def test_no_table_overflows(show, case):
    tab = show(REPORT_BY_CASE[case]())
    unfold(tab)
    assert max(tab.page.evaluate(TABLE_OVERFLOW)) <= 0
    assert set(tab.page.evaluate(NUMBER_LINES)) == {1}
    tab = show(REPORT_BY_CASE[case](), width=400)
    unfold(tab)
    cells = "[...document.querySelectorAll('td')].filter(c => c.offsetParent)"
    assert (
        tab.page.evaluate(f"Math.max(...{cells}.map(c => c.getBoundingClientRect().right))") <= 400
    )
    assert tab.page.evaluate(f"{cells}.length") > 500


def test_pages_of_build_and_bench_fit(tab, run, tmp_path):
    fashion = ROOT / "datasets" / "fashion"
    images = "--images", fashion / "calib.txt", "--limit", 20, "--mean", "0.5", "--std", "0.5"
    targets = "--target", "onnxruntime,tensorrt,ascend", "--effort", 0, "--duration", 0
    run.ok("build", fashion / "fashion.onnx", *images, *targets, "--out", tmp_path / "o")
    engine = tmp_path / "o" / "fashion.int8.onnx"
    bench = tmp_path / "bench.html"
    against = "--against", fashion / "fashion.onnx", "--duration", 0, "--warm-up", 0
    run.ok("bench", engine, *against, "--html", bench)
    for path in (tmp_path / "o" / "report.html", bench):
        for width in (400, 1280):
            tab.show(path, width=width)
            assert tab.page.evaluate("document.querySelectorAll('h2').length") >= 1
            assert max(tab.page.evaluate(TABLE_OVERFLOW)) <= 0
            check_page(tab, path)


def test_chart_labels_are_readable(show):
    tab = show(make_report(engines=4), width=400)
    for chart in (0, 1):  # times of the engines, and the splits
        svg = f"document.querySelectorAll('svg.wide')[{chart}]"
        ticks = f"[...{svg}.querySelectorAll('.tick:not(.name)')]"
        rectangles = f"{ticks}.map(t => t.getBoundingClientRect()).filter(b => b.width)"
        boxes = tab.page.evaluate(f"{rectangles}.map(b => [b.left, b.right, b.height])")
        assert len(boxes) >= 3
        assert all(height >= 12 for _, _, height in boxes)
        assert all(left[1] < right[0] for left, right in pairwise(boxes))
    legend = tab.page.evaluate("document.querySelector('.legend').innerText")
    assert "A FP32 p50 2.16 ms" in legend
    assert "D /model 2 p50 1.30 ms" in legend


def test_tree_map_is_readable_on_a_phone(tab, tmp_path):
    parts_of_module = tuple(Tile(f"block{n}_conv", 1 / (n + 1), "1 ms") for n in range(6))
    drawing = tree_map([Tile("layer", 1.0, "1 ms", parts=parts_of_module)], "Time by module")
    path = tmp_path / "profile.html"
    path.write_text(page("Profile", f"<figure>{drawing}</figure>"))
    tab.show(path, width=400)
    boxes = "[...document.querySelectorAll('svg.map text')].map(t => t.getBoundingClientRect())"
    assert min(tab.page.evaluate(f"{boxes}.map(b => b.height)")) >= 10
    assert tab.page.evaluate("document.documentElement.scrollWidth") == 400  # the figure scrolls


def test_verdict_comes_first_in_its_colour(show):
    for dark in (False, True):
        tab = show(make_report(engines=5), width=400, dark=dark)
        assert (
            tab.page.evaluate("document.querySelector('h1').nextElementSibling.className")
            == "verdicts"
        )
        styles = "[...document.querySelectorAll('.verdict')].map(v => getComputedStyle(v))"
        colours = tab.page.evaluate(f"{styles}.map(s => [s.color, s.backgroundColor])")
        assert len({ink for ink, _ in colours}) == len({card for _, card in colours}) == 4
        assert all(contrast(*pair) >= 4.5 for pair in colours)
        assert tab.page.evaluate("document.querySelector('.verdict').innerText").startswith("GOOD")


def contrast(ink, card):
    """Of two colours as CSS computes them, by WCAG 2."""
    bright, dim = sorted(map(luminance, (ink, card)), reverse=True)
    return (bright + 0.05) / (dim + 0.05)


def luminance(colour):
    shares = np.array([int(part) / 255 for part in re.findall(r"\d+", colour)[:3]])
    linear = np.where(shares <= 0.04045, shares / 12.92, ((shares + 0.055) / 1.055) ** 2.4)
    return float(linear @ (0.2126, 0.7152, 0.0722))


def test_main_sections_open_others_folded(show):
    tab = show(make_report())
    heads = "[...document.querySelectorAll('%s h2')].map(h => h.innerText)"
    open_heads = ["Engines", "Splits (4)", "Accuracy", "Worst layers"]
    assert tab.page.evaluate(heads % "section") == open_heads
    assert tab.page.evaluate(heads % "details") == [
        "Notes (5)",
        "Calibration",
        "Nodes",
        "Tensors (40)",
        "Files (3)",
    ]
    assert tab.page.evaluate("document.querySelectorAll('main > details[open]').length") == 0
    tab = show(make_report(tensors=200))  # whose contents open what they lead to
    links = "[...document.querySelectorAll('nav a')]"
    tab.page.evaluate(f"{links}.find(link => link.textContent === 'Tensors').click()")
    tab.page.evaluate("new Promise(done => setTimeout(done, 50))")
    assert tab.page.evaluate(f"{TENSORS}.open")
    assert abs(tab.page.evaluate(f"{TENSORS}.getBoundingClientRect().top")) < 100


HEADING = "[...document.querySelectorAll('h2')].find(head => head.textContent.startsWith('%s'))"
TENSORS = f"{HEADING % 'Tensors'}.closest('details')"
ROWS = f"[...{TENSORS}.querySelectorAll('tbody tr')]"
SHOWN = f"{ROWS}.filter(r => r.offsetParent)"
COLUMN = f"{ROWS}.map(row => row.cells[%d].textContent)"
HEAD = f"{TENSORS}.querySelectorAll('th')[%d]"


def test_table_heads_sort_the_rows(show):
    tab = show(make_report())
    unfold(tab)
    unsorted = tab.page.evaluate(COLUMN % 2)
    assert unsorted[0] == "NaN"
    assert unsorted[-4:] == ["-"] * 4
    values = [float(text.split()[0]) for text in unsorted[1:-4]]
    assert values == sorted(values)
    assert len(values) == 35
    columns = []
    for order in ("ascending", "descending", None):
        tab.page.evaluate(HEAD % 5 + ".firstChild.click()")  # the largest value
        assert tab.page.evaluate(HEAD % 5 + ".getAttribute('aria-sort')") == order
        columns.append([float(text) for text in tab.page.evaluate(COLUMN % 5)])
    assert columns[0] == sorted(columns[0])
    assert columns[1] == columns[0][::-1]
    assert tab.page.evaluate(COLUMN % 2) == unsorted  # the third time undoes it
    for order in (1, -1):
        tab.page.evaluate(HEAD % 2 + ".firstChild.click()")
        assert tab.page.evaluate(COLUMN % 2)[-4:] == ["-"] * 4  # the unknown last, both ways
        assert (tab.page.evaluate(COLUMN % 2)[0] == "NaN") == (order == 1)
    assert tab.page.evaluate(HEAD % 1 + ".firstChild.tagName || ''") == ""  # drawings have no order


def test_names_and_sizes_sort_naturally(show):
    tab = show(make_report(tensors=12))
    unfold(tab)
    table = f"{HEADING % 'Files'}.closest('details').querySelector('table')"
    tab.page.evaluate(f"{table}.querySelectorAll('th button')[2].click()")
    sizes = f"[...{table}.querySelectorAll('tbody td:nth-child(3)')].map(c=>c.innerText)"
    assert tab.page.evaluate(sizes) == ["900 B", "3 MiB", "-"]
    tab.page.evaluate(HEAD % 0 + ".firstChild.click()")
    names = [
        re.search(r"conv_(\d+)", name)[1] for name in tab.page.evaluate(COLUMN % 0) if ".1/" in name
    ]
    assert names == ["1"]
    assert tab.page.evaluate(COLUMN % 0)[2].startswith("/model.2/")


def test_tables_work_from_the_keyboard(show):
    tab = show(make_report())
    unfold(tab)
    tab.page.evaluate(f"{TENSORS}.querySelector('input').focus()")
    tab.page.keyboard.insert_text("CV1 conv_1")
    names = f"{SHOWN}.map(r => r.cells[0].innerText)"
    shown = tab.page.evaluate(names)
    assert len(shown) == 5
    assert all("cv1" in name and "conv_1" in name for name in shown)
    assert tab.page.evaluate("document.activeElement.nextSibling.innerText") == "5 of 40 rows"
    tab.page.keyboard.press("Tab")
    assert tab.page.evaluate("document.activeElement.innerText") == "tensor"
    outline = tab.page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    tab.page.keyboard.press("Enter")
    assert outline == "solid"
    assert tab.page.evaluate(HEAD % 0 + ".getAttribute('aria-sort')") == "ascending"
    assert sorted(tab.page.evaluate(names)) == sorted(shown)
    assert tab.errors == []


def test_page_is_complete_without_script(show):
    tab = show(make_report())
    cell_count = tab.page.evaluate("document.querySelectorAll('td').length")
    devtools = tab.page.context.new_cdp_session(tab.page)
    devtools.send("Emulation.setScriptExecutionDisabled", {"value": True})
    try:
        tab = show(make_report())
        assert tab.page.evaluate("document.querySelectorAll('td').length") == cell_count
        assert tab.page.evaluate("document.querySelectorAll('button, input').length") == 0
    finally:
        devtools.detach()


def test_foreign_scripts_never_run(show, tab, tmp_path):
    show(make_report(HOSTILE))
    assert tab.page.evaluate("typeof bad") == "undefined"
    assert tab.errors == []
    path = tmp_path / "changed.html"
    foreign_html = (
        "<script>var bad = 1</script><p onclick='bad = 1' style='color: red'>x</p></main>"
    )
    path.write_text(to_html(make_report()).replace("</main>", foreign_html), encoding="utf-8")
    tab.show(path, width=1280)
    tab.page.evaluate("document.querySelector('p[onclick]').click()")
    assert tab.page.evaluate("typeof bad") == "undefined"
    assert len(tab.errors) >= 2


def printed_page(tab):
    return tab.page.pdf(print_background=True, prefer_css_page_size=True)


def paper_pages(pdf):
    return len(re.findall(rb"/Type\s*/Page\b", pdf))


def test_200_tensors_print_on_four_pages(show):
    tab = show(make_report("/model.22/cv2", tensors=200), dark=True)
    assert paper_pages(printed_page(tab)) <= 2
    tab.page.evaluate(
        "document.querySelectorAll('main > details').forEach(d => { d.open = true; })"
    )
    pdf = printed_page(tab)
    assert 2 < paper_pages(pdf) <= 4
    assert b"/MediaBox [0 0 594" in pdf  # A4


def test_print_keeps_columns_and_counts_rows(show):
    tab = show(make_report("/model.22/cv2", tensors=200), width=PAPER_PX, dark=True)
    tab.page.emulate_media(media="print", color_scheme="dark")
    unfold(tab)
    table = f"{TENSORS}.querySelector('table')"
    assert tab.page.evaluate(f"{table}.getBoundingClientRect().right") <= PAPER_PX
    assert tab.page.evaluate(f"[...{table}.querySelectorAll('th')].every(h => h.offsetWidth > 10)")
    assert tab.page.evaluate(f"{SHOWN}.length") == PRINTED
    assert tab.page.evaluate(f"{SHOWN}[0].cells[2].innerText") == "NaN"
    unprinted = f"{table}.parentElement.nextElementSibling.innerText"
    assert tab.page.evaluate(unprinted) == f"and {200 - PRINTED} more rows, not printed"
    tab.page.evaluate(f"{TENSORS}.querySelector('input').value = 'conv_1'")
    tab.page.evaluate(f"{TENSORS}.querySelector('input').dispatchEvent(new Event('input'))")
    assert tab.page.evaluate(unprinted) == f"and {111 - PRINTED} more rows, not printed"
    assert tab.page.evaluate(f"{SHOWN}.length") == PRINTED
    assert (
        tab.page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    )
