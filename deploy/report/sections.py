"""The page's sections that each target fills: search, nodes, ranges, inner tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from urllib.parse import quote

import deploy.report.figures as figures
import deploy.report.markup as markup
from deploy.report.figures import encodable
from deploy.report.model import Findings
from deploy.report.parts import TargetPart
from deploy.report.ran import RAN_HEADS, ran_words
from deploy.report.svg import range_bar
from deploy.report.table import coverage, covered, float_groups, quantized_operators
from deploy.report.words import TRIAL_HEADS, plan_name, search_words, trial_row


def search(report: Findings) -> Iterator[str]:
    """What was tried before each target was built, and which file keeps what was taken."""
    name = plan_name(report)
    link = f'<a href="{escape(quote(encodable(name)))}">{escape(name)}</a>'
    for target in report.targets:
        if target.search is not None:
            whose = f" for {escape(target.name)}" if len(report.targets) > 1 else ""
            yield f"<h2>Search{whose}</h2>"
            kept = f" It is kept in {link}." if name else ""
            yield f"<p>Built: {escape(search_words(target.search))}.{kept}</p>"
            rows = [trial_row(trial) for trial in target.search.tried]
            if rows:
                yield markup.foldable(markup.table(TRIAL_HEADS, rows), len(rows))


def nodes(report: Findings) -> Iterator[str]:
    """What each target covers, and why the rest stays float."""
    targets = covered(report)
    if not targets:
        return
    yield "<h2>Nodes</h2>"
    if len(report.targets) == 1:
        operators = quantized_operators(targets[0])
        yield f"<p>{escape(coverage(targets[0]) + (': ' + operators if operators else ''))}.</p>"
        if targets[0].typed:
            yield f"<p>Options: {escape(targets[0].typed)}.</p>"
    else:
        rows = ([t.name, coverage(t), quantized_operators(t), t.method, t.typed] for t in targets)
        yield markup.table(["target", "nodes", "operators", "ranges by", "options"], rows, "words")
    yield from _float(targets, alone=len(report.targets) == 1)


def _float(targets: Sequence[TargetPart], *, alone: bool) -> Iterator[str]:
    """Why nodes stay float: each reason once, and where it holds."""
    heads = ["float operator", "nodes", "why it stays float"]
    rows = []
    for group in float_groups(targets):
        where = group.places
        names = "<br>".join(markup.nodes(names) for names, _ in where)
        on = "<br>".join(escape(", ".join(on)) for _, on in where)
        rows.append([escape(group.op), names, escape(group.reason), *([] if alone else [on])])
    if rows:
        yield markup.raw_table(heads if alone else [*heads, "on"], rows, "words")


def ran(report: Findings) -> Iterator[str]:
    """The plan beside what each engine runs."""
    for engine in report.engines:
        words = ran_words(engine.ran) if engine.ran else ""
        if engine.ran and words:
            yield f"<h2>In the engine of {escape(engine.target)}</h2>"
            yield f"<p>{escape(words)}.</p>"
            rows = engine.ran.otherwise
            if rows:
                yield markup.foldable(markup.table(RAN_HEADS, rows, "words"), len(rows))


def tensors(report: Findings) -> Iterator[str]:
    """The ranges that each target's files hold."""
    shown = [target for target in report.targets if target.tensors]
    for number, target in enumerate(shown):
        whose = f" of {escape(target.name)}" if len(report.targets) > 1 else ""
        yield f"<h2>Tensors{whose} ({len(target.tensors)})</h2>"
        if number == 0:
            yield f'<p class="sub">{_RANGE_WORDS}</p>'
        yield markup.foldable(_ranges(target), len(target.tensors))


_RANGE_WORDS = (
    "Thin line: values seen. Bar: range kept by the scale. Tick: zero."
    " Each drawing has its own scale."
)


def _ranges(target: TargetPart) -> str:
    heads = ["tensor", "range", "min", "max", "low", "high", "amax", "clipped", "SQNR", "method"]
    rows = []
    for row in target.tensors:
        numbers = (row.observed_min, row.observed_max, row.lo, row.hi, row.amax)
        cells = [*map(figures.real, numbers), figures.percent(row.clipped)]
        cells += [figures.decibels(row.sqnr_db), row.method]
        rows.append([escape(row.name), range_bar(row), *map(escape, cells)])
    return markup.raw_table(heads, rows, "tensors")


def layers(report: Findings) -> Iterator[str]:
    """Inner tensors of a target, unless the table of its ranges has them all."""
    for target in report.targets:
        shown = {row.name for row in target.tensors}
        if not shown.issuperset(row.name for row in target.layers):
            whose = f" of {escape(target.name)}" if len(report.targets) > 1 else ""
            yield f"<h2>Inner tensors{whose} ({len(target.layers)})</h2>"
            rows = (
                [row.name, figures.decibels(row.sqnr_db), figures.cosine(row.cosine_mean)]
                for row in target.layers
            )
            yield markup.foldable(
                markup.table(["tensor", "SQNR", "cosine"], rows), len(target.layers)
            )
