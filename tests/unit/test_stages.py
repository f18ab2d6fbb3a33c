import pytest

from rmdm.cli import main
from rmdm.stages import in_seconds
from tests.conftest import small_flags


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(0.04, "0.0 s"), (0.31, "0.3 s"), (9.94, "9.9 s"), (9.96, "10 s"), (27.4, "27 s"), (4000.0, "4000 s")],
)
def test_short_times_have_a_decimal(seconds, said):
    assert in_seconds(seconds) == said


def test_what_to_run_next_can_be_copied_where_a_path_has_a_space(tmp_path, shards, capsys):
    flags = small_flags(train__steps="1", data__dir=str(shards), train__device="cpu")
    assert main(["train", "storyworld-mini-mdlm", *flags, "--out", str(tmp_path / "my run")]) == 0
    assert capsys.readouterr().out.endswith(f"; next: rmdm sample '{tmp_path}/my run'\n")
