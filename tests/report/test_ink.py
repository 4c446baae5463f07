"""Figures as the page and as files have them."""

import re
from itertools import pairwise
from xml.etree import ElementTree

import pytest

from esper.report.ink import (
    COLOURS,
    day,
    finish,
    house_style,
    label_ends,
    panel,
    plain,
)

HOSTILE = '<script>alert(1)</script> & "x" id="q" #0072b2 $\\frac{ $x^2$ ☃'


@pytest.fixture(scope="module")
def drawing():
    with house_style():
        figure, axes = panel(plain(HOSTILE, 80))
        axes.plot([0, 1], [0, 1], "o-", color=day("blue"), gid="tip")
        return finish(figure, "some", HOSTILE, {"tip": HOSTILE})


def test_an_inline_figure_has_only_the_colours_of_the_page(drawing):
    _, *tags = re.findall(r"<[^>]*>", drawing.inline)  # the first has the words
    tags = " ".join(tags)
    assert "var(--blue)" in tags
    assert "var(--ink)" in tags
    for light, _ in COLOURS.values():
        assert light not in tags
    assert "font-family" not in tags


def test_names_in_figures_are_text_as_they_were(drawing):
    root = ElementTree.fromstring(
        drawing.inline.replace("xlink:href", "href")  # the page knows the prefix
    )
    assert not [tag for tag in root.iter() if "script" in tag.tag]
    assert HOSTILE in [node.text for node in root.iter() if node.tag.endswith("text")]
    titles = [node.text for node in root.iter() if node.tag.endswith("title")]
    assert titles == [HOSTILE]
    assert root.get("aria-label") == HOSTILE


def test_marks_of_a_figure_bear_its_name(drawing):
    marks = re.findall(r'<[^>]*\bid="([^"]+)"', drawing.inline)
    links = re.findall(r'<[^>]*(?:url\(|href=")#([^)"]+)', drawing.inline)
    assert links
    assert {*links} <= {*marks}
    assert all(mark.startswith("some-") for mark in marks)


def test_a_file_is_whole_and_on_white_paper(drawing):
    root = ElementTree.fromstring(drawing.svg)
    assert root.tag.endswith("svg")
    assert root[0].get("fill") == "#ffffff"
    assert drawing.png.startswith(b"\x89PNG")


def test_the_same_figure_is_the_same_bytes():
    def make():
        with house_style():
            figure, axes = panel("title")
            axes.plot([0, 1], [0, 1], "o")
            return finish(figure, "some", "words")

    assert make() == make()


def test_the_style_of_the_house_is_left_behind():
    import matplotlib as mpl

    before = dict(mpl.rcParams)
    with house_style():
        assert mpl.rcParams["text.parse_math"] is False
    assert dict(mpl.rcParams) == before


@pytest.mark.parametrize("levels", [[0.5] * 8, [0.0, 0.01, 0.02, 1.0], [1.0, 0.99]])
def test_names_at_the_edge_do_not_overlap_and_stay_inside(levels):
    with house_style():
        figure, axes = panel("title", 270)
        axes.set_ylim(0, 1)
        label_ends(axes, [(y, f"name {i}", "blue") for i, y in enumerate(levels)])
        figure.draw_without_rendering()
    heights = sorted(text.xy[1] for text in axes.texts)
    pixels = axes.get_window_extent().height
    gaps = [(b - a) * pixels for a, b in pairwise(heights)]
    assert min(gaps) >= 12.99
    assert heights[0] >= -0.01
    assert heights[-1] <= 1.01


def test_a_name_is_one_short_visible_line():
    assert plain("a\nb\x1b[2J\u202e") == "a�b�[2J�"
    assert plain("x" * 100, 10) == "x" * 9 + "…"


@pytest.mark.parametrize("index", [0, 1])
def test_words_stand_out_from_what_is_behind_them(index):
    """WCAG's contrast: 4.5 for text, 3 for lines."""

    def brightness(colour):
        parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        linear = [
            p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts
        ]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    def contrast(one, other):
        low, high = sorted(brightness(COLOURS[name][index]) for name in (one, other))
        return (high + 0.05) / (low + 0.05)

    for name in ("ink", "muted"):
        assert contrast(name, "paper") >= 4.5
    for name in ("blue", "orange", "green", "amber", "purple", "sky", "grey"):
        assert contrast(name, "paper") >= 2.8, name
    for name in ("training", "blending", "holding", "kept", "cooling"):
        assert contrast("ink", name) >= 4.5, name
