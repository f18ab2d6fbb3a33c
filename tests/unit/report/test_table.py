"""Figures in words, and tables as HTML and Markdown."""

import re
from html.parser import HTMLParser
from importlib import resources

import pytest

from rmdm.report.table import Cell, Table, estimate, mark_best, number, plural, short_paths


@pytest.mark.parametrize(
    ("value", "digits", "said"),
    [
        (0.0, 3, "0.00"), (1234.5, 4, "1,234"), (12.345, 4, "12.35"), (0.0312, 3, "0.0312"), (9.996, 3, "10.00"),
        (2.5e7, 3, "2.50e+07"), (1e-5, 2, "1.0e-05"), (float("inf"), 3, "∞"), (None, 3, "–"), (-4.2, 3, "-4.20"),
    ],
)  # fmt: skip
def test_numbers_keep_their_significant_digits(value, digits, said):
    assert number(value, digits) == said


def test_text_of_a_run_cannot_become_markup():
    table = Table("<b>&</b>", [("", "arm"), ("a<b", "x")], [["<script>alert(1)</script>", Cell("1|2", "0 to <9")]])
    page, plain = table.to_html(), table.to_markdown()
    assert "<script>" not in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page
    assert "0 to &lt;9" in page
    assert "1\\|2 (0 to <9)" in plain


def test_markdown_has_one_header_and_as_many_cells_in_every_line():
    table = Table("t", [("", "arm"), ("steps", "8"), ("steps", "4")], [["a", "1", Cell("2", "1 to 3", is_best=True)]])
    head, rule, row = table.to_markdown().split("\n\n")[1].splitlines()
    assert head == "| arm | steps: 8 | steps: 4 |"
    assert rule == "| --- | ---: | ---: |"
    assert row == "| a | 1 | **2** (1 to 3) |"


@pytest.mark.parametrize(
    ("spreads", "higher", "best"),
    [
        ([(1.0, 0.8, 1.2), (2.0, 1.8, 2.2)], False, 0),
        ([(1.0, 0.8, 1.2), (2.0, 1.8, 2.2)], True, 1),
        ([(1.0, 0.8, 1.9), (2.0, 1.8, 2.2)], False, None),  # the intervals overlap
        ([(1.0, None, None), (2.0, None, None)], False, None),  # without intervals nothing is known to be apart
        ([(1.0, 1.0, 1.0), (2.0, 1.8, 2.2)], False, None),  # one of no width is none
        ([(1.0, 0.8, 1.2), (2.0, None, None)], False, None),
        ([(1.0, 0.8, 1.2), None], False, None),  # nothing to be better than
    ],
)
def test_the_best_is_marked_only_where_no_interval_overlaps(spreads, higher, best):
    cells = [estimate(1.0, None, None) for _ in spreads]
    marked = mark_best(cells, spreads, higher=higher)
    assert [k for k, cell in enumerate(marked) if cell.is_best] == ([] if best is None else [best])


def test_every_line_of_a_grouped_head_has_as_many_columns_as_the_table():
    class Head(HTMLParser):
        """Counts columns, line by line; what spans two lines counts in both."""

        lines: list[int]

        def handle_starttag(self, tag, attrs):
            """Note a line or a heading."""
            found = dict(attrs)
            if tag == "tr":
                self.lines.append(self.carried if self.lines else 0)
            elif tag in ("th", "td") and len(self.lines) <= 2:
                self.lines[-1] += int(found.get("colspan") or 1)
                self.carried += found.get("rowspan") == "2"

    columns = [("", "arm"), ("", "kind"), ("trained", "steps"), ("trained", "rows"), ("", "corpus")]
    head = Head()
    head.lines, head.carried = [], 0
    head.feed(Table("t", columns, [["a", "b", "1", "2", "c"]]).to_html())
    assert head.lines[:2] == [5, 5]
    assert "<td" not in Table("t", columns, []).to_html()  # no empty band above what has no group


def test_private_parts_of_paths_are_not_shown(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert short_paths("held out of /root/stash/wiki/texts; 5") == "held out of wiki/texts; 5"
    assert short_paths(f"{tmp_path}/runs/a") == "runs/a"
    assert short_paths("runs/a/b, tokens/s, 1/2, https://a.b/c/d") == "runs/a/b, tokens/s, 1/2, https://a.b/c/d"


def test_one_is_singular():
    assert [plural(value, "row") for value in (1, "1", 2, "1,024")] == ["1 row", "1 row", "2 rows", "1,024 rows"]


def test_short_tables_are_printed_whole_and_folded_ones_open():
    short, long = ([["a", "1"]] * n for n in (16, 17))
    columns = [("", "arm"), ("", "x")]
    for is_folded in (False, True):
        assert " short" in Table("t", columns, short, is_folded=is_folded).to_html()
        assert " short" not in Table("t", columns, long, is_folded=is_folded).to_html()
    style = (resources.files("rmdm.report") / "page.css").read_text(encoding="utf-8").split("@media print")[1]
    assert re.search(r"\.short \{ break-inside: avoid", style)
    assert re.search(r"details::details-content \{[^}]*content-visibility: visible", style)
