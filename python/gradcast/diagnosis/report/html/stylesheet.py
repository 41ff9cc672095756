"""The page's style: light, dark and on paper. Colours of parts (gradcast/palette.py) are the same in all."""

from gradcast.palette import NETWORK, PARTS

_PARTS = {**{f"p-{part}": colour for part, colour in PARTS.items()}, "block": NETWORK}
CSS = (
    "\n".join(f".{name} {{ --p: {colour}; }}" for name, colour in _PARTS.items())
    + """
:root {
  --page: #ffffff; --card: #f5f7f9; --ink: #16202a; --soft: #5a6875; --line: #dde3e8; --accent: #1f6fb2;
  --band: #1f6fb21f; --warm: #c0392b;
  --h0: #eef2f5; --h1: #fde3cf; --h2: #fbc4a0; --h3: #f59a6c; --h4: #e0653f; --h5: #b3361f;
  --on-hot: #ffffff; --s0: #1f6fb2; --s1: #b4561c; --s2: #3d7d52; --s3: #7a519f;
}
@media screen and (prefers-color-scheme: dark) {
  :root {
    --page: #12171c; --card: #1b2229; --ink: #e6ebf0; --soft: #9aa8b5; --line: #303b45; --accent: #6cb2eb;
    --band: #6cb2eb2b; --warm: #ff8a75;
    --h0: #212a32; --h1: #4b372c; --h2: #70452f; --h3: #9c5531; --h4: #cf6a3a; --h5: #ff8f5c;
    --on-hot: #10181f; --s0: #6cb2eb; --s1: #f0a168; --s2: #7ccb96; --s3: #c3a1e8;
  }
}
* { box-sizing: border-box; }
html { background: var(--page); color: var(--ink); color-scheme: light dark; }
body { margin: 0 auto; max-width: 1080px; padding: 2.2rem 2rem 3rem;
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", "DejaVu Sans", sans-serif; }
h1 { font-size: 1.9rem; line-height: 1.2; margin: 0 0 .2rem; letter-spacing: -.01em; }
h2 { font-size: 1.2rem; margin: 0 0 .8rem; letter-spacing: -.005em; }
p { margin: 0 0 .6rem; }
section { border-top: 1px solid var(--line); margin-top: 2.2rem; padding-top: 1.4rem; }
.brand { color: var(--accent); font-weight: 600; letter-spacing: .04em; margin-bottom: .3rem; font-size: .9rem; }
.origin, .missing, figcaption, .note, footer, caption, summary { color: var(--soft); }
.origin { font-size: .92rem; }
footer { border-top: 1px solid var(--line); margin-top: 2.4rem; padding-top: 1rem; font-size: .85rem; }
.verdict { background: var(--card); border-left: 4px solid var(--accent); border-radius: 0 8px 8px 0;
  margin: 1.3rem 0; padding: 1rem 1.3rem; }
.kind { color: var(--accent); font-size: .8rem; font-weight: 700; letter-spacing: .07em; text-transform: uppercase; }
.sentence { font-size: 1.18rem; line-height: 1.45; margin: .2rem 0 0; }
.hopeless { color: var(--warm); margin: .5rem 0 0; }
.tiles { display: grid; gap: .9rem; grid-template-columns: repeat(auto-fit, minmax(200px, 1fr)); }
.tiles > div { background: var(--card); border-radius: 8px; padding: .8rem 1rem; }
.tiles p { margin: 0; }
.tiles .name { color: var(--soft); font-size: .85rem; }
.tiles .value { font-size: 1.7rem; font-weight: 650; font-variant-numeric: tabular-nums; line-height: 1.3; }
.tiles .note { font-size: .84rem; line-height: 1.35; }
figure { margin: 0 0 1rem; }
figcaption { font-size: .9rem; margin-top: .2rem; }
figure svg { display: block; height: auto; width: 100%; }
svg text { fill: var(--ink); font-size: 13px; }
svg .tick { fill: var(--soft); font-size: 12px; font-variant-numeric: tabular-nums; }
svg .inside { fill: #10181f; font-variant-numeric: tabular-nums; pointer-events: none; }
svg .small { font-size: 11px; }
svg .shown { font-weight: 700; }
svg .grid { stroke: var(--line); stroke-width: 1; }
svg .reference { stroke: var(--soft); stroke-dasharray: 5 4; stroke-width: 1.2; }
svg .end { stroke: var(--ink); stroke-width: 2.5; }
svg .diagonal { stroke: var(--soft); stroke-width: 1; }
svg .interval { stroke: var(--accent); stroke-linecap: round; stroke-width: 3; opacity: .55; }
svg .curve { fill: none; stroke: var(--accent); stroke-linejoin: round; stroke-width: 2; }
svg .measured { fill: var(--accent); }
svg .promised { fill: var(--page); stroke: var(--accent); stroke-width: 2; }
svg .band { fill: var(--band); }
.s0 { --c: var(--s0); } .s1 { --c: var(--s1); } .s2 { --c: var(--s2); } .s3 { --c: var(--s3); }
svg polygon:is(.s0, .s1, .s2, .s3) { fill: var(--c); fill-opacity: .13; }
svg polyline:is(.s0, .s1, .s2, .s3) { stroke: var(--c); }
svg text:is(.s0, .s1, .s2, .s3) { fill: var(--c); }
svg circle[class^="s"] { fill: var(--page); stroke: var(--c); stroke-width: 2; }
svg circle[class^="s"].measured { fill: var(--c); }
svg circle[class^="s"].extrapolated { stroke-opacity: .55; }
.predicted-bar { --p: #a9c9ea; } .measured-bar { --p: #5f9fd6; } .floor-bar { --p: #cdd5dc; }
.h0 { --p: var(--h0); } .h1 { --p: var(--h1); } .h2 { --p: var(--h2); }
.h3 { --p: var(--h3); } .h4 { --p: var(--h4); } .h5 { --p: var(--h5); }
svg rect { fill: var(--p); }
svg rect:hover, svg circle:hover { filter: brightness(1.12); outline: 1px solid var(--ink); }
td.h1, td.h2, td.h3, td.h4, td.h5 { background: var(--p); border-radius: 3px; }
td.h4 { color: #10181f; } td.h5 { color: var(--on-hot); }
.swatch { background: var(--p); border-radius: 3px; display: inline-block; height: .85em; margin-right: .45em;
  vertical-align: -.05em; width: .85em; }
.key { display: flex; flex-wrap: wrap; font-size: .88rem; gap: .3rem 1.2rem;
  list-style: none; margin: 0 0 .7rem; padding: 0; }
.table { overflow-x: auto; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; margin: .3rem 0 .6rem; }
caption { font-size: .85rem; padding-bottom: .3rem; text-align: left; }
th, td { border-bottom: 1px solid var(--line); padding: .32rem .9rem .32rem 0; text-align: left; vertical-align: top; }
th { font-weight: 500; }
.r { padding-left: .7rem; padding-right: .7rem; text-align: right; white-space: nowrap; }
thead th, thead th.r { color: var(--soft); font-size: .84rem; max-width: 11em;
  vertical-align: bottom; white-space: normal; }
.gain svg { display: block; width: 150px; }
code { background: var(--card); border-radius: 4px;
  font: .86em/1.4 ui-monospace, "SFMono-Regular", Menlo, Consolas, "DejaVu Sans Mono", monospace;
  overflow-wrap: break-word; padding: .1em .35em; }
td:has(> code) { min-width: 15em; }
summary { cursor: pointer; font-size: .9rem; padding: .2rem 0; }
details caption { display: none; }
.findings { margin: 0 0 1rem; padding-left: 1.2rem; }
@media (max-width: 640px) {
  body { padding: 1.2rem 1rem 2rem; } figure { overflow-x: auto; } figure svg { min-width: 680px; }
}
@media print {
  :root { --soft: #4a5763; --line: #d3dae0; }
  @page { margin: 14mm 13mm; }
  html { color-scheme: light; -webkit-print-color-adjust: exact; print-color-adjust: exact; }
  html { font-size: 11.5px; }
  body { font-size: 1rem; max-width: none; padding: 0; }
  .table { overflow: visible; } .tiles { grid-template-columns: repeat(4, 1fr); }
  h2 { break-after: avoid; } figure, .tiles, .verdict, table { break-inside: avoid; } .key { break-after: avoid; }
  section { margin-top: 1.2rem; padding-top: .9rem; }
  details:not([open])::details-content { block-size: auto; content-visibility: visible; }
  details summary, details.long { display: none; } details caption { display: table-caption; }
}
"""
)
