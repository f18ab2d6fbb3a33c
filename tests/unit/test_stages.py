import pytest

from rmdm.stages import in_seconds


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(0.04, "0.0 s"), (0.31, "0.3 s"), (9.94, "9.9 s"), (9.96, "10 s"), (27.4, "27 s"), (4000.0, "4000 s")],
)
def test_short_times_have_a_decimal(seconds, said):
    assert in_seconds(seconds) == said
