"""The page's style: one sheet, colours as variables, light or dark as the reader's system asks.

Rows of a table are cards on a narrow screen; on paper a long table is cut, and what is folded stays
so.
"""

from __future__ import annotations

from deploy.report.look_style import LOOKS

PRINTED = 25  # rows of a table on paper

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
table.engines td:last-child { color: var(--good); }
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
