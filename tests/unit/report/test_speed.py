"""Speed at matched quality, on curves whose answer is known."""

import pytest

from rmdm.report.read import read_arms
from rmdm.report.speed import Quality, rate_at, reach, speed_section
from rmdm.report.table import Cell, Table
from tests.unit.report.runs import bench_rows, full_runs, gen_rows, make_run, save_rows, story_runs


def power(scale: float, *steps: float) -> list[Quality]:
    """GenPPL = scale / sqrt(steps), with entropy that grows with ln steps."""
    return [Quality(s, scale / s**0.5, entropy=4 + s.bit_length() / 10) for s in steps]


def test_a_power_law_is_interpolated_exactly():
    curve = power(100, 4, 16, 64)
    found = reach(curve, 100 / 32**0.5)
    assert found is not None
    assert found.steps == pytest.approx(32)
    assert found.entropy == pytest.approx(4.6)  # half-way between 4.5 at 16 and 4.7 at 64
    assert not found.is_first


def test_what_the_fewest_steps_reach_is_only_known_to_be_enough():
    found = reach(power(100, 4, 16), 60)
    assert found is not None
    assert (found.steps, found.is_first) == (4, True)
    assert reach(power(100, 4, 16), 20) is None


def test_rates_are_interpolated_and_never_extrapolated():
    rates = [(4, 1000.0), (16, 250.0)]
    assert rate_at(rates, 8) == pytest.approx(500)
    assert rate_at(rates, 4) == pytest.approx(1000)
    assert rate_at(rates, 64) is None
    assert rate_at([], 4) is None


def matched(arms, name: str) -> Table:
    section = speed_section(arms)
    assert section is not None
    found = [part for part in section.parts if isinstance(part, Table) and part.title.startswith(name)]
    assert len(found) == 1
    return found[0]


def test_the_speed_up_is_that_of_the_curves(tmp_path):
    # GenPPL falls as steps^-0.35 from 300 and 220, so that RMDM needs (300 / 220)^(1 / 0.35) times fewer steps; its
    # steps are 10% slower.
    table = matched(read_arms(full_runs(tmp_path)), "wiki-small-rmdm against wiki-small-mdlm")
    fewer = (300 / 220) ** (1 / 0.35)
    names = [title for _, title in table.columns]
    first = table.rows[0]
    assert names[-2:] == ["fewer steps", "speed-up"]
    steps, speed = (cell for cell in first[-2:] if isinstance(cell, Cell))
    assert steps.text == f"{fewer:.2f}×"
    assert speed.text == f"{0.9 * fewer:.2f}×"
    low, high = (float(end) for end in speed.range.split(" to "))
    assert low < 0.9 * fewer < high
    assert "entropy 4.14" in table.title


def test_steps_stand_for_time_where_no_throughput_was_measured(tmp_path):
    runs = [make_run(tmp_path / kind, kind, gen=gen_rows(kind)) for kind in ("mdlm", "rmdm")]
    table = matched(read_arms(runs), "wiki-small-rmdm against wiki-small-mdlm")
    assert [title for _, title in table.columns][-1] == "fewer steps"
    assert any("No throughput was measured" in note for note in table.notes)


def test_throughput_of_different_machines_is_not_mixed(tmp_path):
    other = [row | {"device": "A800"} for row in bench_rows("rmdm")]
    runs = [
        make_run(tmp_path / "mdlm", "mdlm", gen=gen_rows("mdlm"), bench=bench_rows("mdlm")),
        make_run(tmp_path / "rmdm", "rmdm", gen=gen_rows("rmdm"), bench=other),
    ]
    table = matched(read_arms(runs), "wiki-small-rmdm against wiki-small-mdlm")
    assert "speed-up" not in [title for _, title in table.columns]


def test_stories_are_matched_by_the_share_that_is_consistent(tmp_path):
    table = matched(read_arms(story_runs(tmp_path)), "storyworld-mini against storyworld-mini-mdlm")
    # MDLM's 13, 10 and 6% are reached by RMDM in its first step; what may be 0% is no target.
    assert [row[0].text for row in table.rows if isinstance(row[0], Cell)] == ["13.0", "10.0", "6.0"]
    assert [row[2] for row in table.rows] == ["≤ 1"] * 3
    assert [row[-1].text for row in table.rows if isinstance(row[-1], Cell)] == ["≥ 32.0×", "≥ 16.0×", "≥ 8.00×"]


def test_throughput_of_stories_has_their_consistency_beside_it(tmp_path):
    rows = [row | {"steps": steps} for row, steps in zip(bench_rows("mdlm"), (1, 2, 4, 8, 16, 32), strict=True)]
    runs = story_runs(tmp_path)
    save_rows(runs[1], "bench", rows)
    section = speed_section(read_arms(runs))
    assert section is not None
    table = next(part for part in section.parts if isinstance(part, Table) and "Table 10" in part.title)
    assert [title for _, title in table.columns][:4] == ["arm", "steps", "consistent %", "tokens/s"]
    assert [row[2].text for row in table.rows if isinstance(row[2], Cell)] == [
        "22.0",
        "29.0",
        "34.0",
        "36.0",
        "40.0",
        "42.0",
    ]
