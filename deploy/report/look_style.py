"""The part of the page's sheet that pictures and drawings take."""

from __future__ import annotations

BOX = 120  # pixels of the square that a picture is shown in
LONG = 250  # pixels of a drawing's longer side

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
