"""What importing the package does, and leaves be."""

import os
import subprocess
import sys

import pytest

ASK = "import os, sys, rmdm; print(os.environ.get('GOMP_SPINCOUNT'), 'torch' in sys.modules)"


@pytest.mark.parametrize(
    ("asked", "spins"),
    [({}, "1000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "ACTIVE"}, "None")],
)
def test_threads_spin_briefly_unless_told_otherwise_and_torch_is_not_imported_yet(asked, spins):
    env = {name: value for name, value in os.environ.items() if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    done = subprocess.run([sys.executable, "-c", ASK], env=env | asked, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [spins, "False"]
