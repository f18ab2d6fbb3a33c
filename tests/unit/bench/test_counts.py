"""Operations and bytes against counts made by hand or by torch's own counter."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from rmdm.bench import counts
from rmdm.bench.machine import Floor, Machine
from rmdm.bench.sizes import ENCODER_SIZES, FLOW_SIZES, SIZES
from rmdm.bench.workload import config_of
from rmdm.config import FlowModelConfig
from rmdm.hub import build_backbone
from rmdm.meanflow.net import FlowNet
from rmdm.presets import load_config

TINY = SIZES["tiny"]


@pytest.mark.parametrize("process", ["mdlm", "rmdm", "sedd", "ar"])
def test_parameters_are_those_of_the_model(process):
    backbone = build_backbone(config_of(TINY, process), TINY.vocab)
    assert counts.parameters(TINY, process) == sum(p.numel() for p in backbone.parameters())


def test_a_tied_head_counts_once():
    size = SIZES["wiki-small"]
    backbone = build_backbone(config_of(size, "mdlm"), size.vocab)
    assert counts.parameters(size, "mdlm") == sum(p.numel() for p in backbone.parameters())


def test_a_training_step_by_hand():
    # tiny: 2 layers of 16, MLP 64, so 2 x 12 x 256 = 6,144 weights; L = 16, V = 50; 8.5 masks a row on average
    trunk, attention, head = 6 * 6144, 12 * 16 * 16, 6 * 50 * 16
    # of the last block, places that are not masked need keys and values alone: not the other 10 x 256 weights
    last = 6 * 10 * 256 + attention
    masked = 8.5 * (last + head)
    assert counts.training_step(TINY, "mdlm", 8).operations == 8 * (16 * (trunk + 2 * attention - last) + masked)
    assert counts.training_step(TINY, "ar", 8).operations == 8 * 16 * (trunk + attention + head)
    # 3 -> 6 -> 8 -> 8 of the latent, 8 -> 96 in either block, for 4 groups
    condition = 6 * (3 * 6 + 6 * 8 + 8 * 8 + 2 * 8 * 96)
    extra = counts.training_step(TINY, "rmdm", 8).operations - counts.training_step(TINY, "mdlm", 8).operations
    assert extra == 8 * 4 * condition
    # 64 rows of embedding and head, 6,144 weights, 2 x 6 vectors and one more
    assert counts.training_step(TINY, "mdlm", 8).bytes == 44 * (2 * 64 * 16 + 6144 + 13 * 16)


def test_owt_needs_what_was_counted_by_hand_but_for_most_of_the_last_block():
    size = SIZES["owt"]
    tokens = 64 * 1024
    by_hand = tokens * (6 * 84_934_656 + 12 * 12 * 1024 * 768) + 64 * 512.5 * 6 * 50_258 * 768
    spared = 64 * 511.5 * (6 * 10 * 768**2 + 12 * 1024 * 768)
    assert counts.training_step(size, "mdlm", 64).operations == by_hand - spared


def test_a_request_by_hand():
    # one step: every row runs once; two steps: a row of 16 masks leaves one of them empty with probability 2^-16 each
    assert counts.runs_of_a_row(1, 16) == 1
    assert counts.runs_of_a_row(2, 16) == pytest.approx(2 * (1 - 2**-16))
    assert counts.runs_of_a_row(1024, 1024) == pytest.approx(1024 * 0.6323, rel=1e-3)
    one = counts.request(TINY, "mdlm", 3, 1, 2)
    assert one.operations == 3 * (16 * (2 * 6144 + 2 * 4 * 16 * 16) + 16 * 2 * 50 * 16)
    assert one.bytes == 2 * (6144 + 50 * 16)
    many = counts.request(TINY, "mdlm", 3, 10_000_000, 2)  # then every place unmasks in a step of its own
    assert many.bytes == pytest.approx(16 * one.bytes, rel=1e-5)
    last = 16 * (2 * 10 * 256 + 4 * 16 * 16 + 2 * 50 * 16)  # a row's last block and head, for each place once
    assert many.operations / 3 - last == pytest.approx(16 * (one.operations / 3 - last), rel=1e-5)
    latent = counts.request(TINY, "rmdm", 3, 1, 2)
    weights = 3 * 6 + 6 * 8 + 8 * 8 + 2 * 8 * 96
    assert latent.operations - one.operations == 3 * 4 * 2 * weights
    assert latent.bytes - one.bytes == 2 * weights


def test_a_step_of_the_flow_is_what_torch_counts():
    size = FLOW_SIZES["tiny"]
    net = FlowNet(config_flow(size), size.groups, size.dim)
    z, times = torch.randn(5, size.groups, size.dim), torch.rand(5)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        net(z, times, times)
    by_torch = counter.get_total_flops()
    held = sum(p.numel() for p in net.parameters())
    floor = counts.flow_step(size, 5, 0, held)
    attention = 5 * 4 * 4 * 4 * 16  # which torch's counter may leave out on a CPU
    assert floor.operations in {3 * by_torch, 3 * (by_torch + attention)}
    assert floor.bytes == 44 * held
    extra = counts.flow_step(size, 5, 3, held).operations - floor.operations
    assert extra == pytest.approx(3 / 5 * (floor.operations / 3 + attention))  # a derivative has two products for one


def config_flow(size):
    return FlowModelConfig(layers=size.layers, width=size.width, heads=size.heads, mlp_ratio=size.mlp_ratio)


def test_an_encoder_by_hand():
    size = ENCODER_SIZES["tiny"]
    weights = 2 * (4 * 16**2 + 2 * 16 * 32)
    floor = counts.encoding(size, 100, 24, 2)
    assert floor.operations == 100 * (2 * weights + 2 * 4 * 24 * 16)
    assert floor.bytes == 2 * weights


def test_the_floor_is_the_longer_of_the_two():
    machine = Machine(torch.device("cpu"), matmul=100.0, copy=10.0, size=1)
    assert Floor(200, 5).seconds(machine) == 2
    assert Floor(200, 5).limit(machine) == "operations"
    assert Floor(200, 50).seconds(machine) == 5
    assert Floor(200, 50).limit(machine) == "bytes"
    figures = Floor(200, 50).figures(machine, 20.0)
    assert figures["times_the_floor"] == 4
    assert figures["share_of_matmul_rate"] == pytest.approx(0.1)


@pytest.mark.parametrize(("name", "preset"), [("qwen", "owt"), ("owt", "owt"), ("lm1b", "lm1b"), ("wiki-small",) * 2])
def test_sizes_are_those_of_the_presets(name, preset):
    size, config = SIZES[name], load_config(f"{preset}-rmdm")
    model, latent = config.model, config.latent
    assert (size.layers, size.width, size.heads, size.mlp_ratio) == (
        model.layers, model.width, model.heads, model.mlp_ratio
    )  # fmt: skip
    assert size.length == config.data.length
    assert size.tie == model.tie_embeddings
    assert (size.groups, size.dim, size.project, size.condition) == (
        latent.groups, latent.dim, latent.project or latent.dim, latent.width
    )  # fmt: skip
    assert size.stored == (latent.project if latent.store == "z0" else latent.dim)


@pytest.mark.parametrize("name", ["owt", "lm1b", "wiki-small"])
def test_flows_are_those_of_the_presets(name):
    size, config = FLOW_SIZES[name], load_config(f"{name}-rmdm")
    flow = config.meanflow.model
    assert (size.layers, size.width, size.heads, size.mlp_ratio) == (
        flow.layers,
        flow.width,
        flow.heads,
        flow.mlp_ratio,
    )
    assert (size.groups, size.dim) == (config.latent.groups, config.latent.dim)
