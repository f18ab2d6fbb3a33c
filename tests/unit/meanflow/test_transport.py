"""Solvers against flows whose end points are known: exact in one step, or of the order they claim."""

import math
from itertools import pairwise

import pytest
import torch

from rmdm.meanflow.paths import PATHS
from rmdm.meanflow.transport import follow, integrate
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
def test_adamss_rules_converge_at_third_order(name, t, r):
    path = PATHS[name]
    net = Exact(DATA, path, velocity_only=True)
    errors = [error(integrate, net, path, t, r, steps + 1) for steps in (16, 32, 64, 128)]
    orders = [math.log2(a / b) for a, b in pairwise(errors)]
    assert orders[-1] > 2.7
    assert errors[-1] < 3e-5
    assert error(integrate, net, path, t, r, 512) < 1e-6, "many steps reach the exact map"


@pytest.mark.parametrize("power", [0, 1, 2, 3])
def test_velocities_that_are_quadratic_in_time_are_followed_exactly_but_at_the_start(power):
    """The rules of third order are exact for them; the first interval, with two known velocities, up to linear ones."""

    class Power(torch.nn.Module):
        def forward(self, z_BGD, r_B, t_B):
            return (t_B**power)[:, None, None].expand_as(z_BGD)

    steps, z = 9, torch.zeros(2, 1, 3, dtype=torch.float64)
    off = float((integrate(Power(), z, 0.0, 1.0, steps) - 1 / (power + 1)).abs().max())
    gap = 1 / (steps - 1)
    if power < 2:
        assert off < 1e-12
    elif power == 2:
        assert off == pytest.approx(gap**3 / 6), "the trapezium over the first interval, and nothing after it"
    else:
        assert off > 1e-6


def test_integrate_asks_for_velocities_only_and_once_a_step():
    path = PATHS["vp"]
    # This network would give the average velocity for r != t, which a rule for velocities must not be fed with.
    whole, alone = Exact(DATA, path), Exact(DATA, path, velocity_only=True)
    z = start(path, 1.0)
    for steps in (1, 2, 3, 8):
        whole.calls = 0
        assert torch.equal(integrate(whole, z, 1.0, 0.0, steps), integrate(alone, z, 1.0, 0.0, steps))
        assert whole.calls == steps


def test_one_step_is_eulers_and_two_are_heuns():
    path = PATHS["linear"]
    net, z = Exact(DATA, path, velocity_only=True), start(path, 0.9)
    at, to = (torch.full((len(z),), time, dtype=z.dtype) for time in (0.9, 0.4))
    v = net(z, at, at)
    torch.testing.assert_close(integrate(net, z, 0.9, 0.4, 1), z - 0.5 * v)
    torch.testing.assert_close(integrate(net, z, 0.9, 0.4, 2), z - 0.25 * (v + net(z - 0.5 * v, to, to)))


def test_a_step_costs_a_quarter_of_what_heuns_rule_takes_for_the_same_accuracy():
    """Sixteen evaluations come as close as the sixty-four of 32 steps of Heun's rule, on a curved path."""
    path = PATHS["vp"]
    net, z, way = Exact(DATA, path, velocity_only=True), start(path, 0.0), torch.linspace(0, 1, 33).tolist()
    for t, r in pairwise(way):
        z = integrate(net, z, t, r, 2)
    heun = float((z - end(path, start(path, 0.0), 0.0, 1.0)).square().mean().sqrt())
    assert error(integrate, net, path, 0.0, 1.0, 16) < heun


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
