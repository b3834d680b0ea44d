"""Plots: the marks are where the values are, and odd values draw something or nothing."""

from __future__ import annotations

import math
import re
from xml.etree import ElementTree

import pytest

from engine.report.page import HEIGHT, WIDTH, draw
from engine.report.parts import Plot, ReportTable


def marks(picture: str, kind: str, name: str) -> list[float]:
    """An attribute of the marks of the first series."""
    svg = ElementTree.fromstring(picture)[0]
    return [float(e.attrib[name]) for e in svg.iter(kind) if e.attrib.get("class") == "s0"]


def test_bars_are_as_long_as_their_values() -> None:
    long, short = marks(draw(Plot("bars", "t", ["a", "b"], {"x": [4.0, 1.0]})), "rect", "width")
    assert long == pytest.approx(4 * short, abs=0.2)


def test_columns_and_points_stand_on_one_axis() -> None:
    series = {"x": [1.0, 2.0, 3.0]}
    heights = marks(draw(Plot("columns", "t", ["a", "b", "c"], series)), "rect", "height")
    assert heights[2] == pytest.approx(3 * heights[0], abs=0.3)
    ys = marks(draw(Plot("lines", "t", ["a", "b", "c"], series)), "circle", "cy")
    assert ys[0] - ys[1] == pytest.approx(ys[1] - ys[2], abs=0.2)


def test_logarithmic_bars_leave_out_what_has_no_logarithm() -> None:
    plot = Plot("bars", "t", ["a", "b", "c", "d"], {"x": [1e-12, 1e-6, 0.0, math.inf]}, log=True)
    widths = marks(draw(plot), "rect", "width")
    assert len(widths) == 2
    assert widths[1] > 3 * widths[0] > 0


def test_the_best_of_a_heat_map_is_marked_and_strongest() -> None:
    plot = Plot("heat", "t", ["1", "2"], {"a": [1.0, 2.0], "b": [None, 3.0]})
    picture = draw(plot)
    found = re.findall(r'class="heat( best)?" style="fill-opacity:([0-9.]+)"', picture)
    assert [one[0] for one in found] == ["", "", " best"]
    strengths = [float(one[1]) for one in found]
    assert strengths == sorted(strengths)


@pytest.mark.parametrize("kind", ["bars", "columns", "lines", "heat"])
@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize(
    "values",
    [[0.0], [5.0], [1e-300, 1e300], [math.nan, 1.0], [-1.0, 2.0], [1.0] * 5000, [1e-9], [3, None]],
)
def test_any_values_stay_inside_the_picture(
    kind: str, log: bool, values: list[float | None]
) -> None:
    names = [f"{'n' * 300}{i}" for i in range(len(values))]
    picture = draw(Plot(kind, "t", names, {"x": values, "y": values}, log=log))
    if not picture:
        assert log
        return
    svg = ElementTree.fromstring(picture)[0]
    height = float(svg.attrib["viewBox"].split()[3])
    assert height <= HEIGHT or kind in ("bars", "heat")
    for element in svg.iter("rect"):
        x, width = float(element.attrib["x"]), float(element.attrib["width"])
        y, tall = float(element.attrib["y"]), float(element.attrib["height"])
        assert x >= -60 and x + width <= WIDTH + 1  # legends of long names may begin outside
        assert y >= -1 and y + tall <= height + 1


@pytest.mark.parametrize("values", [[], [None], [math.nan, math.inf]])
def test_without_a_value_there_is_no_picture(values: list[float | None]) -> None:
    assert draw(Plot("bars", "t", ["a"] * len(values), {"x": values})) == ""


def test_columns_of_numbers_are_told_from_text() -> None:
    rows = [["a", "1", "n/a", "", "1e-6 x"], ["2", "-3.5", "9/10", "", "1e-6"]]
    assert ReportTable(list("abcde"), rows).numeric == (False, True, True, False, False)
    assert ReportTable(["a"], []).numeric == (False,)
