"""MeanFlow against closed forms: for Gaussian data, u(z, r, t) = z (1 - sigma_r / sigma_t) / (t - r)."""

import dataclasses

import pytest
import torch
from torch import Tensor
from torch.func import jvp
from torch.nn.attention import SDPBackend, sdpa_kernel

from rmdm.backbone.noise import normal
from rmdm.meanflow.affine import Affine
from rmdm.meanflow.loss import NOISE_STREAM, MeanFlowObjective, time_derivative
from rmdm.meanflow.net import FlowNet
from rmdm.meanflow.paths import PATHS
from rmdm.meanflow.recipes import RECIPES, Recipe
from rmdm.meanflow.transport import follow
from tests.reference.gaussian import Exact, Gaussian, fit, flow_batch, shaken, small_net

DATA = {"round": Gaussian.round(2, 2, 3.0), "tilted": Gaussian.tilted(2, 2, 2.0, 9.0)}
PAIRS = [(0.0, 1.0), (0.25, 0.75), (0.1, 0.9), (0.5, 1.0)]
SEED = 0
TRAINING = {"linear": (250, 4e-3), "vp": (180, 3e-3)}
"""Steps and rate: the linear path takes longer to learn, and at its rate the other one is unstable."""
TOLERANCE, MEAN_TOLERANCE = 0.3, 0.15
"""Error of u over its own size, the largest and the mean over `PAIRS`: 1 for an untrained network; at most 0.18 and
0.11 for seed 0, 0.20 and 0.12 for seed 1."""


def uniform_pairs(path: str) -> Recipe:
    return Recipe(PATHS[path], 0.75, None, 0.0, False, follow, 1)


def u_error(net: torch.nn.Module, path: str, data: Gaussian, r: float, t: float) -> float:
    """Error of the network's u over the size of the true one."""
    z = data.at(PATHS[path], t, 2000, 7)
    r_B, t_B = torch.full((2000,), r), torch.full((2000,), t)
    true = data.average_velocity(PATHS[path], z, r_B, t_B)
    with torch.no_grad():
        return float((net(z, r_B, t_B) - true).norm() / true.norm())


@pytest.fixture(scope="module", params=[(path, data) for path in PATHS for data in DATA], ids=lambda x: "-".join(x))
def learnt(request) -> tuple[str, Gaussian, FlowNet]:
    path, data = request.param[0], DATA[request.param[1]]
    net = small_net(2, 2, SEED)
    objective = MeanFlowObjective(net, PATHS[path])
    steps, lr = TRAINING[path]
    averaged = fit(objective, lambda step: flow_batch(data, uniform_pairs(path), "align", SEED, step, 256), steps, lr)
    return path, data, averaged


def test_the_learnt_average_velocity_is_the_closed_form(learnt):
    path, data, net = learnt
    errors = {pair: u_error(net, path, data, *pair) for pair in PAIRS}
    assert max(errors.values()) < TOLERANCE, errors
    assert sum(errors.values()) / len(errors) < MEAN_TOLERANCE, errors
    untrained = {pair: u_error(small_net(2, 2, SEED), path, data, *pair) for pair in PAIRS}
    assert min(untrained.values()) > 0.99, untrained


def test_one_step_whitens_the_data(learnt):
    _, data, net = learnt

    def distance(z: Tensor) -> float:
        return float((torch.cov(z.double().flatten(1).T) - torch.eye(4).double()).norm())

    e = data.rows(4000, 9)
    assert distance(follow(net, e, 1.0, 0.0, 1)) < 0.25 * distance(e)


