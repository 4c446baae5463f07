"""The style sheet of a report: by day, by night, on a phone, on paper."""

from esper.report.ink import COLOURS


def style_sheet() -> str:
    """All of it; colours come from the figures' own table."""
    light, dark = (
        "".join(f"--{name}:{pair[index]};" for name, pair in COLOURS.items())
        for index in (0, 1)
    )
    return (
        f":root{{color-scheme:light dark;{light}}}\n"
        f"@media screen and (prefers-color-scheme:dark){{:root{{{dark}}}}}\n{RULES}"
    )


RULES = """
*{box-sizing:border-box}
html{-webkit-text-size-adjust:100%;scroll-behavior:smooth}
body{margin:0;background:var(--paper);color:var(--ink);
 font:16px/1.55 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",
 "Noto Sans","DejaVu Sans",sans-serif}
main,header,footer{max-width:980px;margin:0 auto;padding:0 20px}
header{padding-top:44px}
h1{font-size:2rem;line-height:1.2;margin:0 0 .4rem;letter-spacing:-.015em;
 overflow-wrap:anywhere}
h2{font-size:1.35rem;line-height:1.25;margin:3.2rem 0 .5rem;padding-top:1.4rem;
 border-top:1px solid var(--rule);letter-spacing:-.01em}
h3{font-size:1.05rem;margin:1.8rem 0 .3rem}
p{margin:.5rem 0;max-width:70ch;overflow-wrap:anywhere}
a{color:var(--blue)}
.kicker{color:var(--muted);font-size:.9rem;margin:0 0 .3rem}
.lede{font-size:1.12rem}
.quiet,figcaption,caption{color:var(--muted)}
.small{font-size:.86rem}
.none{color:var(--muted);font-style:italic}
nav{margin:1.2rem 0 0;font-size:.92rem}
nav ul{display:flex;flex-wrap:wrap;gap:.25rem 1.1rem;list-style:none;margin:0;padding:0}
nav a{text-decoration:none}
nav a:hover{text-decoration:underline}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(132px,1fr));gap:12px;
 margin:1.3rem 0 0;padding:0}
.tiles div{border:1px solid var(--rule);border-radius:8px;padding:10px 14px}
.tiles dt{color:var(--muted);font-size:.84rem}
.tiles dd{margin:0;font-size:1.3rem;line-height:1.3;font-variant-numeric:tabular-nums;
 overflow-wrap:anywhere}
.verdict{border-left:4px solid var(--blue);padding:.1rem 0 .1rem 1rem;margin:1.4rem 0}
.grid{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,400px),1fr));
 gap:28px 28px;margin:1.3rem 0;align-items:start}
figure{margin:0;min-width:0}
figure svg{display:block;width:100%;height:auto;overflow:visible}
figure svg text{font-family:inherit;font-variant-numeric:tabular-nums}
figure svg *{stroke-linejoin:round;stroke-linecap:butt}
figcaption{font-size:.86rem;line-height:1.45;margin-top:.4rem}
.scroll{overflow-x:auto;margin:1.1rem 0;-webkit-overflow-scrolling:touch}
.scroll:focus-visible{outline:2px solid var(--blue);outline-offset:3px}
.lanes{min-width:440px}
.legend{display:flex;flex-wrap:wrap;gap:.2rem 1.2rem;list-style:none;padding:0;
 margin:.9rem 0;font-size:.88rem;color:var(--muted)}
.legend i{display:inline-block;width:13px;height:11px;border-radius:2px;
 margin-right:.45em;vertical-align:-1px}
table{border-collapse:collapse;width:100%;font-size:.88rem;
 font-variant-numeric:tabular-nums}
caption{text-align:left;font-size:.88rem;padding:0 0 .5rem;caption-side:top}
th,td{padding:.32rem .42rem;border-bottom:1px solid var(--rule);text-align:left;
 vertical-align:baseline}
thead th{color:var(--muted);font-weight:600;font-size:.84rem;line-height:1.25;
 border-bottom-color:var(--muted);vertical-align:bottom}
th:first-child{padding-left:.3rem}
tbody th{font-weight:500;position:sticky;left:0;background:var(--paper)}
.numbers td{text-align:right;white-space:nowrap}
.numbers thead th:not(:first-child){text-align:right}
.words td{overflow-wrap:anywhere;min-width:6em}
.strong th,.strong td{font-weight:700}
td span,td small{display:block}
.nowrap{white-space:nowrap}
.words td,.words th{padding-right:1.1rem}
.strong td,.strong th{background:color-mix(in srgb,var(--blue) 9%,var(--paper))}
td small{color:var(--muted);font-weight:400;font-size:.82em}
details{border:1px solid var(--rule);border-radius:8px;padding:.5rem 1rem;
 margin:.9rem 0}
summary{cursor:pointer;font-weight:600}
pre{overflow-x:auto;font:13px/1.5 ui-monospace,"SF Mono",Menlo,Consolas,
 "DejaVu Sans Mono",monospace;margin:.7rem 0 .3rem}
code{font-family:ui-monospace,"SF Mono",Menlo,Consolas,"DejaVu Sans Mono",monospace;
 font-size:.92em;overflow-wrap:anywhere}
footer{color:var(--muted);font-size:.86rem;padding-top:2.6rem;padding-bottom:3rem}
@media (max-width:520px){
 body{font-size:15px}
 main,header,footer{padding-left:16px;padding-right:16px}
 header{padding-top:26px}
 h1{font-size:1.55rem}
}
@media print{
 body{font-size:10.5pt}
 nav{display:none}
 h2{break-after:avoid}
 figure,tr,.tiles,.verdict{break-inside:avoid}
 .scroll{overflow:visible}
 .grid{grid-template-columns:1fr 1fr}
 .lanes{min-width:0}
}
"""
