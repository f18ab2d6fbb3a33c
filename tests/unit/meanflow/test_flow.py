"""A trained flow: there and back, the same draws for a seed, and files that are whole or refused by name."""

import copy
import dataclasses
import json
import math
import pickle

import pytest
import torch
from safetensors.torch import load_file, save_file

from rmdm.backbone.recording import Recorded
from rmdm.errors import CheckpointError
from rmdm.meanflow import flow as flows
from rmdm.meanflow.affine import Affine
from rmdm.meanflow.flow import Flow, FlowSettings
from rmdm.meanflow.net import FlowNet
from rmdm.meanflow.paths import PATHS
from rmdm.meanflow.recipes import RECIPES
from rmdm.meanflow.transport import follow, guided, integrate
from tests.reference.gaussian import Exact, Gaussian, small_net

G, D = 2, 3
K = G * D
DATA = Gaussian.tilted(G, D, 0.25, 3.0)
SETTINGS = FlowSettings(
    recipe="robust", groups=G, dim=D, layers=1, width=32, heads=2, mlp_ratio=2.0, transport_steps=16, draw_steps=4,
    cache="c" * 64, step=7,
)  # fmt: skip


def shaken(seed: int) -> FlowNet:
    """A network with all weights off zero, so that it moves its input."""
    net = small_net(G, D, seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return net.eval()


def random_map(seed: int) -> Affine:
    generator = torch.Generator().manual_seed(seed)
    matrix = torch.eye(K).double() + 0.1 * torch.randn(K, K, generator=generator, dtype=torch.float64)
    return Affine(matrix, torch.randn(K, generator=generator, dtype=torch.float64))


def settings(**changes) -> FlowSettings:
    return dataclasses.replace(SETTINGS, **changes)


def full_flow() -> Flow:
    maps = {"enter": random_map(1), "leave": random_map(2), "draw-1": random_map(3), "draw-4": random_map(4)}
    return Flow(settings(guide=[3, 1.5]), shaken(0), maps, shaken(1), guide=shaken(5))


class ExactNet(Exact):
    """The closed form with the one thing a flow asks of a network besides."""

    places = torch.zeros(1)


def test_embeddings_go_to_noise_and_back():
    enter = random_map(1)
    flow = Flow(settings(transport_steps=64), ExactNet(DATA, PATHS["vp"]), {"enter": enter})
    # The network sees DATA once `enter` is applied, so embeddings are what its inverse makes of DATA.
    e = enter.inverse().apply(DATA.rows(20_000, 0))
    z = flow.to_latent(e)
    covariance = torch.cov(z.double().flatten(1).T)
    torch.testing.assert_close(covariance, torch.eye(K).double(), rtol=0, atol=0.05)
    before = torch.cov(e.double().flatten(1).T)
    assert (before - torch.eye(K)).abs().max() > 0.5
    torch.testing.assert_close(flow.to_embedding(z, 128), e, rtol=0, atol=2e-3)


def test_the_papers_flow_goes_there_and_back_in_one_step():
    flow = Flow(settings(recipe="paper", transport_steps=1), ExactNet(DATA, PATHS["linear"]))
    e = DATA.rows(512, 0)
    z = flow.to_latent(e)
    t, r = torch.ones(512), torch.zeros(512)
    torch.testing.assert_close(z, DATA.turn(PATHS["linear"], e, t, r), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(flow.to_embedding(z, 1), e, rtol=1e-4, atol=1e-5)


def test_each_recipe_uses_its_own_solver_and_the_number_of_steps_it_is_told():
    e = DATA.rows(16, 0)
    for recipe in RECIPES:
        flow = Flow(settings(recipe=recipe, transport_steps=3), shaken(0))
        want = RECIPES[recipe].solver(flow.net, e, 1.0, 0.0, 3)
        assert torch.equal(flow.to_latent(e), want)
        assert not torch.equal(flow.to_latent(e, 2), want)


@pytest.mark.parametrize("steps", [1, 2, 4, 6, 16])
def test_steps_of_a_draw_are_evaluations_of_a_network(steps):
    net, student = ExactNet(DATA, PATHS["vp"]), ExactNet(DATA, PATHS["vp"])
    noise = torch.randn(8, G, D)
    Flow(SETTINGS, net, {}, student).to_embedding(noise, steps)
    # The student knows steps of a quarter, a half and the whole way, and no others.
    assert (student.calls, net.calls) == ((steps, 0) if steps in (1, 2, 4) else (0, steps))
    alone = ExactNet(DATA, PATHS["vp"])
    Flow(SETTINGS, alone).to_embedding(noise, steps)
    assert alone.calls == steps


def test_maps_are_applied_around_the_network_unless_told_not_to_mend():
    flow, e = full_flow(), DATA.rows(16, 0)
    bare = integrate(flow.net, flow.maps["enter"].apply(e), 1.0, 0.0, 16)
    assert torch.equal(flow.to_latent(e, mend=False), bare)
    assert torch.equal(flow.to_latent(e), flow.maps["leave"].apply(bare))
    back = flow.maps["enter"].inverse()
    noise = torch.randn(16, G, D)
    drawn = follow(flow.student, noise, 0.0, 1.0, 4)
    assert torch.equal(flow.to_embedding(noise), back.apply(flow.maps["draw-4"].apply(drawn.double())).float())
    assert torch.equal(flow.to_seen(noise, 4), drawn)
    # No map was fitted for two steps.
    assert torch.equal(
        flow.to_embedding(noise, 2), back.apply(follow(flow.student, noise, 0.0, 1.0, 2).double()).float()
    )


def test_draws_are_led_away_from_the_guide_and_z0_is_not():
    net, guide, noise = shaken(0), shaken(5), torch.randn(16, G, D)
    plain, led = Flow(SETTINGS, net), Flow(settings(guide=[3, 1.5]), net, guide=guide)

    def velocity(z, r, t):
        return 1.5 * net(z, r, t) - 0.5 * guide(z, r, t)

    torch.testing.assert_close(led.to_embedding(noise, 8), integrate(velocity, noise, 0.0, 1.0, 8))
    assert (led.to_embedding(noise, 8) - plain.to_embedding(noise, 8)).abs().max() > 0.01
    assert torch.equal(led.to_latent(noise), plain.to_latent(noise))
    own = Flow(settings(guide=[3, 1.0]), net, guide=guide)
    assert torch.equal(own.to_embedding(noise, 8), plain.to_embedding(noise, 8)), "1 is the flow's own law"


def test_a_guide_leads_draws_out_of_the_gap_between_two_modes():
    """Two points; networks that see them blurred, the guide more. What lies between is drawn less often with it."""
    noise = torch.randn(4000, 1, 1, generator=torch.Generator().manual_seed(0))

    def between(weight: float) -> float:
        leads = guided(Modes(0.15), Modes(0.4), weight)
        drawn = integrate(leads, noise, 0.0, 1.0, 64)
        return float((drawn.abs() < 0.6).float().mean())

    assert between(2.0) < 0.7 * between(1.0)


class Modes(torch.nn.Module):
    """The exact velocity of the variance-preserving path from noise to N(+-1, blur^2)."""

    def __init__(self, blur: float) -> None:
        super().__init__()
        self.blur = blur

    def forward(self, z, r, t):
        a, b = torch.cos(math.pi / 2 * t)[:, None, None], torch.sin(math.pi / 2 * t)[:, None, None]
        spread = a**2 + (b * self.blur) ** 2
        mode = torch.tanh(b * z / spread)
        e = mode + b * self.blur**2 / spread * (z - b * mode)
        return math.pi / 2 * (a * e - b * (z - b * e) / a.clamp_min(1e-3))


def test_rows_do_not_depend_on_how_many_go_through_together(monkeypatch):
    flow, e = full_flow(), DATA.rows(100, 0)
    whole, drawn = flow.to_latent(e), flow.draw(100, seed=3)
    monkeypatch.setattr(flows, "CHUNKS", {"cpu": 14, "cuda": 14})
    torch.testing.assert_close(flow.to_latent(e), whole, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(flow.draw(100, seed=3), drawn, rtol=1e-4, atol=1e-5)


def test_draws_are_a_function_of_seed_and_number():
    flow = full_flow()
    ten = flow.noise(10, seed=3)
    assert torch.equal(flow.noise(4, seed=3), ten[:4])
    assert not torch.equal(flow.noise(10, seed=4), ten)
    many = torch.cat([flow.noise(2000, seed) for seed in range(4)]).flatten(1)
    assert len(many.unique(dim=0)) == 8000
    torch.testing.assert_close(torch.cov(many.double().T), torch.eye(K).double(), rtol=0, atol=0.06)
    torch.testing.assert_close(flow.draw(4, seed=3), flow.draw(10, seed=3)[:4], rtol=1e-4, atol=1e-5)


def test_what_is_saved_is_what_is_loaded(tmp_path):
    flow, e = full_flow(), DATA.rows(32, 0)
    flow.save(tmp_path / "flow")
    loaded = Flow.load(tmp_path / "flow")
    assert loaded.settings == flow.settings
    assert set(loaded.maps) == set(flow.maps)
    assert all(loaded.maps[name].matrix.dtype == torch.float64 for name in loaded.maps)
    assert torch.equal(loaded.to_latent(e), flow.to_latent(e))
    for steps in (4, 8):
        assert torch.equal(loaded.draw(8, 0, steps), flow.draw(8, 0, steps))
    bare = Flow(SETTINGS, shaken(2))
    bare.save(tmp_path / "bare")
    again = Flow.load(tmp_path / "bare")
    assert (again.student, again.guide, again.maps) == (None, None, {})
    assert torch.equal(again.to_latent(e), bare.to_latent(e))


def test_saving_again_gives_the_same_bytes(tmp_path):
    for name in ("one", "two"):
        full_flow().save(tmp_path / name)
    for file in ("flow.safetensors", "flow.json"):
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes()


@pytest.mark.parametrize("damage", ["flip", "truncate", "empty", "missing", "swap"])
def test_damaged_weights_are_refused_by_name(tmp_path, damage):
    full_flow().save(tmp_path)
    path = tmp_path / "flow.safetensors"
    content = bytearray(path.read_bytes())
    if damage == "flip":
        content[-5] ^= 1
    if damage == "swap":
        save_file({**load_file(path), "net.leave.bias": torch.ones(D)}, path)
    elif damage == "missing":
        path.unlink()
    else:
        keep = {"flip": len(content), "truncate": len(content) // 2, "empty": 0}[damage]
        path.write_bytes(content[:keep])
    with pytest.raises(CheckpointError, match=r"flow\.safetensors is damaged.*rmdm align") as caught:
        Flow.load(tmp_path)
    assert "\n" not in str(caught.value)


def test_damaged_settings_are_refused_by_name(tmp_path):
    full_flow().save(tmp_path)
    path = tmp_path / "flow.json"
    meta = json.loads(path.read_text())
    for text in ("{", "[]", json.dumps({**meta, "colour": 1}), json.dumps({"format": 1})):
        path.write_text(text)
        with pytest.raises(CheckpointError, match=r"flow\.json is damaged"):
            Flow.load(tmp_path)
    path.write_text(json.dumps({**meta, "format": 99}))
    with pytest.raises(CheckpointError, match="format 99, this version reads 1; run"):
        Flow.load(tmp_path)
    path.write_text(json.dumps({**meta, "width": 64}))
    with pytest.raises(CheckpointError, match=r"flow\.safetensors is damaged"):
        Flow.load(tmp_path)
    with pytest.raises(CheckpointError, match="holds no finished flow"):
        Flow.load(tmp_path / "nowhere")


def test_a_kill_while_a_flow_is_replaced_leaves_no_flow_rather_than_a_damaged_one(tmp_path, monkeypatch):
    full_flow().save(tmp_path)

    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(flows, "write_json", killed)
    with pytest.raises(KeyboardInterrupt):
        Flow(SETTINGS, shaken(5)).save(tmp_path)
    with pytest.raises(CheckpointError, match="holds no finished flow"):
        Flow.load(tmp_path)


def test_the_matmul_setting_is_put_back():
    before = torch.get_float32_matmul_precision()
    with pytest.raises(RuntimeError):
        full_flow().to_latent(torch.zeros(2, G + 1, D))
    assert torch.get_float32_matmul_precision() == before


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda flow: pickle.loads(pickle.dumps(flow))])
def test_a_flow_that_has_drawn_can_be_copied(copied):
    flow = full_flow()
    flow.recorded["net"] = Recorded(flow.net)  # as on a GPU
    other = copied(flow)
    assert other.recorded == {}
    assert torch.equal(other.draw(3, 0), flow.draw(3, 0))
