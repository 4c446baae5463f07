"""Style of plots: sizes, fonts, and colours for light and dark mode.

Plots are drawn in the colours of light mode. In the SVG elements of the page, each
colour becomes `var(--name)`, which the CSS defines for both modes. Line colours suit
colour-blind readers (Okabe and Ito 2008).
"""

import io
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DPI: Final = 72
WIDTH: Final = 456
"""Pixels of a plot; a wide screen shows two in a row."""

COLOURS: Final[Mapping[str, tuple[str, str]]] = {
    "background": ("#ffffff", "#15191d"),
    "text": ("#1c2126", "#e4e8ec"),
    "muted": ("#59636d", "#a5afb9"),
    "rule": ("#d8dde1", "#39424a"),
    "blue": ("#0072b2", "#5ab4f0"),
    "orange": ("#d55e00", "#f58a47"),
    "green": ("#009e73", "#35c79b"),
    "amber": ("#b98000", "#f0b93a"),
    "purple": ("#a8488c", "#e39acb"),
    "sky": ("#3f9fd8", "#93d3f8"),
    "grey": ("#87919b", "#7d8892"),
    "training": ("#a6d4ef", "#1d5a80"),
    "blending": ("#f3cf73", "#7d5800"),
    "holding": ("#e2aacd", "#7c426a"),
    "kept": ("#74cdb0", "#0b654c"),
    "cooling": ("#c6ccd2", "#474f57"),
}
"""Colours in light and dark mode; the last five are behind text."""
LIGHT: Final = {name: pair[0] for name, pair in COLOURS.items()}
DARK: Final = {name: pair[1] for name, pair in COLOURS.items()}
LINE_COLOURS: Final = (
    "blue",
    "orange",
    "green",
    "purple",
    "amber",
    "sky",
    "grey",
    "text",
)
STYLE: Any = {
    "font.size": 10.5,
    "text.color": LIGHT["text"],
    "text.parse_math": False,
    "axes.edgecolor": LIGHT["rule"],
    "axes.facecolor": "none",
    "axes.labelcolor": LIGHT["muted"],
    "axes.spines.left": False,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "axes.formatter.useoffset": False,
    "axes.titlelocation": "left",
    "axes.titlesize": "medium",
    "figure.facecolor": "none",
    "figure.dpi": DPI,
    "figure.titlesize": 12.5,
    "figure.titleweight": "bold",
    "grid.color": LIGHT["rule"],
    "legend.frameon": False,
    "legend.labelcolor": LIGHT["muted"],
    "lines.linewidth": 1.8,
    "svg.fonttype": "none",
    "svg.hashsalt": "esper",
    "xtick.color": LIGHT["rule"],
    "xtick.labelcolor": LIGHT["muted"],
    "ytick.labelcolor": LIGHT["muted"],
    "ytick.major.size": 0,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Plot:
    """A rendered figure."""

    name: str
    """Name of its files, without the suffix."""
    alt: str
    """Description for screen readers."""
    inline: str
    """SVG element with CSS colours."""
    svg: bytes
    png: bytes


@contextmanager
def plot_style() -> Iterator[None]:
    """Use this style for all figures drawn and rendered inside."""
    import matplotlib as mpl

    with mpl.rc_context(STYLE), warnings.catch_warnings():
        # Characters that the font lacks are drawn as boxes.
        warnings.filterwarnings("ignore", message=".*[Gg]lyph")
        yield


def new_figure(title: str, height: float, width: float = WIDTH) -> "Figure":
    """An empty figure with a title; sizes in pixels."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width / DPI, height / DPI), layout="constrained")
    figure.suptitle(title, x=0, ha="left")
    return figure


def render(
    figure: "Figure", name: str, alt: str, tooltips: Mapping[str, str] | None = None
) -> Plot:
    """Render a figure drawn inside `plot_style`; `tooltips` are by `gid` of artists."""
    vector, raster = io.BytesIO(), io.BytesIO()
    no_metadata = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    figure.savefig(vector, format="svg", metadata=no_metadata)
    figure.set_layout_engine("none")  # keep the layout
    paper = LIGHT["background"]
    figure.savefig(
        raster, dpi=2 * DPI, facecolor=paper, pil_kwargs={"compress_level": 4}
    )
    text = vector.getvalue().decode()
    start = text.index("<svg")
    head, (opening, body) = text[:start], text[start:].split(">", 1)
    # A white background, since some programs show transparency as black.
    ground = f'<rect width="100%" height="100%" fill="{paper}"/>'
    return Plot(
        name=name,
        alt=alt,
        inline=_inline(opening, body, name, alt, tooltips or {}),
        svg=f"{head}{opening}>\n {ground}{body}".encode(),
        png=raster.getvalue(),
    )


def _inline(
    opening: str, body: str, name: str, alt: str, tooltips: Mapping[str, str]
) -> str:
    """The SVG as an element of the page, with ids that are unique on the page."""
    box = re.search(r'viewBox="([^"]*)"', opening)
    assert box is not None
    body = re.sub(r"<style[^>]*>.*?</style>", "", body, count=1, flags=re.DOTALL)
    # Change only tags, not the text between them.
    body = re.sub(r"<[^>]+>", lambda found: _tag(found[0], name, tooltips), body)
    body = re.sub(r"\s*\n\s*", "\n", body).strip()
    return f'<svg viewBox="{box[1]}" role="img" aria-label="{escape(alt)}">{body}'


def _tag(tag: str, name: str, tooltips: Mapping[str, str]) -> str:
    """One tag with CSS colours and the font of the page."""
    group = re.match(r'<g id="([^"]*)"', tag)
    if group is not None:
        tooltip = tooltips.get(group[1])
        title = "" if tooltip is None else f"<title>{escape(tooltip)}</title>"
        return f"<g{tag[group.end() :]}{title}"
    tag = re.sub(r'\bid="', f'id="{name}-', tag)
    tag = re.sub(r'(url\(|href=")#', rf"\1#{name}-", tag)
    tag = re.sub(r" *font-family:[^;\"]*;?", "", tag)
    for colour, value in LIGHT.items():
        tag = tag.replace(value, f"var(--{colour})")
    return tag
