"""Solvers against flows whose end points are known: exact in one step, or of the order they claim."""

import math
from itertools import pairwise

import pytest
import torch

from rmdm.meanflow.paths import PATHS
from rmdm.meanflow.transport import follow, heun, integrate
from tests.reference.gaussian import Exact, Gaussian

DATA = Gaussian.tilted(2, 3, 0.25, 3.0)
WAYS = [(1.0, 0.0), (0.0, 1.0), (0.9, 0.3)]


def start(path, t: float) -> torch.Tensor:
    return DATA.at(path, t, 64, 5).double()


def end(path, z, t: float, r: float) -> torch.Tensor:
    full = [torch.full((len(z),), x, dtype=z.dtype) for x in (t, r)]
    return DATA.turn(path, z, *full)


def error(solver, net, path, t: float, r: float, steps: int) -> float:
    z = start(path, t)
    return float((solver(net, z, t, r, steps) - end(path, z, t, r)).square().mean().sqrt())


@pytest.mark.parametrize("name", PATHS)
@pytest.mark.parametrize(("t", "r"), WAYS)
def test_the_exact_average_velocity_takes_one_step_or_any_number(name, t, r):
    path = PATHS[name]
    for steps in (1, 3):
        net = Exact(DATA, path)
        assert error(follow, net, path, t, r, steps) < 1e-12
        assert net.calls == steps


@pytest.mark.parametrize("name", PATHS)
@pytest.mark.parametrize(("t", "r"), WAYS)
def test_the_velocity_alone_converges_at_first_order(name, t, r):
    path = PATHS[name]
    net = Exact(DATA, path, velocity_only=True)
    errors = [error(follow, net, path, t, r, steps) for steps in (16, 32, 64, 128)]
    orders = [math.log2(a / b) for a, b in pairwise(errors)]
    assert orders[-1] == pytest.approx(1, abs=0.15)
    assert 1e-5 < errors[-1] < 0.02


@pytest.mark.parametrize("name", PATHS)
@pytest.mark.parametrize(("t", "r"), WAYS)
def test_heuns_rule_converges_at_second_order(name, t, r):
    path = PATHS[name]
    net = Exact(DATA, path, velocity_only=True)
    errors = [error(integrate, net, path, t, r, steps) for steps in (16, 32, 64, 128)]
    orders = [math.log2(a / b) for a, b in pairwise(errors)]
    assert orders[-1] == pytest.approx(2, abs=0.2)
    assert errors[-1] < 3e-4
    assert error(integrate, net, path, t, r, 512) < 2e-5, "many steps reach the exact map"


def test_integrate_asks_for_velocities_only_and_twice_a_step():
    path = PATHS["vp"]
    # This network would give the average velocity for r != t, which Heun's rule must not be fed with.
    whole, alone = Exact(DATA, path), Exact(DATA, path, velocity_only=True)
    z = start(path, 1.0)
    assert torch.equal(integrate(whole, z, 1.0, 0.0, 4), integrate(alone, z, 1.0, 0.0, 4))
    assert whole.calls == 8


def test_heun_takes_times_row_by_row():
    path = PATHS["linear"]
    net = Exact(DATA, path, velocity_only=True)
    z = start(path, 0.5)[:4]
    t, r = torch.tensor([0.9, 0.5, 0.2, 0.6]).double(), torch.tensor([0.8, 0.6, 0.4, 0.6]).double()
    together = heun(net, z, t, r)
    for row in range(4):
        alone = heun(net, z[row : row + 1], t[row : row + 1], r[row : row + 1])
        torch.testing.assert_close(together[row : row + 1], alone)
    torch.testing.assert_close(together[3], z[3])


def test_solvers_keep_the_precision_of_the_points_and_make_no_graph():
    path = PATHS["vp"]

    class Half(Exact):
        def forward(self, z_BGD, r_B, t_B):
            assert z_BGD.dtype == r_B.dtype == t_B.dtype == torch.float32
            return super().forward(z_BGD, r_B, t_B).bfloat16()

    z = start(path, 1.0).float().requires_grad_()
    for solver in (follow, integrate):
        out = solver(Half(DATA, path), z, 1.0, 0.0, 2)
        assert out.dtype == torch.float32
        assert not out.requires_grad