def test_with_r_equal_to_t_the_objective_is_flow_matching():
    data, recipe = DATA["tilted"], dataclasses.replace(uniform_pairs("vp"), identity=0.0)
    batch = flow_batch(data, recipe, "align", 0, 0, 64)
    assert len(batch.r_J) == 0
    net = shaken(small_net(2, 2, seed=1))
    seen: dict[str, Tensor] = {}
    net.register_forward_hook(lambda _, inputs, out: seen.update(z=inputs[0], r=inputs[1], t=inputs[2], u=out))
    errors = MeanFlowObjective(net, recipe.path).errors(batch)
    assert torch.equal(seen["r"], seen["t"])
    # v follows from z_t and e alone: it is solved for here without the noise that made z_t.
    a, b = torch.cos(torch.pi / 2 * batch.t_B), torch.sin(torch.pi / 2 * batch.t_B)
    z0 = (seen["z"] - b[:, None, None] * batch.e_BGD) / a[:, None, None]
    v = torch.pi / 2 * (a[:, None, None] * batch.e_BGD - b[:, None, None] * z0)
    rows = batch.t_B < 0.95  # near t = 1 nothing is left of the noise
    expected = (seen["u"] - v).square().mean((1, 2))
    torch.testing.assert_close(errors[rows], expected[rows], rtol=1e-3, atol=1e-4)


def test_rows_with_r_equal_to_t_add_no_derivative():
    # The identity's target with r = t is v itself, so such rows cost the same in front as behind.
    data, path = DATA["round"], PATHS["linear"]
    batch = flow_batch(data, uniform_pairs("linear"), "align", 0, 0, 32)
    objective = MeanFlowObjective(shaken(small_net(2, 2, seed=1)), path)
    same = dataclasses.replace(batch, r_J=batch.t_B[: len(batch.r_J)])
    torch.testing.assert_close(objective.errors(same), objective.errors(dataclasses.replace(batch, r_J=batch.r_J[:0])))
    assert not torch.allclose(objective.errors(batch), objective.errors(same))


@pytest.mark.parametrize("path", PATHS)
def test_the_closed_form_is_where_the_identity_leads(path):
    # E[v | z_t] is the marginal velocity. With it in v's place the exact u must satisfy u = v - (t - r) du/dt.
    data = Gaussian.tilted(2, 2, 0.25, 3.0)
    exact = Exact(data, PATHS[path])
    z = data.at(PATHS[path], 0.6, 32, 3).double()
    t, r = torch.linspace(0.3, 0.9, 32).double(), torch.linspace(0.1, 0.7, 32).double()
    v, h = data.velocity(PATHS[path], z, t), 1e-5
    slope = (exact(z + h * v, r, t + h) - exact(z - h * v, r, t - h)) / (2 * h)
    target = v - (t - r)[:, None, None] * slope
    torch.testing.assert_close(exact(z, r, t), target, rtol=1e-6, atol=1e-8)


@pytest.fixture
def double(monkeypatch) -> FlowNet:
    """A network that computes in float64 throughout, also where it asks for float32, with no weight at zero."""
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    return shaken(small_net(3, 2, seed=2).double())


def points(n: int = 5) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(4)
    z, v = torch.randn(2, n, 3, 2, generator=generator, dtype=torch.float64).unbind(0)
    r, t = torch.rand(2, n, generator=generator, dtype=torch.float64).unbind(0)
    return z, v, r, t


@pytest.mark.parametrize("which", ["z", "r", "t", "all"])
def test_forward_derivatives_are_central_differences(double, which):
    z, v, r, t = points()
    zero, one = torch.zeros_like(t), torch.ones_like(t)
    dz, dr, dt = {"z": (v, zero, zero), "r": (0 * v, one, zero), "t": (0 * v, zero, one), "all": (v, one / 2, one)}[
        which
    ]
    h = 1e-6
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        difference = (double(z + h * dz, r + h * dr, t + h * dt) - double(z - h * dz, r - h * dr, t - h * dt)) / (2 * h)
        derivative = jvp(double, (z, r, t), (dz, dr, dt))[1]
    assert difference.abs().max() > 1e-2, "a flat network would prove nothing"
    torch.testing.assert_close(derivative, difference, rtol=1e-6, atol=1e-7)


