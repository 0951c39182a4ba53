"""The page's style: one sheet, colours as variables, light or dark as the reader's system asks."""

STYLE = """
:root { color-scheme: light dark;
  --page: #ffffff; --card: #f4f6f8; --ink: #1b2430; --soft: #5d6b7a; --line: #dde3e9;
  --warn: #8a5a00; --bad: #b3261e; --warn-card: #fff6e0;
  --c0: #6b7f93; --c1: #0b8a6f; --c2: #b5541c; --c3: #5b55c0; }
@media (prefers-color-scheme: dark) { :root {
  --page: #12171d; --card: #1b222b; --ink: #e4eaf0; --soft: #97a5b4; --line: #2d3742;
  --warn: #f0c163; --bad: #ff8a80; --warn-card: #2c2514;
  --c0: #93a8bd; --c1: #35c4a2; --c2: #ee8a52; --c3: #a09bff; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Liberation Sans", sans-serif; }
main { max-width: 1080px; margin: 0 auto; padding: 2rem 1.25rem 4rem; }
h1 { font-size: 1.7rem; line-height: 1.25; margin: 0 0 .25rem; overflow-wrap: anywhere; }
h2 { font-size: 1.1rem; margin: 2.4rem 0 .7rem; padding-bottom: .3rem;
  border-bottom: 1px solid var(--line); }
.sub { color: var(--soft); margin: 0 0 1rem; overflow-wrap: anywhere; }
.notes { margin: 0; padding-left: 1.2rem; overflow-wrap: anywhere; font-size: .92rem; }
.troubles { background: var(--warn-card); color: var(--warn); border-radius: 8px; margin: 1rem 0;
  padding: .7rem 1rem .7rem 2rem; overflow-wrap: anywhere; }
.verdict { margin: .5rem 0; padding: .5rem .9rem; border-radius: 8px; background: var(--card);
  border-left: 5px solid var(--c1); overflow-wrap: anywhere; }
.verdict.float { border-color: var(--c0); } .verdict.doubtful { border-color: var(--warn); }
.verdict.unusable { border-color: var(--bad); }
.tiles { display: grid; gap: .8rem; margin: 1.4rem 0;
  grid-template-columns: repeat(auto-fit, minmax(170px, 1fr)); }
.tiles div { background: var(--card); border-radius: 10px; padding: .9rem 1.1rem; }
.tiles b { display: block; font-size: 1.65rem; line-height: 1.2; color: var(--c1);
  font-variant-numeric: tabular-nums; }
.tiles span { color: var(--soft); font-size: .86rem; }
figure { margin: 0 0 1rem; padding: 1rem; background: var(--card); border-radius: 10px; }
figcaption { color: var(--soft); font-size: .84rem; margin-top: .5rem; }
svg.wide { display: block; width: 100%; height: auto; }
svg.bar { display: block; }
svg text { font: 12px system-ui, -apple-system, "Segoe UI", Roboto, "Liberation Sans", sans-serif;
  fill: var(--soft); }
svg .tick { text-anchor: middle; }
svg .end, svg .left { text-anchor: end; }
svg .axis { stroke: var(--soft); }
svg .grid { stroke: var(--line); }
svg .area { fill-opacity: .28; stroke-width: 1.4; }
svg .median { stroke-width: 1.4; stroke-dasharray: 4 3; }
svg .name { font-weight: 600; paint-order: stroke; stroke: var(--card); stroke-width: 5px; }
svg .area.c0 { fill: var(--c0); } svg .area.c1 { fill: var(--c1); }
svg .area.c2 { fill: var(--c2); } svg .area.c3 { fill: var(--c3); }
svg path.c0, svg line.c0 { stroke: var(--c0); } svg path.c1, svg line.c1 { stroke: var(--c1); }
svg path.c2, svg line.c2 { stroke: var(--c2); } svg path.c3, svg line.c3 { stroke: var(--c3); }
svg text.c0 { fill: var(--c0); } svg text.c1 { fill: var(--c1); }
svg text.c2 { fill: var(--c2); } svg text.c3 { fill: var(--c3); }
svg .seen { stroke: var(--soft); stroke-width: 1.5; }
svg .kept { fill: var(--c1); fill-opacity: .75; }
svg .zero { stroke: var(--ink); stroke-width: 1; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: .9rem; }
th { text-align: right; color: var(--soft); font-weight: 600; white-space: nowrap; }
td { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
th, td { padding: .36rem .7rem; border-bottom: 1px solid var(--line); vertical-align: middle; }
th:first-child, td:first-child { text-align: left; padding-left: 0; }
table.tensors td:first-child { white-space: normal; overflow-wrap: anywhere; min-width: 9rem; }
table.tensors th:nth-child(2) { text-align: left; }
table.engines td:last-child { color: var(--c1); }
table.engines th:last-child, table.engines td:last-child { text-align: left; }
table.words th, table.words td { text-align: left; white-space: normal; overflow-wrap: anywhere; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .25rem 1.2rem; margin: 0;
  font-size: .92rem; }
dt { color: var(--soft); } dd { margin: 0; overflow-wrap: anywhere; }
summary { cursor: pointer; color: var(--soft); }
@media print { main { max-width: none; padding: 0; } figure, .tiles div { break-inside: avoid; } }
"""
