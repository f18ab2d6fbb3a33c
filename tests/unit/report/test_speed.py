"""Speed at matched quality, on curves whose answer is known."""

import pytest

from rmdm.report.matched import Quality, gain, rate_at, reach, targets, worse_note
from rmdm.report.plots import Plot
from rmdm.report.read import read_arms
from rmdm.report.speed import speed_section
from rmdm.report.table import Cell, Note, Table
from tests.release import byte_tokenizer, save_release
from tests.unit.report.runs import (
    bench_rows,
    full_runs,
    gen_rows,
    make_run,
    ppl_rows,
    save_rows,
    story_rows,
    story_runs,
)


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


def fewer(point: Quality, curve: list[Quality]) -> Cell:
    """The factor of fewer steps."""
    return gain(point, curve, lambda steps, _: point.steps / steps)


def banded(scale: float, share: float, *steps: int) -> list[Quality]:
    """GenPPL = scale / sqrt(steps) with an interval."""
    return [Quality(s, v, v * (1 - share), v * (1 + share)) for s in steps for v in [scale / s**0.5]]


def test_ends_of_a_factor_have_its_digits_and_say_when_they_are_cut_off():
    # 100 / sqrt(s) against 200 / sqrt(s): four times fewer steps.
    point = Quality(64, 25.0, 24.0, 26.0)
    found = fewer(point, banded(100, 0.02, 4, 8, 16, 32))
    assert (found.text, found.is_quiet) == ("4.00×", False)
    low, high = 64 * (24.0 / 102) ** 2, 64 * (26.0 / 98) ** 2
    assert found.range == f"{low:.2f} to {high:.2f}"
    # The upper end is reached at the fewest steps measured, so that it is only known to be at least this.
    assert fewer(point, banded(100, 0.02, 16, 32)).range == f"{low:.2f} to ≥ 4.00"
    # The lower end is not reached in the steps measured.
    open_below = fewer(point, banded(100, 0.02, 4, 8, 16))
    assert (open_below.range, open_below.is_quiet) == (f"? to {high:.2f}, unclear", True)


def test_a_factor_whose_range_holds_one_is_grey():
    same = fewer(Quality(16, 25.0, 23.0, 27.0), banded(100, 0.05, 4, 8, 16, 32))
    assert (same.text, same.is_quiet) == ("1.00×", True)
    assert same.range.endswith(", unclear")
    slower = fewer(Quality(4, 25.0, 24.0, 26.0), banded(100, 0.02, 4, 8, 16, 32))
    assert (slower.text, slower.is_quiet) == ("0.25×", False)
    assert fewer(Quality(16, 25.0), banded(100, 0.05, 4, 64)).range == "no interval"


def test_figures_that_fewer_steps_beat_are_no_targets():
    curve = [Quality(s, v, 0.9 * v, 1.1 * v) for s, v in ((32, 283.0), (64, 262.0), (128, 279.0))]
    assert [(point.steps, point.value) for point in targets(curve)] == [(64, 262.0), (32, 283.0)]
    assert worse_note("mdlm", curve, targets(curve), is_story=False) == (
        "More steps did not always make mdlm better (279.0 at 128 after 262.0 at 64): the target is its best figure."
    )
    assert worse_note("mdlm", curve[:2], targets(curve[:2]), is_story=False) is None
    assert [point.steps for point in targets([*curve[:2], Quality(256, 262.0)])] == [64, 32]


def test_a_target_is_a_figure_that_was_measured(tmp_path):
    runs, shares = story_runs(tmp_path), (0.0, 0.0, 0.0, 0.004, 0.176, 0.059)
    rows = [row | {"consistent": share} for row, share in zip(story_rows("mdlm"), shares, strict=True)]
    save_rows(runs[0], "stories", rows)
    table = matched(read_arms(runs), "storyworld-mini against storyworld-mini-mdlm")
    # 17.6% at 16 steps and 5.9% at 32: the first is the target, and a sentence says what became of the second.
    assert [(row[0].text, row[1]) for row in table.rows if isinstance(row[0], Cell)] == [("17.6", "16")]
    said = "More steps made storyworld-mini-mdlm worse (5.9% at 32 after 17.6% at 16): the target is its best figure."
    assert said in table.notes


def two_runs(tmp_path, mine: list, theirs: list):
    return [make_run(tmp_path / "mdlm", "mdlm", gen=theirs), make_run(tmp_path / "rmdm", "rmdm", gen=mine)]


@pytest.mark.parametrize(
    ("other", "why"),
    [
        ({"entropy_at": 4.3}, "the matched entropies differ (4.140 and 4.300 nats)"),
        ({"length": 90}, "entropies are taken over 100 and 90 tokens"),
        ({"evaluator": "gpt2"}, "the evaluators differ (tiny-gpt2, gpt2)"),
    ],
)
def test_a_speed_up_that_is_left_out_is_explained(tmp_path, other, why):
    section = speed_section(read_arms(two_runs(tmp_path, gen_rows("rmdm", **other), gen_rows("mdlm"))))
    assert section is not None
    (note,) = section.parts
    assert isinstance(note, Note)
    assert "Table 4" in note.text
    assert why in note.text