def test_the_total_derivative_moves_with_the_path_and_keeps_r(double):
    z, v, r, t = points()
    h = 1e-6
    with torch.no_grad():
        difference = (double(z + h * v, r, t + h) - double(z - h * v, r, t - h)) / (2 * h)
    found = time_derivative(double, z, v, r, t)
    torch.testing.assert_close(found, difference, rtol=1e-6, atol=1e-7)
    assert not found.requires_grad


def test_no_gradient_flows_through_the_target(double):
    batch = flow_batch(Gaussian.round(3, 2, 2.0), uniform_pairs("vp"), "align", 0, 0, 16)
    batch = dataclasses.replace(batch, e_BGD=batch.e_BGD.double(), t_B=batch.t_B.double(), r_J=batch.r_J.double())
    objective = MeanFlowObjective(double, PATHS["vp"])
    objective(batch, torch.tensor(1 / 16)).backward()
    got = double.leave.bias.grad.clone()
    # d/db of |u - target|^2 with the target held fixed: the head's bias moves u by one in each of its dimensions.
    seen: dict[str, Tensor] = {}
    double.register_forward_hook(lambda _, inputs, out: seen.update(u=out))
    with torch.no_grad():
        before = objective.errors(batch)
        u, h = seen["u"], 1e-6
        for d in range(2):
            shift = torch.zeros(2).double()
            shift[d] = h
            target_free = ((u + shift - _target(objective, batch)).square().mean((1, 2)) - before).mean() / h
            assert float(got[d]) == pytest.approx(float(target_free), rel=1e-3, abs=1e-5)


def _target(objective: MeanFlowObjective, batch) -> Tensor:
    """v - (t - r) du/dt, written out once more."""
    z0 = normal(batch.noise_key_B, tuple(batch.e_BGD.shape[1:]), NOISE_STREAM)
    point = objective.path.at(z0, batch.e_BGD, batch.t_B[:, None, None])
    r = torch.cat((batch.r_J, batch.t_B[len(batch.r_J) :]))
    slope = time_derivative(objective.backbone, point.z, point.v, r, batch.t_B)
    return point.v - (batch.t_B - r)[:, None, None] * slope


def test_the_adaptive_weight_divides_by_a_power_of_the_error_without_gradient():
    batch = flow_batch(DATA["round"], uniform_pairs("linear"), "align", 0, 0, 32)
    net = shaken(small_net(2, 2, seed=1))
    plain = MeanFlowObjective(net, PATHS["linear"]).errors(batch)
    weighted = MeanFlowObjective(net, PATHS["linear"], adaptive=1.0)
    torch.testing.assert_close(weighted.errors(batch), plain)
    loss = weighted(batch, torch.tensor(1.0))
    torch.testing.assert_close(loss, (plain / (4 * plain + 1e-3)).sum())
    loss.backward()
    found = [p.grad.clone() for p in net.parameters()]
    net.zero_grad()
    (plain / (4 * plain.detach() + 1e-3)).sum().backward()
    torch.testing.assert_close(found, [p.grad for p in net.parameters()], rtol=1e-4, atol=1e-6)


def test_embeddings_pass_the_map_on_their_way_in():
    map_ = Affine(torch.tensor([0.5, 1.0, 2.0, 3.0]).double(), torch.arange(4.0).double())
    recipe = RECIPES["paper"]
    batch = flow_batch(DATA["tilted"], recipe, "align", 0, 0, 32)
    net = shaken(small_net(2, 2, seed=1))
    inside = MeanFlowObjective(net, recipe.path, 1.0, map_).errors(batch)
    before = dataclasses.replace(batch, e_BGD=map_.apply(batch.e_BGD))
    torch.testing.assert_close(inside, MeanFlowObjective(net, recipe.path, 1.0).errors(before))


def test_the_untrained_map_is_the_identity():
    e = DATA["tilted"].rows(16, 0)
    assert torch.equal(follow(small_net(2, 2, seed=3), e, 1.0, 0.0, 4), e)
