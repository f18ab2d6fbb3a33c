"""bf16 on a CPU: when it is used, that it is near fp32, and that a text still does not depend on its batch.

Any CPU computes in bf16, if slowly; which do so unasked depends on their instructions.
"""

import numpy as np
import pytest
import torch

import rmdm
from rmdm import precision
from rmdm.cli import main
from rmdm.config import EncoderConfig
from rmdm.encoders.find import open_encoder
from rmdm.errors import ConfigError
from rmdm.evaluation.evaluator import Evaluator, find_evaluator
from rmdm.samplers.noise import row_keys
from tests.evaluators import documents, save_evaluator
from tests.release import LENGTH, WORDS, save_release, word_tokenizer
from tests.unit.encoders.networks import save_encoder

CPU = torch.device("cpu")


@pytest.fixture
def set_to(monkeypatch):
    """Asks for a precision."""
    return lambda asked: monkeypatch.setenv(precision.VARIABLE, asked)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """An RMDM of random weights that draws its latents by a flow."""
    return save_release(tmp_path_factory.mktemp("half") / "rmdm", "rmdm", latent__draw="flow")


def test_unasked_a_processor_with_instructions_for_it_and_a_gpu_compute_in_bf16(monkeypatch, set_to, tmp_path):
    set_to("auto")
    for flags, has in (("fpu sse2 avx512f avx512_bf16", True), ("fpu amx_bf16", True), ("fpu sse2 avx512f", False)):
        listed = tmp_path / flags.replace(" ", "-")
        listed.write_text(f"processor\t: 0\nflags\t\t: {flags}\nbugs\t\t: avx512_bf16\n\nprocessor\t: 1\n")
        assert precision.multiplies_half(listed) == has
        monkeypatch.setattr(precision, "multiplies_half", lambda has=has: has)
        assert precision.dtype("cpu") == (torch.bfloat16 if has else torch.float32)
        assert precision.in_half("cuda")
        monkeypatch.undo()
        set_to("auto")
    assert not precision.multiplies_half(tmp_path / "absent"), "not on Linux"


def test_what_is_asked_for_holds_everywhere_and_a_word_that_is_none_is_refused(set_to, folder, capsys):
    for asked, word in (("fp32", "fp32"), ("BF16", "bf16")):
        set_to(asked)
        assert {precision.named(precision.dtype(device)) for device in ("cpu", "cuda")} == {word}
        assert precision.autocast(CPU).fast_dtype == torch.bfloat16
        assert rmdm.load(folder, "cpu").generate(1, 2).settings["precision"] == f"{word} network, float64 draws"
    set_to("fp16")
    with pytest.raises(ConfigError, match="RMDM_PRECISION='fp16' is no precision; use bf16, fp32 or auto"):
        precision.in_half(CPU)
    assert main(["sample", str(folder), "--device", "cpu"]) == 2
    said = capsys.readouterr().err.strip().splitlines()
    assert [line for line in said if "no precision" in line] == said[-1:]


def test_training_has_a_setting_of_its_own(set_to):
    set_to("bf16")
    gpu = torch.device("cuda")
    assert [precision.of_training("auto", device) for device in (CPU, gpu)] == [torch.float32, torch.bfloat16]
    assert [precision.of_training(asked, CPU) for asked in ("fp32", "bf16")] == [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("sampler", ["ancestral", "spaced", "balanced"])
def test_in_bf16_a_text_does_not_depend_on_those_beside_it(folder, set_to, sampler):
    set_to("bf16")
    model = rmdm.load(folder, "cpu")
    together = model.generate(48, 5, seed=3, sampler=sampler, guidance=1.5).tokens
    writer, x_BL, keys_B = model.writer(), *model.writer().blank(48, 3)
    assert writer.backbone.blocks[0].qkv.weight.dtype == torch.bfloat16
    settings = model.settings(rmdm.Request(steps=5, sampler=sampler, guidance=1.5))
    with precision.autocast(CPU):
        for batch in (1, 7):
            apart = writer.write(x_BL, keys_B, settings, batch=batch)  # latents are drawn as many at a time
            assert np.array_equal(apart.numpy(), together)


def test_in_bf16_the_distribution_is_near_that_in_fp32_and_not_the_same(folder, set_to):
    def law(asked):
        set_to(asked)
        model = rmdm.load(folder, "cpu")
        x_BL = torch.randint(3, len(WORDS), (8, LENGTH), generator=torch.Generator().manual_seed(0))
        x_BL[:, ::2] = model.backbone.mask_id
        backbone = model.writer().backbone
        z_BGd = model.latents.source.draw(row_keys(0, range(8)))
        with torch.no_grad(), precision.autocast(CPU):
            c_BGC = backbone.latent(z_BGd)
            return backbone.logits(backbone(x_BL, c_BGC=c_BGC)).double().softmax(-1)

    fine, half = law("fp32"), law("bf16")
    apart = float((fine - half).abs().sum(-1).mean() / 2)
    assert 0 < apart < 0.02


def test_latents_that_are_fitted_in_turns_neither_see_each_other_nor_change_what_runs_meanwhile(folder, set_to):
    set_to("bf16")
    model = rmdm.load(folder, "cpu")
    text = model.tokenizer.decode(np.arange(3, 9))
    asked = [rmdm.Request(infill=f"{text} [MASK:2]", given="resample", draws=3, rounds=rounds) for rounds in (2, 5)]
    ready = [model.ready(request) for request in asked]
    alone = [model.latents.draw(one.request, one.choice, one.x_BL) for one in ready]
    steps = {k: model.latents.draw_steps(one.request, one.choice, one.x_BL) for k, one in enumerate(ready)}
    found = {}
    while steps:
        for k, each in list(steps.items()):
            try:
                next(each)
            except StopIteration as done:
                found[k] = done.value
                del steps[k]
            assert not torch.is_autocast_enabled("cpu")
    assert [torch.equal(alone[k], found[k]) for k in (0, 1)] == [True, True]


def test_encoder_and_evaluator_in_bf16_are_near_those_in_fp32(tmp_path, set_to):
    tokenizer, x_BL = word_tokenizer(), np.random.default_rng(0).integers(3, len(WORDS), (16, LENGTH))
    words = ["<s>", "<pad>", "</s>", "[UNK]", *WORDS]
    network = save_encoder(tmp_path / "encoder", "Bert", words)
    texts = documents(6)
    judge = save_evaluator(tmp_path / "judge", " ".join(texts).split())
    found = {}
    for asked in ("fp32", "bf16"):
        set_to(asked)
        encoder = open_encoder(EncoderConfig(name=str(network)), tokenizer, LENGTH, CPU)
        evaluator = Evaluator(find_evaluator(str(judge)), CPU)
        assert encoder.precision == evaluator.precision == asked
        found[asked] = encoder.embed(encoder.pieces(x_BL, np.full(16, LENGTH), 2), 2), evaluator.score(texts).nats_N
    (e_fine, nats_fine), (e_half, nats_half) = found["fp32"], found["bf16"]
    assert 0 < float((e_fine - e_half).norm() / e_fine.norm()) < 0.02
    np.testing.assert_allclose(nats_half, nats_fine, rtol=0.01)
    assert not np.array_equal(nats_half, nats_fine)
