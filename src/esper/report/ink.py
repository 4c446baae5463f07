"""How figures look: sizes, fonts, and colours that follow the page into the dark.

Figures are drawn in the colours of daylight. In an SVG of the page each of them becomes
`var(--name)`, which the page's sheet gives by day and by night; text stays text in the
page's own font. One unit of a figure is one pixel of the page. Colours of lines are
told apart with any kind of colour vision (after Okabe and Ito 2008).
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
UNIT: Final = 72
"""Pixels of the page in one inch of a figure."""
WIDTH: Final = 456
"""Of a panel, of which two stand side by side on a wide screen."""
SHARPNESS: Final = 2
"""Pixels of a PNG for one of the page."""

LEADER: Final = 10
"""Pixels of the line that leads from a curve's end to its name."""

COLOURS: Final[Mapping[str, tuple[str, str]]] = {
    "paper": ("#ffffff", "#15191d"),
    "ink": ("#1c2126", "#e4e8ec"),
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
"""Every colour by day and by night; the last five are behind words."""

LINES: Final = ("blue", "orange", "green", "purple", "amber", "sky", "grey", "ink")


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawing:
    """A figure as the page and as files have it."""

    name: str
    """Of its files, without an ending."""
    alt: str
    """What it shows, for those who do not see it."""
    inline: str
    """SVG whose colours are the page's."""
    svg: bytes
    png: bytes
    width: int
    """In pixels of the page."""


def day(name: str) -> str:
    """A colour by daylight, as figures are drawn."""
    return COLOURS[name][0]


def plain(text: object, limit: int = 48) -> str:
    """A name of others as one short line of visible signs."""
    shown = "".join(sign if sign.isprintable() else "�" for sign in str(text))
    return shown if len(shown) <= limit else f"{shown[: limit - 1]}…"


@contextmanager
def house_style() -> Iterator[None]:
    """Draw and save figures in the style of the house."""
    import matplotlib as mpl

    ink, muted, rule = day("ink"), day("muted"), day("rule")
    style: Any = {
        "font.family": "sans-serif",
        "font.size": 11,
        "text.color": ink,
        "text.parse_math": False,
        "axes.edgecolor": rule,
        "axes.labelcolor": muted,
        "axes.linewidth": 1.0,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.spines.left": False,
        "axes.grid": True,
        "axes.grid.axis": "y",
        "axes.axisbelow": True,
        "axes.formatter.useoffset": False,
        "grid.color": rule,
        "grid.linewidth": 0.8,
        "xtick.color": rule,
        "ytick.color": rule,
        "xtick.labelcolor": muted,
        "ytick.labelcolor": muted,
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
    with mpl.rc_context(style), warnings.catch_warnings():
        # A name may hold signs that the font lacks: a box stands for each.
        warnings.filterwarnings("ignore", message=".*[Gg]lyph")
        yield


def panel(
    title: str,
    height: int = 250,
    *,
    width: int = WIDTH,
    left: int = 46,
    right: int = 12,
    top: int = 34,
    bottom: int = 30,
) -> tuple["Figure", "Axes"]:
    """A figure with one pair of axes; margins in pixels."""
    figure = sheet(title, width, height)
    axes = place(figure, left, bottom, width - left - right, height - top - bottom)
    return figure, axes


def sheet(title: str, width: int, height: int) -> "Figure":
    """A figure with nothing but its title."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width / UNIT, height / UNIT), dpi=UNIT)
    figure.text(
        0, 1 - 14 / height, title, size=12.5, weight="bold", va="baseline", ha="left"
    )
    return figure


def place(
    figure: "Figure", left: Number, bottom: Number, width: Number, height: Number
) -> "Axes":
    """Axes at a place that is given in pixels."""
    wide, high = figure.get_size_inches() * UNIT
    return figure.add_axes((left / wide, bottom / high, width / wide, height / high))


def block(
    axes: "Axes",
    corner: tuple[Number, Number],
    size: tuple[Number, Number],
    colour: str,
    *,
    alpha: float = 1.0,
    edge: float = 0.0,
    mark: str | None = None,
) -> None:
    """A filled rectangle in data; limits do not follow it."""
    from matplotlib.patches import Rectangle

    axes.add_artist(
        Rectangle(
            corner,
            *size,
            fc=day(colour),
            ec=day("paper"),
            lw=edge,
            alpha=None if alpha == 1.0 else alpha,
            gid=mark,
        )
    )


def label_ends(
    axes: "Axes", labels: Sequence[tuple[float, str, str]], gap: float = 13.0
) -> None:
    """Write names at the right edge, each at its height or the next free one.

    Args:
        axes: Whose limits are already what they will be.
        labels: Height in data, text and colour of each.
        gap: Pixels between two lines of text.
    """
    if not labels:
        return
    bottom, top = axes.get_window_extent().intervaly
    ordered = sorted(labels, key=lambda label: label[0])
    heights = [float(axes.transData.transform((0, y))[1]) for y, _, _ in ordered]
    heights = [min(max(height, bottom + 4), top - 4) for height in heights]
    for index in range(1, len(heights)):
        heights[index] = max(heights[index], heights[index - 1] + gap)
    excess = max(0.0, heights[-1] - top)
    for index in reversed(range(len(heights))):
        limit = top if index == len(heights) - 1 else heights[index + 1] - gap
        heights[index] = min(heights[index], limit) if excess else heights[index]
    past = 1 + LEADER / axes.get_window_extent().width
    for (y, text, colour), height in zip(ordered, heights, strict=True):
        level = float(axes.transData.transform((0, y))[1])
        ends = [(end - bottom) / (top - bottom) for end in (level, height)]
        axes.plot(
            [1, past],
            ends,
            transform=axes.transAxes,
            clip_on=False,
            color=day(colour),
            lw=0.8,
            scalex=False,
            scaley=False,
        )
        axes.annotate(
            text,
            (1, ends[1]),
            xycoords="axes fraction",
            xytext=(LEADER + 3, 0),
            textcoords="offset points",
            va="center_baseline",
            color=day(colour),
            size=10.5,
        )


def finish(
    figure: "Figure", name: str, alt: str, tips: Mapping[str, str] | None = None
) -> Drawing:
    """A figure as text for the page and as bytes for files.

    Args:
        figure: Drawn within `house_style`.
        name: Of its files, without an ending.
        alt: What it shows, in words.
        tips: What to say where the pointer rests, by the `gid` of the artist.
    """
    vector, raster = io.BytesIO(), io.BytesIO()
    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    figure.savefig(vector, format="svg", metadata=nothing)
    figure.savefig(
        raster,
        format="png",
        dpi=UNIT * SHARPNESS,
        facecolor=day("paper"),
        metadata={"Software": None},
        pil_kwargs={"compress_level": 4},
    )
    width = round(figure.get_size_inches()[0] * UNIT)
    svg = vector.getvalue().decode()
    return Drawing(
        name=name,
        alt=alt,
        inline=inlined(svg, name, alt, tips or {}),
        svg=_on_paper(svg).encode(),
        png=raster.getvalue(),
        width=width,
    )


def inlined(svg: str, name: str, alt: str, tips: Mapping[str, str]) -> str:
    """A whole SVG file as an element of a page.

    Marks get the figure's name in front, since those of two figures may be equal.
    """
    opening, body = svg[svg.index("<svg") :].split(">", 1)
    box = re.search(r'viewBox="([^"]*)"', opening)
    assert box is not None
    body = re.sub(r"<style[^>]*>.*?</style>", "", body, count=1, flags=re.DOTALL)
    # Only tags are changed: between them are names, which are none of our words.
    body = re.sub(r"<[^>]+>", lambda found: _tag(found[0], name, tips), body)
    return (
        f'<svg viewBox="{box[1]}" role="img" aria-label="{escape(alt)}">'
        + re.sub(r"\s*\n\s*", "\n", body).strip()
    )


def _tag(tag: str, name: str, tips: Mapping[str, str]) -> str:
    """One tag in the page's colours and font."""
    group = re.match(r'<g id="([^"]*)"', tag)
    if group is not None:
        tip = tips.get(group[1])
        said = "" if tip is None else f"<title>{escape(tip)}</title>"
        return f"<g{tag[group.end() :]}{said}"
    tag = re.sub(r'\bid="', f'id="{name}-', tag)
    tag = re.sub(r'(url\(|href=")#', rf"\1#{name}-", tag)
    tag = re.sub(r" *font-family:[^;\"]*;?", "", tag)
    for colour, (light, _) in COLOURS.items():
        tag = tag.replace(light, f"var(--{colour})")
    return tag


def _on_paper(svg: str) -> str:
    """The same with a white sheet below it, for programs that show black."""
    head, body = svg[: svg.index("<svg")], svg[svg.index("<svg") :]
    opening, body = body.split(">", 1)
    ground = f'<rect width="100%" height="100%" fill="{day("paper")}"/>'
    return f"{head}{opening}>\n {ground}{body}"
