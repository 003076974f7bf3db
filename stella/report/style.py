"""The look of the page: quiet, readable on a phone, light or dark as the reader's system is."""

CSS = """
:root {
  color-scheme: light dark;
  --paper: #faf9f6; --card: #ffffff; --ink: #1c1d21; --faint: #6a6d76; --line: #e4e2dc; --accent: #0b5c8a;
  --c0: #0072b2; --c1: #d55e00; --c2: #00865f; --c3: #a83e86; --c4: #b07c00;
  --c5: #3d9bd6; --c6: #6b6b6b; --c7: #7a4fbf;
  --first: #d8e6ef; --last: #0f4c75; --low: #f3f6f7; --high: #08517e; --on-high: #ffffff;
}
@media (prefers-color-scheme: dark) {
  :root {
    --paper: #131418; --card: #1b1d22; --ink: #e9e8e4; --faint: #9a9da6; --line: #2f323a; --accent: #7cc0ea;
    --c0: #5fb3ee; --c1: #ff9257; --c2: #3ecfa0; --c3: #ec93cc; --c4: #edbd4d;
    --c5: #a5d8ff; --c6: #a9a9a9; --c7: #b99cf2;
    --first: #2b4355; --last: #a9dcff; --low: #20242b; --high: #58b4ee; --on-high: #0c1116;
  }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif; }
main { max-width: 1080px; margin: 0 auto; padding: 3.2rem 1.25rem 5rem; }
h1, h2, h3 { font-family: ui-serif, Charter, "Iowan Old Style", Georgia, serif; font-weight: 600; line-height: 1.2; }
h1 { font-size: clamp(1.8rem, 5vw, 2.5rem); margin: 0 0 .4rem; letter-spacing: -.01em; }
h2 { font-size: 1.45rem; margin: 3.4rem 0 .5rem; }
h3 { font-size: 1rem; margin: 0 0 .6rem; }
p { margin: .3rem 0 1rem; max-width: 44rem; }
.faint, figcaption { color: var(--faint); font-size: .88rem; }
div + p.faint { margin: .9rem 0 .2rem; }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 1.1rem 1.2rem; }
.cards { display: grid; gap: 1rem; margin: 1rem 0;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 420px), 1fr)); }
.wide { margin: 1rem 0; }
.scroll { overflow-x: auto; }
.scroll > figure > svg { min-width: 560px; }
.bar { height: 4px; width: 2.6rem; border-radius: 2px; margin: 3.4rem 0 -2.6rem; }
figure { margin: 0; }
figcaption { margin-top: .5rem; }
svg { display: block; width: 100%; height: auto; }
svg text { font-family: inherit !important; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; font-size: .93rem; }
th, td { padding: .38rem .65rem; text-align: right; white-space: nowrap; }
th { font-weight: 500; color: var(--faint); font-size: .84rem; vertical-align: bottom; }
td:first-child, th:first-child { text-align: left; padding-left: 0; }
tbody tr + tr td { border-top: 1px solid var(--line); }
tbody.cues td { color: var(--faint); border-top: 0; padding-block: .18rem; font-size: .88rem; }
tbody.cues tr:first-child td { border-top: 2px solid var(--line); padding-top: .6rem; }
td.best { font-weight: 650; }
td.left { text-align: left; white-space: normal; }
.dot { display: inline-block; width: .62em; height: .62em; border-radius: 50%; margin-right: .5em; }
.heat { font-size: .85rem; border-spacing: 2px; border-collapse: separate; }
.heat td, .heat th { padding: .42rem .2rem; text-align: center; border: 0 !important; border-radius: 4px; }
.heat th:first-child { text-align: right; padding-right: .6rem; }
.heat td { background: color-mix(in oklab, var(--high) calc(var(--p) * 1%), var(--low)); }
.heat td.hot { color: var(--on-high); }
.heat td.ahead { opacity: .5; }
.heat td.own { outline: 2px solid var(--faint); outline-offset: -2px; }
details { margin: .6rem 0; }
summary { cursor: pointer; color: var(--accent); }
details table { font-size: .84rem; margin-top: .5rem; }
details td { font-family: ui-monospace, "SF Mono", Menlo, Consolas, monospace; font-size: .8rem; }
details.plain td { font-family: inherit; font-size: .88rem; }
.config td { text-align: left; white-space: normal; overflow-wrap: anywhere; padding: .18rem .65rem .18rem 0; }
.note { border-left: 3px solid var(--c1); padding: .1rem 0 .1rem .8rem; margin: .8rem 0; }
@media (max-width: 560px) {
  main { padding-top: 1.8rem; }
  .card { padding: .9rem .8rem; }
  th, td { padding-inline: .4rem; }
}
@media print { body { background: none; } .card { break-inside: avoid; } }
"""
