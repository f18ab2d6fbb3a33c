"""Plots: scales that put figures where they belong, and drawings that are well-formed."""

import xml.etree.ElementTree as ET

import pytest

from rmdm.report.plots import HEIGHT, WIDTH, Level, Line, Plot, Point, Scale


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
