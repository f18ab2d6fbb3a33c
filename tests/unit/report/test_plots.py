"""Plots: scales that put figures where they belong, and drawings that are well-formed."""

import xml.etree.ElementTree as ET

import pytest

from rmdm.report.gap import gap_note, spread_out
from rmdm.report.plots import BOTTOM, HEIGHT, WIDTH, Level, Line, Plot, Point, Scale, Vertical


def test_equal_factors_are_equal_distances_on_a_log_scale():
    scale = Scale("log2", 1, 16, 0, 400)
    assert [scale.at(x) for x in (1, 2, 4, 8, 16)] == pytest.approx([0, 100, 200, 300, 400])
    assert scale.ticks() == [1, 2, 4, 8, 16]
    assert scale.at(64) == 400  # outside is drawn at the edge
    assert scale.at(0) == 0


@pytest.mark.parametrize(
    ("name", "low", "high", "ticks"),
    [
        ("linear", 0.0, 1.0, [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        ("linear", -3.0, 7.0, [-2.0, 0.0, 2.0, 4.0, 6.0]),
        ("log", 40, 1200, [50, 100, 200, 500, 1000]),
        ("log", 1, 1e6, [1, 100, 10_000, 1e6]),
        ("log", 110, 140, [110, 120, 130, 140]),
    ],
)
def test_ticks_are_round_numbers_inside_the_range(name, low, high, ticks):
    assert Scale(name, low, high, 0, 1).ticks() == pytest.approx(ticks)


def test_a_scale_holds_its_values_and_survives_a_single_one():
    scale = Scale.around([3.0, 9.0], "linear", 0, 1)
    assert 0 < scale.at(3.0) < scale.at(9.0) < 1
    for name in ("linear", "log", "log2"):
        alone = Scale.around([5.0], name, 0, 1)
        assert alone.at(5.0) == pytest.approx(0.5, abs=0.01)
    assert Scale.around([], "log", 0, 1).low > 0


def test_a_plot_is_well_formed_and_its_marks_lie_inside():
    line = Line("a & <b>", [Point(4, 300, 280, 320), Point(8, 200, 180, 220), Point(16, float("nan"))], 1)
    plot = Plot("t", "x", "y", [line, Line("none", [], 2)], [Level("real", 48.0, 46.0, 50.0)], "log2", "log")
    root = ET.fromstring(plot.svg())
    marks = [node for node in root.iter("path") if "mark" in node.get("class", "")]
    assert len(marks) == 2  # what is not a number is not drawn
    assert marks[0][0].text == "a & <b>: 300.0 at 4.000 (280.0 to 320.0)"
    for mark in marks:
        x, y = map(float, mark.get("d", "").split("L")[0].strip("M").split())
        assert 0 < x < WIDTH
        assert 0 < y < HEIGHT
    assert len([node for node in root.iter("path") if node.get("class") == "band a1"]) == 1
    assert "none" not in plot.to_html()


def test_higher_figures_lie_higher():
    places = []
    for node in ET.fromstring(Plot("t", "x", "y", [Line("a", [Point(1, 1.0), Point(2, 5.0)], 1)]).svg()).iter("path"):
        if "mark" in node.get("class", ""):
            places.append(float(node.get("d", "").split("L")[0].strip("M").split()[1]))
    assert places[1] < places[0]


def test_whiskers_show_both_intervals_of_a_point():
    point = Point(4.0, 100.0, 90.0, 110.0, 3.9, 4.1)
    svg = ET.fromstring(Plot("t", "x", "y", [Line("a", [point], 0, has_band=False)]).svg())
    (whisker,) = [node.get("d", "") for node in svg.iter("path") if node.get("class") == "whisker a0"]
    assert whisker.count("M") == 2
    assert "V" in whisker
    assert "H" in whisker


def marks_of(plot: Plot) -> list[str]:
    """Paths of the markers."""
    return [node.get("d", "") for node in ET.fromstring(plot.svg()).iter("path") if "mark" in node.get("class", "")]


def test_what_lies_far_aside_is_an_arrow_that_leaves_the_curves_their_room():
    curve = Line("a", [Point(4.0, 300.0, label="0.8"), Point(4.2, 600.0, label="0.9")], 0)
    real = Line("real", [Point(4.1, 35.0)], None, is_joined=False, is_aside=True)
    plot = Plot("t", "x", "y", [curve, real], y_scale="log", verticals=[Vertical("matched", 4.1)])
    alone, _ = marks_of(Plot("t", "x", "y", [curve], y_scale="log"))
    assert marks_of(plot)[0].split()[1] == alone.split()[1]  # as high as without it
    assert marks_of(plot)[2].split("L")[0].endswith(f" {HEIGHT - BOTTOM:.1f}")  # its tip is at the edge
    words = [node.text for node in ET.fromstring(plot.svg()).iter("text") if "beside" in node.get("class", "")]
    assert words == ["0.8", "0.9", "real: 35.0"]
    uprights = [node for node in ET.fromstring(plot.svg()).iter("path") if node.get("class") == "upright"]
    assert len(uprights) == 1
    assert "matched" in plot.to_html()


def test_what_lies_a_little_aside_is_drawn_in_its_place():
    curve = Line("a", [Point(4.0, 300.0), Point(4.2, 600.0)], 0)
    near = Line("real", [Point(4.1, 250.0)], None, is_joined=False, is_aside=True)
    assert "a" in marks_of(Plot("t", "x", "y", [curve, near], y_scale="log"))[2]  # a circle, not an arrow


def test_lines_that_coincide_are_drawn_beside_each_other():
    points = [Point(2, 0.04, -0.01, 0.09), Point(4, -0.02, -0.05, 0.01), Point(64, 68.0, 66.0, 70.0)]
    lines = spread_out([Line("a", points, 0), Line("b", points, 1), Line("c", points, 1, is_dashed=True)])
    assert [line.shift for line in lines] == [-7.0, 0.0, 7.0]
    assert all(len(line.points) == 2 for line in lines)  # what is not above 0 has no place on a log scale
    assert "3 figures at or below 0" in gap_note([Line("a", points, 0)] * 3)
    assert "at or below" not in gap_note([Line("a", points[:1], 0)])
    xs = [float(mark.split()[0][1:]) for mark in marks_of(Plot("t", "x", "y", lines, x_scale="log2", y_scale="log"))]
    assert len({round(x) for x in xs}) == 6
