"""How plots look: sizes, fonts, and colours that follow the page into dark mode.

Plots are drawn in the colours of light mode. In an SVG of the page each of them becomes
`var(--name)`, which the page's CSS sets for both modes; text stays text in the page's
own font. One unit of a figure is one pixel of the page. Line colours differ for any
kind of colour vision (after Okabe and Ito 2008).
"""

import io
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Number = int | float
DPI: Final = 72
WIDTH: Final = 456
"""Of a plot, of which two stand side by side on a wide screen."""

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
"""Every colour in light and dark mode; text stands on the last five."""
LINES: Final = ("blue", "orange", "green", "purple", "amber", "sky", "grey", "text")
STYLE: Any = {
    "font.family": "sans-serif",
    "font.size": 11,
    "text.color": COLOURS["text"][0],
    "text.parse_math": False,
    "axes.edgecolor": COLOURS["rule"][0],
    "axes.labelcolor": COLOURS["muted"][0],
    "axes.labelsize": 10.5,
    "axes.linewidth": 1.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "axes.formatter.useoffset": False,
    "grid.color": COLOURS["rule"][0],
    "grid.linewidth": 0.8,
    "xtick.color": COLOURS["rule"][0],
    "ytick.color": COLOURS["rule"][0],
    "xtick.labelcolor": COLOURS["muted"][0],
    "ytick.labelcolor": COLOURS["muted"][0],
    "xtick.major.size": 3,
    "ytick.major.size": 0,
    "ytick.major.pad": 6,
    "lines.linewidth": 1.8,
    "lines.solid_capstyle": "round",
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "svg.fonttype": "none",
    "svg.hashsalt": "esper",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Plot:
    """A rendered figure."""

    name: str
    """Of its files, without an ending."""
    alt: str
    """What it shows, for screen readers."""
    inline: str
    """SVG element whose colours are the page's."""
    svg: bytes
    png: bytes


@contextmanager
def plot_style() -> Iterator[None]:
    """Draw and render figures in this style."""
    import matplotlib as mpl

    with mpl.rc_context(STYLE), warnings.catch_warnings():
        # A name may hold characters that the font lacks: a box stands for each.
        warnings.filterwarnings("ignore", message=".*[Gg]lyph")
        yield


def light(name: str) -> str:
    """A colour in light mode, as figures are drawn."""
    return COLOURS[name][0]


def one_line(text: object, limit: int = 48) -> str:
    """A name as one short line of visible characters."""
    shown = "".join(sign if sign.isprintable() else "�" for sign in str(text))
    return shown if len(shown) <= limit else f"{shown[: limit - 1]}…"


def new_figure(title: str, width: int, height: int) -> "Figure":
    """A figure with nothing but its title; sizes in pixels."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width / DPI, height / DPI), dpi=DPI)
    figure.text(0, 1 - 14 / height, title, size=12.5, weight="bold", va="baseline")
    return figure


def add_axes(
    figure: "Figure",
    *,
    left: Number = 46,
    right: Number = 12,
    top: Number = 34,
    bottom: Number = 30,
) -> "Axes":
    """Axes that leave these margins, in pixels."""
    wide, high = figure.get_size_inches() * DPI
    size = ((wide - left - right) / wide, (high - top - bottom) / high)
    return figure.add_axes((left / wide, bottom / high, *size))


def add_text(
    axes: "Axes",
    text: str,
    at: tuple[Number, Number],
    offset: tuple[Number, Number] = (0, 0),
    *,
    where: str = "data",
    colour: str = "text",
    size: Number = 10.5,
    align: str = "left",
    va: str = "center_baseline",
) -> None:
    """Text at a point in data or `axes fraction`, moved by pixels."""
    axes.annotate(
        text,
        at,
        xycoords=where,
        xytext=offset,
        textcoords="offset points",
        ha=align,
        va=va,
        size=size,
        color=light(colour),
    )


def add_rectangle(
    axes: "Axes",
    corner: tuple[Number, Number],
    size: tuple[Number, Number],
    colour: str,
    *,
    alpha: float | None = None,
    edge: float = 0.0,
    gid: str | None = None,
) -> None:
    """A filled rectangle in data coordinates; limits do not follow it."""
    from matplotlib.patches import Rectangle

    face, rim = light(colour), light("background")
    rectangle = Rectangle(corner, *size, fc=face, ec=rim, lw=edge, alpha=alpha, gid=gid)
    axes.add_artist(rectangle)


def spread(
    heights: Sequence[float], gap: float, low: float, high: float
) -> list[float]:
    """Ascending heights moved apart by at least a gap, within bounds if they fit."""
    moved: list[float] = []
    for height in heights:
        wanted = min(max(height, low), high)
        moved.append(wanted if not moved else max(wanted, moved[-1] + gap))
    for index in reversed(range(len(moved))):
        limit = high if index == len(moved) - 1 else moved[index + 1] - gap
        moved[index] = min(moved[index], limit)
    return moved


def label_ends(axes: "Axes", labels: Sequence[tuple[float, str, str]]) -> None:
    """Write names at the right edge, each at its height or the next free one.

    Args:
        axes: With their final limits.
        labels: Height in data, text and colour of each.
    """
    box = axes.get_window_extent()
    ordered = sorted(labels, key=lambda label: label[0])
    levels = [float(axes.transData.transform((0, y))[1]) for y, _, _ in ordered]
    heights = spread(levels, 13.0, box.y0 + 4, box.y1 - 4)
    for (_, text, colour), *ends in zip(ordered, levels, heights, strict=True):
        level, height = ((end - box.y0) / box.height for end in ends)
        axes.plot(
            [1, 1 + 10 / box.width],
            [level, height],
            transform=axes.transAxes,
            clip_on=False,
            color=light(colour),
            lw=0.8,
            scalex=False,
            scaley=False,
        )
        add_text(axes, text, (1, height), (13, 0), where="axes fraction", colour=colour)


def render(
    figure: "Figure", name: str, alt: str, tooltips: Mapping[str, str] | None = None
) -> Plot:
    """A figure as SVG for the page and as bytes for files.

    Args:
        figure: Drawn within `plot_style`.
        name: Of its files, without an ending.
        alt: What it shows, for screen readers.
        tooltips: Text by the `gid` of the artist.
    """
    vector, raster = io.BytesIO(), io.BytesIO()
    no_metadata = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    figure.savefig(vector, format="svg", metadata=no_metadata)
    figure.savefig(
        raster,
        format="png",
        dpi=2 * DPI,
        facecolor=light("background"),
        metadata={"Software": None},
        pil_kwargs={"compress_level": 4},
    )
    text = vector.getvalue().decode()
    start = text.index("<svg")
    head, (opening, body) = text[:start], text[start:].split(">", 1)
    # On white, for programs that show transparency as black.
    ground = f'<rect width="100%" height="100%" fill="{light("background")}"/>'
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
    """An SVG file as an element of the page.

    Ids get the figure's name in front, since those of two figures may be equal.
    """
    box = re.search(r'viewBox="([^"]*)"', opening)
    assert box is not None
    body = re.sub(r"<style[^>]*>.*?</style>", "", body, count=1, flags=re.DOTALL)
    # Only tags are changed: between them are names, which must stay as they are.
    body = re.sub(r"<[^>]+>", lambda found: _tag(found[0], name, tooltips), body)
    body = re.sub(r"\s*\n\s*", "\n", body).strip()
    return f'<svg viewBox="{box[1]}" role="img" aria-label="{escape(alt)}">{body}'


def _tag(tag: str, name: str, tooltips: Mapping[str, str]) -> str:
    """One tag in the page's colours and font."""
    group = re.match(r'<g id="([^"]*)"', tag)
    if group is not None:
        tooltip = tooltips.get(group[1])
        title = "" if tooltip is None else f"<title>{escape(tooltip)}</title>"
        return f"<g{tag[group.end() :]}{title}"
    tag = re.sub(r'\bid="', f'id="{name}-', tag)
    tag = re.sub(r'(url\(|href=")#', rf"\1#{name}-", tag)
    tag = re.sub(r" *font-family:[^;\"]*;?", "", tag)
    for colour, (value, _) in COLOURS.items():
        tag = tag.replace(value, f"var(--{colour})")
    return tag