def test_entropies_that_differ_by_a_hair_are_the_same_target(tmp_path):
    mine, theirs = gen_rows("rmdm", entropy_at=4.166), gen_rows("mdlm", entropy_at=4.164)
    assert matched(read_arms(two_runs(tmp_path, mine, theirs)), "wiki-small-rmdm against wiki-small-mdlm").rows


def test_the_spread_of_the_throughput_widens_the_range(tmp_path):
    runs = full_runs(tmp_path)
    plain = matched(read_arms(runs), "wiki-small-rmdm against")
    for run, kind in zip(runs, ("mdlm", "rmdm", "indep"), strict=True):
        ends = [(row, row["tokens_per_s"]) for row in bench_rows(kind)]
        spread = [row | {"tokens_per_s_low": 0.9 * rate, "tokens_per_s_high": 1.1 * rate} for row, rate in ends]
        save_rows(run, "bench", spread)
    wide = matched(read_arms(runs), "wiki-small-rmdm against")
    assert any("its spread was not measured and is not in the range" in note for note in plain.notes)
    assert any("its spread is in the range" in note for note in wide.notes)
    before, after = (
        [float(end.removeprefix("≥ ").removesuffix(", unclear")) for end in cell.range.split(" to ")]
        for table in (plain, wide)
        if isinstance(cell := table.rows[1][-1], Cell)
    )
    assert after[0] == pytest.approx(before[0] * 0.9 / 1.1, abs=0.01)
    assert after[1] == pytest.approx(before[1] * 1.1 / 0.9, abs=0.01)


def test_latency_is_drawn_and_the_latents_draw_has_its_column(tmp_path):
    section = speed_section(read_arms(full_runs(tmp_path)))
    assert section is not None
    latency = next(part for part in section.parts if isinstance(part, Plot) and part.title.startswith("Latency"))
    assert latency.lines[0].points[0].y == pytest.approx(1e3 * 1024 / 1e6)
    table = next(part for part in section.parts if isinstance(part, Table) and "Table 10" in part.title)
    names = [title for _, title in table.columns]
    own = [row[names.index("ms latent")] for row in table.rows if isinstance(row[0], Cell) and "rmdm" in row[0].text]
    assert own == ["1.50"] * 6
    assert table.rows[0][names.index("weights")] == f"{8e7 / 2**20:.0f}"


def mixed_runs(tmp_path, *, with_bytes: bool):
    """Two tokenizers; a token of the second is half as long."""
    runs = [save_release(tmp_path / "words"), save_release(tmp_path / "bytes", tokenizer=byte_tokenizer())]
    for run, factor in zip(runs, (1.0, 0.5), strict=True):
        save_rows(run, "gen", gen_rows("mdlm"))
        save_rows(run, "bench", bench_rows("mdlm"))
        if with_bytes:
            save_rows(run, "ppl", [row | {"bytes": factor * row["bytes"]} for row in ppl_rows("mdlm")])
    return read_arms(runs)


def test_throughput_of_different_tokenizers_is_compared_by_bytes(tmp_path):
    section = speed_section(mixed_runs(tmp_path, with_bytes=True))
    assert section is not None
    plot = next(part for part in section.parts if isinstance(part, Plot) and part.title.startswith("Throughput"))
    assert plot.y == "bytes a second"
    words, small = (line.points[0].y for line in plot.lines)
    assert words == pytest.approx(2 * small)
    table = next(part for part in section.parts if isinstance(part, Table) and "Table 4" in part.title)
    assert [title for _, title in table.columns].count("bytes/s") == 2
    speed = table.rows[-1][-1]
    assert isinstance(speed, Cell)
    assert speed.text.endswith("0.50×")


def test_throughput_of_different_tokenizers_gives_no_speed_up_without_bytes(tmp_path):
    section = speed_section(mixed_runs(tmp_path, with_bytes=False))
    assert section is not None
    table = next(part for part in section.parts if isinstance(part, Table) and "Table 4" in part.title)
    assert "speed-up" not in [title for _, title in table.columns]
    assert any("different tokenizers" in note for note in table.notes)
    assert sum(isinstance(part, Plot) and part.title.startswith("Throughput") for part in section.parts) == 2


def test_stories_count_before_genppl(tmp_path):
    runs = story_runs(tmp_path)
    for run, kind in zip(runs, ("mdlm", "rmdm"), strict=True):
        save_rows(run, "gen", gen_rows(kind))
        save_rows(run, "bench", bench_rows(kind))
    section = speed_section(read_arms(runs))
    assert section is not None
    titles = [part.title for part in section.parts if isinstance(part, Table) and "Table 4" in part.title]
    assert titles == [
        "storyworld-mini against storyworld-mini-mdlm at matched quality: consistent stories, % (the paper's Table 4)"
    ]
    table = next(part for part in section.parts if isinstance(part, Table) and "Table 10" in part.title)
    assert [title for _, title in table.columns][2] == "consistent %"


def test_genppl_is_matched_where_stories_were_not_measured(tmp_path):
    runs = [make_run(tmp_path / kind, kind, "storyworld", gen=gen_rows(kind)) for kind in ("mdlm", "rmdm")]
    save_rows(runs[0], "stories", story_rows("mdlm"))
    assert "GenPPL at entropy" in matched(read_arms(runs), "storyworld-mini against").title
