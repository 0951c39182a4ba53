"""Frame of every HTML page: style, script, content policy, verdicts and main figures.

`STYLE` is one sheet: colours are variables, light or dark as the reader's system asks. On a narrow
screen table rows become cards; on paper long tables are cut and folded parts stay folded.

`SCRIPT` sorts tables by their heads and filters them. The page is complete without it: the script
itself creates the buttons and boxes. The Content-Security-Policy allows only this sheet and this
script, by hash, and no requests: a `style` attribute or `onclick` would not work.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable
from html import escape

from deploy.metrics.levels import DOUBTFUL, FLOAT, GOOD, UNUSABLE
from deploy.report.blocks import PRINTED
from deploy.report.figures import encodable
from deploy.report.verdict import Verdict

BOX = 120  # side of a sample picture's square, in px
LONG = 250  # longer side of a drawing, in px

LOOKS = f"""
.views {{ display: flex; flex-wrap: wrap; gap: .8rem 1rem; }}
.views > div {{ break-inside: avoid; max-width: {2 * BOX + 8}px; }}
.views p, .beside p {{ margin: .2rem 0 0; font-size: .84rem; color: var(--soft); }}
.views img {{ width: {BOX}px; height: {BOX}px; object-fit: contain; vertical-align: top;
  background: var(--card); }}
.views img + img {{ margin-left: 8px; }}
.views .tiny {{ image-rendering: pixelated; }}
.pairs {{ display: flex; flex-wrap: wrap; gap: 1rem; }}
.beside {{ display: flex; flex-wrap: wrap; gap: 6px; width: {2 * LONG + 6}px; max-width: 100%;
  break-inside: avoid; }}
.beside svg {{ width: calc(50% - 3px); height: auto; }}
.beside p {{ flex-basis: 100%; }}
svg.boxes rect {{ fill: none; stroke-width: 2; }}
svg.boxes text {{ font-size: 10px; fill: #fff; paint-order: stroke; stroke: #000;
  stroke-width: 2.5px; }}
