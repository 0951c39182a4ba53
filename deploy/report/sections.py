"""The page's sections that each target fills: worst layers, search, nodes, ranges."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from urllib.parse import quote

from deploy.report import figures, markup
from deploy.report.figures import encodable
from deploy.report.floats import float_groups
from deploy.report.model import Findings
from deploy.report.parts import TargetPart
from deploy.report.ran import RAN_HEADS, ran_words
from deploy.report.section import Section
from deploy.report.svg import range_bar
from deploy.report.tables import coverage, covered, quantized_operators
from deploy.report.trials import trials
from deploy.report.words import plan_name, search_words, whose
from deploy.report.worst import first, worst_first

_MOST = 10  # layers that stand open
_MOST_OF_EACH = 5  # where there are several targets


def worst(report: Findings) -> Iterator[Section]:
    """The inner tensors that lose most on each target."""
    told = [target for target in report.targets if target.layers]
    alone = len(report.targets) == 1
    rows = []
    for target in told:
        ranges = {row.name: row for row in target.tensors}
        for layer in first(target.layers, _MOST if alone else _MOST_OF_EACH):
            held = ranges.get(layer.name)
            cells = [
                markup.breakable(layer.name),
                range_bar(held) if held else "",
                escape(figures.decibels(layer.sqnr_db)),
                escape(figures.cosine(layer.cosine_mean)),
                escape(figures.percent(held.clipped) if held else figures.NONE),
            ]
            rows.append(cells if alone else [*cells, escape(target.name)])
    if rows:
        heads = ["tensor", "range", "SQNR", "cosine", "clipped", *([] if alone else ["on"])]
        html = f'<p class="sub">{_RANGE_WORDS}</p>{markup.raw_table(heads, rows, "tensors")}'
        yield Section(title="Worst layers", html=html, folded=False)


_RANGE_WORDS = (
    "Thin line: values seen. Bar: range kept by the scale. Tick: zero."
    " Each drawing has its own scale."
)


def search(report: Findings) -> Iterator[Section]:
    """What was tried before each target was built, and which file keeps what was taken."""
    name = plan_name(report)
    link = f'<a href="{escape(quote(encodable(name)))}">{escape(name)}</a>'
    for target in report.targets:
        if target.search is not None:
            own = whose(report, target.name, " for ")
            kept = f" It is kept in {link}." if name else ""
            html = f"<p>Built: {escape(search_words(target.search))}.{kept}</p>"
            tried = target.search.tried
            html += trials(tried) if tried else ""
            yield Section(title=f"Search{own}", html=html, rows=len(tried))


def nodes(report: Findings) -> Iterator[Section]:
    """What each target covers, and why the rest stays float."""
    targets = covered(report)
    if not targets:
        return
    alone = len(report.targets) == 1
    html = [
        _covered_alone(targets[0]) if alone else _covered(targets),
        _float(targets, alone=alone),
    ]
    yield Section(title="Nodes", html="\n".join(filter(None, html)))


def _covered_alone(target: TargetPart) -> str:
    operators = quantized_operators(target)
    words = f"<p>{escape(coverage(target) + (': ' + operators if operators else ''))}.</p>"
    return words + (f"<p>Options: {escape(target.typed)}.</p>" if target.typed else "")


def _covered(targets: Sequence[TargetPart]) -> str:
    rows = ([t.name, coverage(t), quantized_operators(t), t.method, t.typed] for t in targets)
    return markup.table(["target", "nodes", "operators", "ranges by", "options"], rows, "words")


def _float(targets: Sequence[TargetPart], *, alone: bool) -> str:
    """Why nodes stay float: each reason once, and where it holds."""
    heads = ["float operator", "nodes", "why it stays float"]
    rows = []
    for group in float_groups(targets):
        where = group.places
        names = "<br>".join(markup.nodes(names) for names, _ in where)
        on = "<br>".join(escape(", ".join(on)) for _, on in where)
        cells = [markup.breakable(group.op), names, markup.breakable(group.reason)]
        rows.append([*cells, *([] if alone else [on])])
    return markup.raw_table(heads if alone else [*heads, "on"], rows, "words") if rows else ""


def ran(report: Findings) -> Iterator[Section]:
    """The plan beside what each engine runs."""
    for engine in report.engines:
        words = ran_words(engine.ran) if engine.ran else ""
        if engine.ran and words:
            rows = engine.ran.otherwise
            html = f"<p>{escape(words)}.</p>"
            html += markup.table(RAN_HEADS, rows, "words") if rows else ""
            title = f"In the engine of {engine.target}"
            yield Section(title=title, html=html, rows=len(rows))


def tensors(report: Findings) -> Iterator[Section]:
    """The ranges that each target's files hold, the worst first."""
    shown = [target for target in report.targets if target.tensors]
    for number, target in enumerate(shown):
        own = whose(report, target.name)
        words = "" if number else f'<p class="sub">{_RANGE_WORDS}</p>'
        html = words + _ranges(target)
        yield Section(title=f"Tensors{own}", html=html, rows=len(target.tensors))


def _ranges(target: TargetPart) -> str:
    heads = ["tensor", "range", "SQNR", "clipped", "min", "max", "low", "high", "amax", "method"]
    rows = []
    for row in worst_first(target.tensors):
        numbers = (row.observed_min, row.observed_max, row.lo, row.hi, row.amax)
        cells = [figures.decibels(row.sqnr_db), figures.percent(row.clipped)]
        cells += [*map(figures.real, numbers), row.method]
        rows.append([markup.breakable(row.name), range_bar(row), *map(markup.breakable, cells)])
    return markup.raw_table(heads, rows, "tensors")


def layers(report: Findings) -> Iterator[Section]:
    """Inner tensors of a target, the worst first, unless the table of its ranges has them all."""
    for target in report.targets:
        shown = {row.name for row in target.tensors}
        if not shown.issuperset(row.name for row in target.layers):
            own = whose(report, target.name)
            rows = [
                [row.name, figures.decibels(row.sqnr_db), figures.cosine(row.cosine_mean)]
                for row in worst_first(target.layers)
            ]
            html = markup.table(["tensor", "SQNR", "cosine"], rows)
            yield Section(title=f"Inner tensors{own}", html=html, rows=len(rows))
