"""Plots as elements of the page and as files."""

import re
from math import nan
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose

from esper.contracts.messages import one_line
from esper.evaluation.statistics import Interval
from esper.report.plots import TaskResults, learning_curve, smoothed
from esper.report.style import COLOURS, LIGHT, new_figure, plot_style, render

HOSTILE = '<script>alert(1)</script> & "x" id="q" #0072b2 $\\frac{ $x^2$ ☃'


def make_plot():
    with plot_style():
        figure = new_figure(one_line(HOSTILE, 80), 250)
        axes = figure.subplots()
        axes.plot([0, 1], [0, 1], "o-", color=LIGHT["blue"], gid="tip")
        return render(figure, "some", HOSTILE, {"tip": HOSTILE})


@pytest.fixture(scope="module")
def plot():
    return make_plot()


def test_an_inline_plot_has_the_colours_of_the_page_and_ids_of_its_own(plot):
    _, *tags = re.findall(r"<[^>]*>", plot.inline)  # the first has the alt text
    tags = " ".join(tags)
    assert "var(--blue)" in tags
    assert "var(--text)" in tags
    assert not [value for value in LIGHT.values() if value in tags]
    assert "font-family" not in tags
    ids = re.findall(r'\bid="([^"]+)"', tags)
    links = re.findall(r'(?:url\(|href=")#([^)"]+)', tags)
    assert links
    assert {*links} <= {*ids}
    assert all(one.startswith("some-") for one in ids)


def test_names_in_plots_are_text_as_they_were(plot):
    root = ElementTree.fromstring(
        plot.inline.replace("xlink:href", "href")  # the page knows the prefix
    )
    assert not [tag for tag in root.iter() if "script" in tag.tag]
    assert HOSTILE in [node.text for node in root.iter() if node.tag.endswith("text")]
    titles = [node.text for node in root.iter() if node.tag.endswith("title")]
    assert titles == [HOSTILE]
    assert root.get("aria-label") == HOSTILE


def test_files_are_whole_on_white_and_the_same_each_time(plot):
    import matplotlib as mpl

    root = ElementTree.fromstring(plot.svg)
    assert root.tag.endswith("svg")
    assert root[0].get("fill") == "#ffffff"
    assert plot.png.startswith(b"\x89PNG")
    before = dict(mpl.rcParams)
    assert make_plot() == plot
    assert dict(mpl.rcParams) == before


@pytest.mark.parametrize("mode", [0, 1])
def test_text_and_lines_have_contrast_in_both_modes(mode):
    """WCAG: 4.5 for text, 3 for lines."""

    def brightness(colour):
        parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        linear = [
            p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts
        ]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    def contrast(one, other):
        low, high = sorted(brightness(COLOURS[name][mode]) for name in (one, other))
        return (high + 0.05) / (low + 0.05)

    for name in ("text", "muted"):
        assert contrast(name, "background") >= 4.5
    for name in ("blue", "orange", "green", "amber", "purple", "sky", "grey"):
        assert contrast(name, "background") >= 2.8, name
    for name in ("training", "blending", "holding", "kept", "cooling"):
        assert contrast("text", name) >= 4.5, name


@given(st.lists(st.one_of(st.just(nan), st.floats(-10, 10)), max_size=120))
def test_a_line_is_the_mean_of_the_rounds_around(values):
    reach = len(values) // 20
    expected = []
    for at in range(len(values)):
        near = [v for v in values[max(0, at - reach) : at + reach + 1] if v == v]
        expected.append(sum(near) / len(near) if near else nan)
    assert_allclose(smoothed(np.array(values)), expected, rtol=1e-9, atol=1e-9)


def test_one_round_and_one_host_without_an_interval_can_be_drawn():
    alone = Interval(0.3, nan, nan)
    columns = {"round": np.array([1.0]), "return": np.array([nan])}
    results = TaskResults(periodic=[(1, alone)])
    with plot_style():
        plot = learning_curve("some", "letter", columns, results)
    assert "unknown" in plot.alt
    assert "Tamiyo, validation hosts" in plot.inline