svg.boxes .kept {{ stroke: #2fd6a5; }}
svg.boxes .lost {{ stroke: #ff4d4d; stroke-dasharray: 7 4; }}
svg.boxes .new {{ stroke: #ffb020; stroke-dasharray: 2 3; }}
@media print {{ .views img {{ width: 24mm; height: 24mm; }} .beside {{ width: 88mm; }} }}
"""

_SCREEN = """
:root { color-scheme: light dark;
  --page: #ffffff; --card: #f4f6f8; --ink: #1b2430; --soft: #566473; --line: #dde3e9;
  --good: #08684f; --good-card: #e3f5ef; --warn: #7d5200; --warn-card: #fff3d6;
  --bad: #a3211a; --bad-card: #fdeae8; --plain: #44566a; --plain-card: #eaeff4;
  --c0: #5f7489; --c1: #0b8a6f; --c2: #b5541c; --c3: #5b55c0; }
@media screen and (prefers-color-scheme: dark) { :root {
  --page: #12171d; --card: #1b222b; --ink: #e4eaf0; --soft: #97a5b4; --line: #2d3742;
  --good: #5ed9bb; --good-card: #11302a; --warn: #f0c163; --warn-card: #2f2713;
  --bad: #ff9d94; --bad-card: #3a1c1a; --plain: #b6c5d4; --plain-card: #222c37;
  --c0: #93a8bd; --c1: #35c4a2; --c2: #ee8a52; --c3: #a09bff; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Liberation Sans", sans-serif; }
main { max-width: 1080px; margin: 0 auto; padding: 1.6rem 1.25rem 4rem; overflow-wrap: anywhere; }
h1 { font-size: 1.45rem; line-height: 1.25; margin: 0 0 .6rem; }
h2 { font-size: 1.1rem; margin: 0; }
section h2 { margin: 2.2rem 0 .7rem; padding-bottom: .3rem; border-bottom: 1px solid var(--line); }
.sub { color: var(--soft); margin: 0 0 .8rem; font-size: .92rem; }
.notes { margin: 0 0 .8rem; padding-left: 1.2rem; font-size: .92rem; }
.troubles { background: var(--bad-card); color: var(--bad); border-radius: 8px; margin: .6rem 0;
  padding: .6rem 1rem .6rem 2rem; }
.verdict { margin: .5rem 0; padding: .55rem .9rem; border-radius: 8px;
  border-left: 6px solid currentColor; }
.verdict b { text-transform: uppercase; font-size: .86rem; letter-spacing: .04em;
  margin-right: .2rem; }
.verdict.good { color: var(--good); background: var(--good-card); }
.verdict.doubtful { color: var(--warn); background: var(--warn-card); }
.verdict.unusable { color: var(--bad); background: var(--bad-card); }
.verdict.float { color: var(--plain); background: var(--plain-card); }
.tiles { display: grid; gap: .7rem; margin: 1.1rem 0;
  grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); }
.tiles div { background: var(--card); border-radius: 10px; padding: .7rem 1rem; }
.tiles b { display: block; font-size: 1.5rem; line-height: 1.2;
  font-variant-numeric: tabular-nums; }
.tiles span { color: var(--soft); font-size: .86rem; }
nav ul { display: flex; flex-wrap: wrap; gap: .1rem 1.1rem; list-style: none; margin: 0; padding: 0;
  font-size: .92rem; }
a { color: var(--c1); }
main > details { border-top: 1px solid var(--line); padding: .6rem 0; }
section + details { margin-top: 2.2rem; }
main > details[open] { padding-bottom: 1.4rem; }
main > details[open] > summary { margin-bottom: .8rem; }
main > details > summary h2 { display: inline; color: var(--ink); }
summary { cursor: pointer; color: var(--soft); }
figure { margin: 0 0 1rem; padding: 1rem; background: var(--card); border-radius: 10px; }
figcaption { color: var(--soft); font-size: .84rem; margin-top: .5rem; }
.legend { display: flex; flex-wrap: wrap; gap: .1rem 1.4rem; list-style: none; margin: 0 0 .4rem;
  padding: 0; font-size: .9rem; }
.legend i { font-style: normal; font-weight: 700; }
svg.wide { display: block; }
svg.bar { display: block; }
svg text { font: 12px system-ui, -apple-system, "Segoe UI", Roboto, "Liberation Sans", sans-serif;
  fill: var(--soft); }
svg .tick { text-anchor: middle; }
svg .end { text-anchor: end; }
svg .axis { stroke: var(--soft); }
svg .grid { stroke: var(--line); }
svg .area { fill-opacity: .28; stroke-width: 1.4; vector-effect: non-scaling-stroke; }
svg .median { stroke-width: 1.4; stroke-dasharray: 4 3; }
svg text.name { font-weight: 700; }
svg .area.c0 { fill: var(--c0); } svg .area.c1 { fill: var(--c1); }
svg .area.c2 { fill: var(--c2); } svg .area.c3 { fill: var(--c3); }
svg path.c0, svg line.c0 { stroke: var(--c0); } svg path.c1, svg line.c1 { stroke: var(--c1); }
svg path.c2, svg line.c2 { stroke: var(--c2); } svg path.c3, svg line.c3 { stroke: var(--c3); }
svg text.c0 { fill: var(--c0); } svg text.c1 { fill: var(--c1); }
svg text.c2 { fill: var(--c2); } svg text.c3 { fill: var(--c3); }
.legend .c0 { color: var(--c0); } .legend .c1 { color: var(--c1); }
.legend .c2 { color: var(--c2); } .legend .c3 { color: var(--c3); }
svg .seen { stroke: var(--soft); stroke-width: 1.5; }
svg .kept { fill: var(--c1); fill-opacity: .75; }
svg .zero { stroke: var(--ink); stroke-width: 1; }
svg .cut { fill: var(--c2); } svg .clip { stroke: var(--ink); stroke-dasharray: 4 3; }
svg .other { stroke: var(--c3); stroke-width: 1.5; }
svg .tried { fill: var(--c0); fill-opacity: .6; } svg .time { fill: var(--soft); }
svg.map { display: block; width: 100%; height: auto; }
svg.map rect { stroke: var(--page); stroke-width: 1; fill-opacity: .4; }
svg.map rect.whole { fill: var(--line); fill-opacity: .5; } svg.map text { fill: var(--ink); }
svg.map rect.c0 { fill: var(--c0); } svg.map rect.c1 { fill: var(--c1); }
svg.hist { display: block; width: 100%; height: auto; margin-top: .4rem; }
.drawn { display: grid; gap: .7rem; grid-template-columns: repeat(auto-fill, minmax(270px, 1fr)); }
.drawn figure { margin: 0; padding: .8rem; min-width: 0; font-size: .88rem; }
.scroll { overflow-x: auto; margin-bottom: 1rem; }
table { border-collapse: collapse; width: 100%; font-size: .9rem; overflow-wrap: normal; }
th { text-align: right; color: var(--soft); font-weight: 600; white-space: nowrap; }
td { text-align: right; font-variant-numeric: tabular-nums; }
th, td { padding: .34rem .6rem; border-bottom: 1px solid var(--line); vertical-align: middle; }
table.figures td:nth-child(n + 3), table.tensors td:nth-child(n + 3), table.trials td,
table.engines td:not(:last-child) { white-space: nowrap; }
table.trials td:last-child, table.engines td:first-child { white-space: normal; }
th:first-child, td:first-child { text-align: left; padding-left: 0; }
table.tensors th:nth-child(2) { text-align: left; }
table.engines th:last-child, table.engines td:last-child, table.words th, table.words td {
  text-align: left; }
table.engines th { white-space: normal; }
th button { font: inherit; color: inherit; background: none; border: 0; padding: 0; margin: 0;
  cursor: pointer; text-align: inherit; }
th button:hover { text-decoration: underline; }
th[aria-sort="ascending"] button::after { content: " \\2191"; }
th[aria-sort="descending"] button::after { content: " \\2193"; }
:focus-visible { outline: 2px solid var(--c1); outline-offset: 2px; }
.filter { margin: 0 0 .5rem; color: var(--soft); font-size: .86rem; }
.filter input { font: inherit; color: var(--ink); background: var(--page); width: 15rem;
  max-width: 100%; padding: .25rem .6rem; margin-right: .7rem; border: 1px solid var(--soft);
  border-radius: 6px; }
dl { display: grid; grid-template-columns: fit-content(14rem) minmax(0, 1fr); gap: .25rem 1.2rem;
  margin: 0; font-size: .92rem; }
dt { color: var(--soft); } dd { margin: 0; }
.unprinted { display: none; color: var(--soft); margin: -.6rem 0 1rem; }
"""

_NARROW = """
@media (max-width: 640px) {
  main { padding: 1rem .8rem 3rem; }
  .tiles { grid-template-columns: repeat(2, minmax(0, 1fr)); }
  figure { padding: .7rem; }
  svg .odd { display: none; }
  dl { grid-template-columns: minmax(0, 1fr); gap: 0; } dd { margin-bottom: .4rem; }
  .scroll { overflow-x: visible; }
  table, tbody { display: block; } table td { white-space: normal !important; }
  thead tr { display: flex; flex-wrap: wrap; gap: 0 .9rem; }
  thead th { padding: .1rem 0; border: 0; }
  thead tr:has(button)::before { content: "sort by"; color: var(--soft); }
  table.engines thead, th:not(:has(button)) { display: none; }
  tbody tr { display: flex; flex-wrap: wrap; gap: .15rem 1.1rem; padding: .5rem 0;
    border-bottom: 1px solid var(--line); }
  tbody tr[hidden] { display: none; }
  tbody td, table.words tbody td { display: block; padding: 0; border: 0; text-align: left;
    overflow-wrap: anywhere; max-width: 100%; min-width: 4.6rem; }
  tbody td:first-child { flex: 1 0 100%; font-weight: 600; }
  tbody td:empty { display: none; }
  td[data-head]:not(:first-child)::before { content: attr(data-head); display: block;
    color: var(--soft); font-size: .78rem; line-height: 1.2; font-weight: 400; }
}
"""

_PRINT = f"""
@page {{ size: A4; margin: 11mm; }}
@media print {{
  :root {{ color-scheme: light; font-size: 8.5pt; }}
  body {{ font-size: 1rem; line-height: 1.35; print-color-adjust: exact;
    -webkit-print-color-adjust: exact; }}
  main {{ max-width: none; padding: 0; }}
  h1 {{ font-size: 14pt; }} h2 {{ font-size: 10.5pt; break-after: avoid; }}
  section h2 {{ margin: .9rem 0 .4rem; }}
  nav, .filter {{ display: none; }}
  .tiles {{ grid-template-columns: repeat(4, minmax(0, 1fr)); gap: .4rem; margin: .6rem 0; }}
  .tiles div {{ padding: .4rem .6rem; }} .tiles b {{ font-size: 12pt; }}
  figure, .tiles div, tr, .verdict {{ break-inside: avoid; }}
  main > details {{ padding: .2rem 0; }} main > details[open] {{ padding-bottom: .6rem; }}
  section + details {{ margin-top: 1rem; }}
  .scroll {{ overflow: visible; }}
  table {{ font-size: 7.5pt; }}
  th, td {{ padding: .1rem .35rem; }}
  svg.bar {{ width: 90px; height: 12px; }}
  .drawn {{ grid-template-columns: repeat(4, minmax(0, 1fr)); gap: .4rem; }}
  tbody tr:nth-child(n + {PRINTED + 1} of :not([hidden])) {{ display: none; }}
  .unprinted:not([hidden]) {{ display: block; }}
}}
"""

STYLE = _SCREEN + LOOKS + _NARROW + _PRINT

_FILTERED = 12  # rows above which a table gets a filter box

SCRIPT = f"""
"use strict";
const PRINTED = {PRINTED}, FILTERED = {_FILTERED};
""" + (
    r"""
const UNITS = {B: 1, KiB: 1024, MiB: 1048576, GiB: 1073741824};
const NUMBER = /^[-+]?[\d.,]+(?:e[-+]?\d+)?(?: (B|KiB|MiB|GiB|dB|%|ms|\/s))?$/;

// What a cell is sorted by: a number, null where nothing is known, or undefined for words.
function value(text) {
  if (text === "" || text === "-") return null;
  if (text === "exact" || text === "inf") return Infinity;
  if (text === "NaN" || text === "nan") return -Infinity;
  const found = NUMBER.exec(text);
  return found ? parseFloat(text.replace(/,/g, "")) * (UNITS[found[1]] || 1) : undefined;
}

function sort(table, column, order) {
  const body = table.tBodies[0];
  const rows = [...body.rows].map(row => {
    const text = row.cells[column].textContent.trim();
    return {row, text, key: value(text)};
  });
  const words = rows.some(one => one.key === undefined);
  const empty = one => words ? one.text === "" || one.text === "-" : one.key === null;
  rows.sort((a, b) => {
    if (order === 0) return a.row.dataset.at - b.row.dataset.at;
    if (empty(a) || empty(b)) return empty(a) - empty(b);
    if (words) return order * a.text.localeCompare(b.text, undefined, {numeric: true});
    return a.key === b.key ? 0 : order * (a.key < b.key ? -1 : 1);
  });
  body.append(...rows.map(one => one.row));
}

function sortable(table) {
  [...table.tBodies[0].rows].forEach((row, at) => { row.dataset.at = at; });
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => {
    if (table.tBodies[0].querySelector(`td:nth-child(${column + 1}) svg`)) return;
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = head.textContent;
    button.title = "Sort by this column; again turns it round, a third time undoes it";
    button.addEventListener("click", () => {
      const now = head.getAttribute("aria-sort");
      const order = now === "ascending" ? -1 : now === "descending" ? 0 : 1;
      heads.forEach(other => other.removeAttribute("aria-sort"));
      if (order) head.setAttribute("aria-sort", order > 0 ? "ascending" : "descending");
      sort(table, column, order);
    });
    head.replaceChildren(button);
  });
}

function filterable(table) {
  const box = document.createElement("input"), count = document.createElement("span");
  const holder = document.createElement("p"), place = table.parentElement;
  const rows = [...table.tBodies[0].rows], cut = place.nextElementSibling;
  box.type = "search";
  box.placeholder = "filter rows";
  box.setAttribute("aria-label", "Show only the rows of this table that hold these words");
  count.setAttribute("role", "status");
  holder.className = "filter";
  holder.append(box, count);
  place.before(holder);
  box.addEventListener("input", () => {
    const words = box.value.toLowerCase().split(/\s+/).filter(Boolean);
    let shown = 0;
    for (const row of rows) {
      const text = row.textContent.toLowerCase();
      row.hidden = !words.every(word => text.includes(word));
      shown += !row.hidden;
    }
    count.textContent = words.length ? `${shown} of ${rows.length} rows` : "";
    if (cut && cut.className === "unprinted") {
      cut.hidden = shown <= PRINTED;
      cut.firstElementChild.textContent = shown - PRINTED;
    }
  });
}

// A link of the contents opens what it leads to.
function reveal() {
  const aim = document.getElementById(decodeURIComponent(location.hash.slice(1)));
  const fold = aim && aim.closest("details");
  if (fold) { fold.open = true; aim.scrollIntoView(); }
}

for (const table of document.querySelectorAll("table:not(.engines)")) {
  const rows = table.tBodies[0].rows.length;
  if (rows > 1) sortable(table);
  if (rows > FILTERED) filterable(table);
}
addEventListener("hashchange", reveal);
reveal();
"""
)


def _hash(text: str) -> str:
    """Return the hash of a text as a policy source."""
    digest = hashlib.sha256(text.encode("utf-8")).digest()
    return f"'sha256-{base64.b64encode(digest).decode('ascii')}'"


POLICY = (
    f"default-src 'none'; script-src {_hash(SCRIPT)}; style-src {_hash(STYLE)}; img-src data:;"
    " base-uri 'none'; form-action 'none'"
)

_MARKS = {GOOD: "good", FLOAT: "float", DOUBTFUL: "doubtful", UNUSABLE: "unusable"}


def verdicts(judged: Iterable[tuple[str, Verdict]]) -> str:
    """Return one line per engine: the level as a mark, its label, the reasons; "" without any."""
    rows = "".join(
        f'<p class="verdict {_MARKS[one.level]}"><b>{escape(one.level)}</b>'
        f" {escape(label)}: {escape('; '.join(one.reasons))}</p>"
        for label, one in judged
    )
    return f'<div class="verdicts">{rows}</div>' if rows else ""


def tiles(main_figures: Iterable[tuple[str, str]]) -> str:
    """Return the main figures, each a value over its label; "" without any."""
    cells = "".join(
        f"<div><b>{escape(value)}</b><span>{escape(label)}</span></div>"
        for value, label in main_figures
    )
    return f'<div class="tiles">{cells}</div>' if cells else ""


def page(title: str, body: str) -> str:
    """Return a complete HTML page.

    `title`: plain text. `body`: HTML.
    """
    return encodable(
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="generator" content="calib8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n"
        f"<body>\n<main>\n{body}\n</main>\n<script>{SCRIPT}</script>\n</body>\n</html>\n"
    )
