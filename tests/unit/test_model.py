"""A trained model through `rmdm.load`: what it writes, keeps, reports and refuses."""

import copy
import itertools
import json
import math
import pickle
import shutil
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import rmdm
from rmdm.config import SampleConfig
from rmdm.errors import CheckpointError, ConfigError, DataError
from rmdm.hub import load_model
from rmdm.request import Request, SeedLatent
from rmdm.samplers.noise import row_keys
from tests.release import GROUPS, LENGTH, WORDS, byte_tokenizer, save_release

MASKED, SCORE = ["ancestral", "spaced", "max_prob", "margin", "entropy", "balanced"], ["analytic", "euler"]


class Zoo(dict[str, rmdm.Model]):
    """Models by kind; hypothesis writes its arguments down, and need not write down networks."""

    def __repr__(self) -> str:
        return f"zoo of {', '.join(self)}"


@pytest.fixture(scope="module")
def zoo(tmp_path_factory):
    """One tiny model of every kind."""
    root = tmp_path_factory.mktemp("zoo")
    kinds = {
        "mdlm": ("mdlm", {}),
        "rmdm": ("rmdm", {"latent__draw": "flow", "latent__project": 3}),
        "prior": ("rmdm", {"latent__draw": "prior", "latent__sigma": 0.5}),
        "indep": ("rmdm", {"latent__independent": True, "latent__draw": "prior"}),
        "packed": ("mdlm", {"data__layout": "packed"}),
        "bytes": ("mdlm", {"data__layout": "packed", "tokenizer": byte_tokenizer()}),
        "firm": ("rmdm", {"latent__dropout": 0.0}),
        "sedd": ("sedd", {}),
        "ar": ("ar", {}),
        "wrapped ar": ("ar", {"data__layout": "packed", "data__wrap": True}),
    }
    return Zoo(
        {name: rmdm.load(save_release(root / name, kind, **more), "cpu") for name, (kind, more) in kinds.items()}
    )


def test_importing_the_package_imports_no_torch_and_loading_is_lazy():
    code = "import rmdm, sys; rmdm.load; rmdm.Request; rmdm.TextLatent; assert 'torch' not in sys.modules; rmdm.Model"
    subprocess.run([sys.executable, "-c", code], check=True)
    if not torch.cuda.is_available():
        code = "import sys, rmdm.hub; assert 'torch._dynamo' not in sys.modules, 'the compiler takes a second to load'"
        subprocess.run([sys.executable, "-c", code], check=True)
    with pytest.raises(AttributeError, match="module 'rmdm' has no attribute 'lod'"):
        _ = rmdm.lod
    code = (
        "import rmdm, sys; assert issubclass(rmdm.errors.ConfigError, rmdm.RMDMError); assert 'Model' in dir(rmdm);"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("name", ["mdlm", "rmdm", "prior", "sedd", "ar"])
def test_a_model_can_be_copied_and_pickled_once_it_has_written(zoo, name):
    model = zoo[name]
    texts = model.generate(2, 3).texts
    _ = model.trunk  # which holds a lock, and is made by the first request where networks compute in bf16
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert again.generate(2, 3).texts == texts


@pytest.mark.parametrize("name", ["mdlm", "rmdm", "prior", "sedd", "ar"])
def test_a_model_is_the_same_whatever_the_default_precision_of_torch_is(zoo, name):
    texts = zoo[name].generate(2, 3).texts
    torch.set_default_dtype(torch.float64)
    try:
        assert rmdm.load(zoo[name].folder, "cpu").generate(2, 3).texts == texts
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("name", ["mdlm", "rmdm", "prior", "indep", "packed", "bytes", "sedd", "ar"])
def test_every_kind_of_model_writes_the_same_texts_for_the_same_seed(zoo, name):
    model = zoo[name]
    first, again, other = (model.generate(3, 4, seed) for seed in (7, 7, 8))
    assert first.texts == again.texts
    assert first.texts != other.texts
    assert first.tokens.shape == (3, LENGTH)
    assert first.tokens.max() < model.tokenizer.size
    # A text is a function of (seed, number), whatever is written beside it.
    assert model.generate(1, 4, 7).texts == first.texts[:1]
    cut = model.config.data.layout == "padded"
    assert first.texts == [model.tokenizer.decode(row, stop_at_separator=cut) for row in first.tokens]
    assert (first.latents is None) == (model.backbone.latent is None)


def test_settings_say_what_was_done(zoo):
    done = zoo["rmdm"].generate(
        2, 3, 4, sampler="entropy", temperature=0.7, top_p=0.9, remask=0.2, guidance=1.5, latent_temperature="paper",
        latent_seed=9,
    )  # fmt: skip
    sigma = zoo["rmdm"].config.latent.sigma
    assert json.loads(json.dumps(done.settings)) == {
        "sampler": "entropy", "steps": 3, "temperature": 0.7, "top_p": 0.9, "remask": 0.2, "spacing": None,
        "guidance": 1.5, "seed": 4, "latent": "flow", "latent_seed": 9, "tau": pytest.approx((1 + sigma**2) ** -0.5),
        "precision": "fp32 network, float64 draws",
    }  # fmt: skip
    assert done.seconds > 0
    assert done.trace is None
    plain = zoo["mdlm"].generate().settings
    assert (plain["latent"], plain["latent_seed"], plain["tau"], plain["steps"]) == (None, None, None, 5)
    assert zoo["ar"].generate(steps=3).settings["steps"] == LENGTH
    assert zoo["prior"].generate().settings["latent"] == "prior"


def test_its_own_spacing_goes_with_the_spaced_order_alone(zoo):
    own = SampleConfig(steps=4, sampler="spaced", spacing=2)
    model, causal = (replace(zoo[name], config=replace(zoo[name].config, sample=own)) for name in ("rmdm", "ar"))
    assert model.generate().settings["spacing"] == 2
    assert model.generate(spacing=3).settings["spacing"] == 3
    assert model.generate(sampler="ancestral").settings["spacing"] is None
    assert causal.generate().settings["spacing"] is None
    with pytest.raises(ConfigError, match="spacing=2 is for the spaced order, not 'entropy'; use spaced, or"):
        model.generate(sampler="entropy", spacing=2)
    with pytest.raises(ConfigError, match="spacing=2 is for the spaced order, not 'ar'; leave it out"):
        causal.generate(spacing=2)


def test_an_autoregressive_model_of_framed_rows_continues_a_prefix(zoo):
    model = zoo["wrapped ar"]
    assert model.generate(2, prefix="anna was").texts[0].startswith("anna was ")


@pytest.mark.parametrize(
    ("name", "sampler"),
    [*itertools.product(["mdlm", "packed", "rmdm"], MASKED), *itertools.product(["sedd"], SCORE)],
)
def test_gaps_are_filled_with_text(zoo, name, sampler):
    model = zoo[name]
    way = {"given": "prior"} if name == "rmdm" else {}
    done = model.infill("anna was [MASK] near the [MASK:3] .", 64, 3, sampler=sampler, **way)
    assert not model.tokenizer.is_control[done.tokens].any()
    free = model.generate(64, 3, sampler=sampler)
    assert model.tokenizer.is_control[free.tokens].any(), "these models do write control tokens elsewhere"


def test_damaged_weights_are_told_and_not_written_as_text(tmp_path):
    for process, sampler in (("mdlm", "ancestral"), ("mdlm", "entropy"), ("sedd", "analytic"), ("ar", "ar")):
        model = rmdm.load(save_release(tmp_path / f"{process}-{sampler}", process), "cpu")
        with torch.no_grad():
            model.backbone.norm_scale.fill_(torch.nan)
        with pytest.raises(DataError, match="the model gives NaN or infinity"):
            model.generate(1, 2, sampler=sampler)


def test_the_papers_temperature_leaves_out_the_noise_of_training(zoo):
    model = zoo["rmdm"]
    source, latent, keys = model.latents.source, model.backbone.latent, row_keys(3, range(4))
    start = source.noise(keys)[..., : latent.dim]
    plain = source.flow.to_embedding(start) @ latent.matrix.T / (1 + latent.sigma**2) ** 0.5
    torch.testing.assert_close(model.generate(4, seed=3, latent_temperature="paper").latents, plain)
    assert not torch.allclose(model.generate(4, seed=3).latents, plain, atol=1e-2)


def test_latents_are_drawn_in_one_precision(zoo):
    source, keys = zoo["rmdm"].latents.source, row_keys(3, range(4))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = source.draw(keys)
    assert torch.equal(inside, source.draw(keys))


def test_numpys_numbers_are_numbers(zoo):
    model = zoo["mdlm"]
    there = model.generate(np.int64(2), np.int32(3), np.int64(4), temperature=np.float32(1.0))
    assert there.texts == model.generate(2, 3, 4).texts
    ends = [(SeedLatent(kind(3)), SeedLatent(kind(4))) for kind in (np.int64, int)]
    theirs, ours = (zoo["rmdm"].generate(2, 3, between=pair) for pair in ends)
    assert theirs.texts == ours.texts
    assert torch.equal(theirs.latents, ours.latents)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"steps": 2.5}, "steps=2.5 is no whole number; use 16, for example"),
        ({"n": 2.0}, "n=2.0 is no whole number"),
        ({"seed": "1"}, "seed='1' is no whole number"),
        ({"n": None}, "n=None is no whole number; use 4, for example"),
        ({"seed": None}, "seed=None is no whole number; use 0, for example"),
        ({"seed": 10**5000}, "seed is a number of hundreds of digits; use 0, for example"),
        ({"temperature": 10**400}, "temperature is a number of hundreds of digits; use 0.5, for example"),
        ({"latent_temperature": 10**400}, "latent_temperature is a number of hundreds of digits; use 1.0"),
        ({"callback": 3}, "callback=3 cannot be called; give a function"),
        ({"temperature": "1"}, "temperature='1' is no number"),
        ({"latent_temperature": "papper"}, "latent_temperature='papper' is no number; use 1.0 or 'paper'"),
        ({"like": ["anna"]}, r"like=\['anna'\] is no text"),
        ({"prefix": 3}, "prefix=3 is no text"),
        ({"between": "anna"}, "between takes two texts or latents"),
        ({"weight": 0.3}, "weight=0.3 is for between"),
        ({"draws": 4}, "draws=4 is about given tokens"),
        ({"rounds": 4}, "rounds=4 is about given tokens"),
        ({"between": 5}, "between takes two texts or latents; give a pair"),
        ({"between": ("anna", None)}, "between takes two texts or latents, and one of them is None"),
        ({"between": (SeedLatent(-1), "anna")}, r"SeedLatent\(-1\) is no seed; use a whole number from 0"),
        ({"between": (SeedLatent(1.5), "anna")}, r"SeedLatent\(1.5\) is no seed"),
        ({"between": ("anna", object())}, "between is no latent; give a tensor of numbers"),
        ({"latent": ["a"]}, "latent is no latent; give a tensor of numbers, a text"),
        ({"latent": torch.ones(4, 3, dtype=torch.bool)}, "latent is no latent"),
        ({"latent": torch.ones(4, 3, dtype=torch.complex64)}, "latent is no latent"),
        ({"latent_temperature": np.ones(2)}, "latent_temperature=.* is no number; use 1.0 or 'paper'"),
        ({"prefix": "anna \ud800"}, r"'anna .+d800' is no text in UTF-8; convert it"),
        ({"prefix": "anna <unk>"}, "'<unk>' is not in the model's vocabulary"),
    ],
)
def test_arguments_of_the_wrong_kind_and_idle_ones_are_refused(zoo, values, message):
    with pytest.raises(ConfigError, match=message):
        zoo["rmdm"].generate(**values)
    with pytest.raises(ConfigError, match="infill=None is no text"):
        zoo["rmdm"].infill(None)
    with pytest.raises(ConfigError, match="=None is no text; give a string"):
        zoo["rmdm"].encode(None)
    with pytest.raises(ConfigError, match=r"'hi' is no request; give rmdm\.Request"):
        zoo["rmdm"].write("hi")


def test_a_latent_that_knows_no_text_is_not_fitted_to_one(zoo):
    with pytest.raises(ConfigError, match="given='resample', but the latent of tiny-rmdm knows nothing of the text"):
        zoo["indep"].infill("anna [MASK]", given="resample")


def test_where_no_text_is_given_no_latent_is_fitted_to_it(zoo):
    assert zoo["rmdm"].generate(tokens=5).settings["latent"] == "flow"
    assert zoo["rmdm"].infill("[MASK:5]").settings["latent"] == "flow"
    assert zoo["rmdm"].infill("[MASK:4] anna").settings["latent"] == "resample"
    assert zoo["rmdm"].generate(tokens=5, given="encode").settings["latent"] == "flow"


@pytest.mark.parametrize("name", ["rmdm", "sedd", "ar"])
def test_trace_and_callback_see_every_step(zoo, name):
    model, seen = zoo[name], []
    done = model.generate(2, 4, prefix="anna was", trace=True, callback=lambda step, x: seen.append((step, x.clone())))
    steps = LENGTH - 2 if name == "ar" else 4
    assert [step for step, _ in seen] == list(range(steps))
    assert done.trace is not None
    assert done.trace.shape == (steps, 2, LENGTH)
    assert all(np.array_equal(x.numpy(), state) for (_, x), state in zip(seen, done.trace, strict=True))
    assert np.array_equal(done.trace[-1], done.tokens)
    left = (done.trace == model.tokenizer.mask_id).sum(axis=(1, 2))
    assert (np.diff(left) <= 0).all()
    assert left[0] > 0


def test_a_trace_of_many_texts_holds_all_of_them(zoo):
    done = zoo["mdlm"].generate(70, 2, trace=True)
    assert done.trace is not None
    assert done.trace.shape == (2, 70, LENGTH)
    assert done.texts == zoo["mdlm"].generate(70, 2).texts


words = st.lists(st.sampled_from(WORDS), min_size=0, max_size=4)
options = st.fixed_dictionaries(
    {"steps": st.integers(1, 9), "seed": st.integers(0, 2**60), "temperature": st.sampled_from([0.4, 1.0, 1.6])}
)


@given(
    st.sampled_from(["mdlm", "rmdm", "prior", "indep", "packed", "sedd"]),
    st.tuples(st.sampled_from(MASKED), st.sampled_from(SCORE)),
    st.lists(st.one_of(st.sampled_from(WORDS), st.integers(1, 3)), min_size=1, max_size=4),
    st.sampled_from([0.0, 0.5]),
    st.sampled_from(["null", "prior", "encode", "resample"]),
    options,
)
@settings(max_examples=80, deadline=None)
def test_what_is_given_survives_infilling_in_every_sampler(zoo, name, samplers, parts, remask, mode, how):
    parts = [*parts, 1]
    sampler = samplers[name == "sedd"]
    if sampler not in ("ancestral", "spaced", *SCORE):
        how = {**how, "remask": remask}
    if sampler == "spaced":
        how = {**how, "spacing": 2 if remask else None}
    if name in ("rmdm", "prior"):
        how = {**how, "given": mode, **({"draws": 2, "rounds": 2} if mode == "resample" else {})}
    text = " ".join(part if isinstance(part, str) else f"[MASK:{part}]" for part in parts)
    done = zoo[name].infill(text, 2, sampler=sampler, trace=True, **how)
    wanted = [word for part in parts for word in ([part] if isinstance(part, str) else [None] * part)]
    assert done.trace is not None
    for row in (*done.tokens, *done.trace.reshape(-1, len(wanted))):
        got = [zoo[name].tokenizer.backend.id_to_token(token) for token in row.tolist()]
        assert all(want in (None, have) for want, have in zip(wanted, got, strict=True))
    assert done.tokens.max() < zoo[name].tokenizer.size
    assert done.texts == [zoo[name].tokenizer.decode(row) for row in done.tokens]


@given(
    st.sampled_from(["mdlm", "rmdm", "packed", "sedd", "ar"]),
    st.tuples(st.sampled_from(MASKED), st.sampled_from(SCORE)),
    words, words, st.one_of(st.none(), st.integers(1, 5)), options,
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_prefix_and_suffix_survive_in_every_sampler(zoo, name, samplers, before, after, tokens, how):
    sampler = {"sedd": samplers[1], "ar": "ar"}.get(name, samplers[0])
    asked = {"prefix": " ".join(before)}
    if name != "ar":
        asked |= {"suffix": " ".join(after), "tokens": tokens}
    done = zoo[name].generate(2, sampler=sampler, **how, **asked)
    ids = zoo[name].tokenizer.encode
    assert (done.tokens[:, : len(before)] == ids(" ".join(before))).all()
    if name != "ar" and (tokens is not None or after):
        size = done.tokens.shape[1]
        assert (done.tokens[:, size - len(after) :] == ids(" ".join(after))).all()
        room = LENGTH - (zoo[name].config.data.layout == "padded")
        assert size == (room if tokens is None else len(before) + tokens + len(after))
    else:
        assert done.tokens.shape == (2, LENGTH)


def test_infilled_texts_stop_where_they_were_said_to(zoo):
    for name in ("mdlm", "packed"):
        done = zoo[name].infill("anna was [MASK:2] near", 3)
        assert done.tokens.shape == (3, 5)
    text = "The capital of [MASK:2] is Paris."
    model = zoo["bytes"]
    assert all(t.startswith("The c") for t in model.generate(2, prefix="The c").texts)
    size = len(model.page.infill("[MASK:2] is").x_L)
    assert size == LENGTH
    with pytest.raises(ConfigError, match=f"infill: .* tokens do not fit .* room for {LENGTH}"):
        model.infill(text * 9)


def test_latents_come_back_and_write_the_same_text_again(zoo):
    for name in ("rmdm", "prior"):
        done = zoo[name].generate(3, 4, seed=2)
        assert done.latents is not None
        assert done.latents.shape == (3, GROUPS, zoo[name].backbone.latent.project)
        again = zoo[name].generate(3, 4, seed=2, latent=done.latents)
        assert again.texts == done.texts
        assert again.settings["latent"] == "latent"
        one = zoo[name].generate(3, 4, seed=2, latent=done.latents[1])
        assert torch.equal(one.latents, done.latents[1].expand(3, -1, -1))
        assert one.texts[1] == done.texts[1]


def test_the_latents_have_a_seed_of_their_own(zoo):
    model = zoo["rmdm"]
    both = model.generate(2, 4, seed=1)
    other = model.generate(2, 4, seed=5, latent_seed=1)
    assert torch.equal(both.latents, other.latents)
    assert both.texts != other.texts
    assert model.generate(2, 4, seed=1, latent_seed=1).texts == both.texts


def test_latent_temperature_scales_what_a_latent_is_drawn_from(zoo):
    one, half = (zoo["prior"].generate(2, 2, latent_temperature=tau).latents for tau in (1.0, 0.5))
    torch.testing.assert_close(half, one / 2)


def test_a_latent_temperature_that_makes_no_latent_is_named(zoo):
    """What a flow makes of noise so large is no latent, and often no number; nor would `latent=` take it back."""
    for name in ("rmdm", "prior"):
        for more in ({}, {"prefix": "anna was", "given": "resample", "draws": 2, "rounds": 2}):
            with pytest.raises(ConfigError, match=r"latent_temperature=999 draws latents beyond 1000, or NaN; use a"):
                zoo[name].generate(4, 3, latent_temperature=999, **more)


@pytest.mark.parametrize("name", ["rmdm", "prior"])
def test_a_text_is_written_after_as_it_would_have_been_trained_on(zoo, name):
    model, text = zoo[name], "anna was happy near the river with her cat"
    read, keys_B = model.encode(text), row_keys(3, range(4))
    z = model.latents.reader.condition(
        model.latents.reader.fill(read.embedding.expand(4, -1, -1), read.present.expand(4, -1), keys_B)
    )
    if name == "prior":
        assert not torch.allclose(z[:, :2], read.embedding[:2].expand(4, -1, -1))
    else:
        torch.testing.assert_close(z[:, :2], read.embedding[:2].expand(4, -1, -1))
    expected = model.backbone.latent.noisy(z, torch.from_numpy(keys_B))
    done = model.generate(4, 3, seed=3, like=text)
    torch.testing.assert_close(done.latents, expected)
    assert model.generate(4, 3, seed=3, latent=read).texts == done.texts
    assert model.generate(4, 3, seed=3, like=read).texts == done.texts
    assert done.settings["latent"] == "like"
    assert done.settings["tau"] is None
    assert torch.equal(model.generate(4, 3, seed=8, like=text, latent_seed=3).latents, done.latents)
    assert not torch.equal(model.generate(4, 3, like="tom saw a red ball").latents, done.latents)


@pytest.mark.parametrize("name", ["rmdm", "prior"])
def test_texts_in_between(zoo, name):
    model, a, b = zoo[name], "anna was happy near the river with her cat one day .", "tom is sad near the park ."
    ends = [model.generate(3, 3, like=text).latents for text in (a, b)]
    for weight, end in ((0.0, ends[0]), (1.0, ends[1])):
        torch.testing.assert_close(
            model.generate(3, 3, between=(a, b), weight=weight).latents, end, atol=2e-4, rtol=1e-3
        )
    middle = model.generate(3, 3, between=(a, b))
    assert middle.settings["weight"] == 0.5
    assert not torch.allclose(middle.latents, ends[0], atol=0.05)
    drawn = model.generate(2, 3).latents
    mixed = model.generate(3, 3, between=(drawn[0], a), weight=0.0)
    torch.testing.assert_close(mixed.latents, drawn[0].expand(3, -1, -1))
    model.generate(1, 3, between=(model.encode(a), drawn[1]))


def test_given_tokens_choose_where_the_latent_comes_from(zoo, tmp_path):
    model, text = zoo["prior"], "anna was [MASK:2] near the [MASK] ."
    done = {how: model.infill(text, 2, 3, given=how) for how in ("null", "prior", "encode", "resample")}
    assert [d.settings["latent"] for d in done.values()] == ["null", "prior", "encode", "resample"]
    assert done["null"].latents is None
    own = {"sample__guidance": 1.5, "sample__temperature": 0.5, "sample__null_temperature": 0.75}
    guided = rmdm.load(save_release(tmp_path / "guided", "rmdm", **own), "cpu")
    ways = [guided.infill(text, given=how).settings for how in ("null", "prior")]
    assert [(how["guidance"], how["temperature"]) for how in ways] == [(1.0, 0.75), (1.5, 0.5)]
    assert guided.infill(text, given="null", temperature=2.0).settings["temperature"] == 2.0
    torch.testing.assert_close(done["prior"].latents, model.generate(2, 3).latents)
    assert (done["resample"].settings["draws"], done["resample"].settings["rounds"]) == (16, 32)
    few = model.infill(text, 2, 3, given="resample", draws=3, rounds=2).settings
    assert (few["draws"], few["rounds"]) == (3, 2)
    e_1GD, present_1G = model.latents.read_given(torch.from_numpy(model.page.infill(text).x_L)[None])
    assert present_1G.tolist() == [[True, True, True, False]]
    keys_B = row_keys(0, range(2))
    z = model.latents.reader.condition(
        model.latents.reader.fill(e_1GD.expand(2, -1, -1), present_1G.expand(2, -1), keys_B)
    )
    torch.testing.assert_close(done["encode"].latents, model.backbone.latent.noisy(z, torch.from_numpy(keys_B)))
    # Where nothing is given there is nothing to choose.
    assert model.generate(2, 3, prefix="").settings["latent"] == "prior"
    assert zoo["indep"].infill(text).settings["latent"] == "prior"
    default = model.config.latent.given or "null"
    assert model.infill(text).settings["latent"] == default
    assert model.infill(text, like="tom was sad").settings["latent"] == "like"


def test_padding_that_was_never_learnt_is_not_asked_about(zoo, tmp_path):
    quiet = rmdm.load(save_release(tmp_path / "quiet", "rmdm", data__pad_in_loss=False), "cpu")
    x_BL = torch.from_numpy(quiet.page.infill("anna [MASK] .").x_L)[None]
    assert quiet.latents.scored(x_BL).sum() == 3
    assert zoo["rmdm"].latents.scored(x_BL).sum() == LENGTH - 1


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"n": 0}, "n=0 is below 1; use 4, for example"),
        ({"n": 10**9}, "n=1000000000 is above 100000; use 4, for example"),
        ({"steps": 10**20}, "steps=100000000000000000000 is above 1000000; use 16, for example"),
        ({"draws": 10**8, "prefix": "a"}, "draws=100000000 is above 10000"),
        ({"rounds": 10**8, "prefix": "a"}, "rounds=100000000 is above 10000"),
        ({"steps": 0}, "steps=0 is below 1; use 16, for example"),
        ({"seed": -1}, "seed=-1 is below 0"),
        ({"seed": 2**63}, "seed=9223372036854775808 is above 9223372036854775807"),
        ({"latent_seed": -1}, "latent_seed=-1 is below 0"),
        ({"tokens": 0}, "tokens=0 is below 1"),
        ({"draws": 0, "prefix": "a"}, "draws=0 is below 1"),
        ({"rounds": 0, "prefix": "a"}, "rounds=0 is below 1"),
        ({"weight": 1.5, "between": ("a", "b")}, "weight=1.5 is outside 0..1"),
        ({"weight": float("nan")}, "weight=nan is outside 0..1"),
        ({"given": "nul", "prefix": "a"}, "given='nul' is unknown; did you mean 'null'"),
        ({"given": "prior"}, "given='prior' is about given tokens; give a prefix"),
        ({"given": "prior", "prefix": "a", "draws": 3}, "draws=3 is for given='resample', not 'prior'"),
        ({"infill": "[MASK]", "prefix": "a"}, "infill and prefix exclude each other"),
        ({"infill": "[MASK]", "tokens": 3}, "infill and tokens exclude each other"),
        ({"like": "a", "between": ("a", "b")}, "like and between both name a latent"),
        ({"like": "a", "latent_temperature": 0.5}, "latent_temperature has no say where like names the latent"),
        ({"like": "a", "given": "prior", "prefix": "a"}, "given has no say where like"),
        ({"latent": torch.zeros(4, 6), "latent_seed": 1}, "latent_seed has no say where latent names"),
    ],
)
def test_requests_that_no_model_could_meet(values, message):
    with pytest.raises(ConfigError, match=f"^{message}") as caught:
        Request(**values).check()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("mdlm", {"like": "anna"}, "like needs a latent, and tiny-mdlm has none; use an rmdm model"),
        ("mdlm", {"between": ("anna", "tom")}, "between needs a latent"),
        ("mdlm", {"latent_temperature": 1.0}, "latent_temperature needs a latent"),
        ("mdlm", {"given": "prior", "prefix": "anna"}, "given needs a latent"),
        ("mdlm", {"guidance": 2.0}, "guidance=2.0 on a model without a latent"),
        ("mdlm", {"temperature": -1.0}, "temperature=-1.0 is not a positive number"),
        ("mdlm", {"top_p": 0.0}, "top_p=0.0 is not above 0"),
        ("mdlm", {"sampler": "ar"}, "sampler='ar' does not fit a masked diffusion model"),
        ("mdlm", {"prefix": "anna " * 16}, "prefix: 16 tokens and 1 to be written do not fit"),
        ("ar", {"suffix": "anna"}, "suffix does not fit an autoregressive model, which only continues a prefix"),
        ("ar", {"tokens": 3}, "tokens does not fit an autoregressive"),
        ("rmdm", {"latent_temperature": 0.0}, "latent_temperature=0.0 is not a positive number"),
        ("rmdm", {"latent": torch.zeros(4, 6)}, r"latent has shape \(4, 6\), this request takes \(4, 3\)"),
        ("rmdm", {"latent": torch.full((4, 3), torch.nan)}, "latent holds numbers beyond 1000, or NaN"),
        ("rmdm", {"between": ("anna", "tom", "cat")}, "between takes two"),
        ("rmdm", {"like": "ana"}, "'ana' is not in the model's vocabulary"),
        ("rmdm", {"like": "anna " * 17}, "like: 17 tokens do not fit"),
        ("rmdm", {"given": "null", "prefix": "anna", "guidance": 2.0}, "guidance=2.0 weighs the latent"),
        ("firm", {"given": "null", "prefix": "anna"}, "given='null' writes without a latent, which latent.dropout=0"),
        ("firm", {"guidance": 2.0}, "guidance=2.0 needs a model that also learnt to do without its latent"),
        ("indep", {"like": "anna"}, r"tiny-rmdm was trained with latents that have nothing to do with its texts"),
    ],
)
def test_requests_that_do_not_fit_the_model(zoo, name, values, message):
    with pytest.raises(ConfigError, match=f"^{message}") as caught:
        zoo[name].generate(**values)
    assert "\n" not in str(caught.value)


def test_an_autoregressive_model_does_not_infill(zoo):
    with pytest.raises(ConfigError, match="infill does not fit an autoregressive model"):
        zoo["ar"].infill("anna [MASK]")


def test_a_missing_or_changed_encoder_is_said_in_one_line(zoo, tmp_path):
    gone = rmdm.load(save_release(tmp_path / "gone", "rmdm"), "cpu")
    (tmp_path / "gone-encoder").rename(tmp_path / "elsewhere")
    with pytest.raises(DataError, match=r"gone-encoder' does not exist"):
        gone.generate(like="anna")
    assert gone.generate().texts
    from tests.unit.encoders.networks import save_encoder

    save_encoder(tmp_path / "gone-encoder", "Bert", ["<s>", "<pad>", "</s>", "[UNK]", *WORDS], hidden_size=8)
    with pytest.raises(DataError, match="has 8 channels, but the model was trained with one of 16"):
        gone.encode("anna")


def test_a_device_that_is_not_there(zoo):
    folder = zoo["mdlm"].folder
    assert rmdm.load(folder).device.type == ("cuda" if torch.cuda.is_available() else "cpu")
    with pytest.raises(ConfigError, match="device='gpu' is unknown; use auto, cpu or cuda"):
        rmdm.load(folder, "gpu")
    with pytest.raises(ConfigError, match="device=None is unknown; use auto, cpu or cuda"):
        rmdm.load(folder, None)
    with pytest.raises(ConfigError, match="'' names no model"):
        rmdm.load("")
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="device='cuda', but torch sees no GPU here"):
            rmdm.load(folder, "cuda")


@pytest.mark.parametrize("draw", ["flow", "prior"])
def test_a_fitted_latent_starts_at_that_of_the_given_text_where_it_can_be_read(tmp_path, draw):
    release = save_release(tmp_path / "model", "rmdm", latent__draw=draw)
    text = "anna was [MASK] near the [MASK] ."
    read = load_model(release).infill(text, n=2, seed=1, rounds=1, draws=1)
    assert read.settings["start"] == "text"
    shutil.rmtree(tmp_path / "model-encoder")
    blind = load_model(release).infill(text, n=2, seed=1, rounds=1, draws=1)
    assert blind.settings == {**read.settings, "start": "draw"}
    assert not torch.equal(read.latents, blind.latents)


@pytest.mark.parametrize("draw", ["flow", "prior"])
def test_no_group_of_a_start_is_longer_than_noise_and_its_direction_stays(tmp_path, draw, monkeypatch):
    model = load_model(save_release(tmp_path / "model", "rmdm", latent__draw=draw))
    latents, x_BL = model.latents, model.ready(Request(infill="anna was [MASK] near the [MASK] .", n=2)).x_BL
    keys_B, size = (
        row_keys(3, range(2)),
        latents.backbone.latent.dim if draw == "flow" else latents.backbone.latent.project,
    )
    exact = latents.source.noise_at(latents._condition_given(x_BL, keys_B), keys_B)
    for factor in (0.01, 100.0):
        given = exact * torch.tensor([factor] * size + [1.0] * (exact.shape[-1] - size))
        monkeypatch.setattr(latents.source, "noise_at", lambda *_, given=given: given.clone())
        start = latents._start(x_BL, keys_B, 1.0)
        lengths = start[..., :size].norm(dim=-1)
        assert (lengths <= size**0.5 + 1e-4).all()
        torch.testing.assert_close(
            torch.cosine_similarity(start[..., :size], exact[..., :size], dim=-1), torch.ones_like(lengths)
        )
        assert torch.equal(start[..., size:], exact[..., size:])
        assert torch.equal(start, given) == (factor < 1)


@pytest.mark.parametrize("draw", ["flow", "prior"])
@pytest.mark.parametrize("tau", [1.0, 0.5, "paper"])
def test_the_noise_of_a_latent_leads_back_to_it(tmp_path, draw, tau):
    model = load_model(save_release(tmp_path / "model", "rmdm", latent__draw=draw))
    source, keys_B = model.latents.source, row_keys(3, range(2))
    x_BL = model.ready(Request(infill="anna was [MASK] near the [MASK] .", n=2)).x_BL
    z_BGD = model.latents._condition_given(x_BL, keys_B)
    wanted = source.latent.noisy(z_BGD, torch.from_numpy(keys_B))
    if draw == "flow" and tau == "paper":  # which leaves out the noise of training
        wanted = z_BGD @ source.latent.matrix.T / math.sqrt(1 + source.latent.sigma**2)
    got = source.of_noise(source.noise_at(z_BGD, keys_B, tau), tau)
    torch.testing.assert_close(got, wanted, atol=0.05 if draw == "flow" else 1e-5, rtol=0)


def test_a_folder_of_runs_and_a_file_are_told_from_a_model(tmp_path):
    for name in ("b", "a"):
        release = tmp_path / name / "checkpoints" / "step-00000005" / "model"
        release.mkdir(parents=True)
        (release / "model.json").write_text("{}")
    with pytest.raises(CheckpointError, match=f"holds 2 runs and is none itself; name one, such as {tmp_path / 'a'}$"):
        rmdm.load(tmp_path)
    with pytest.raises(CheckpointError, match="is a file, not a model; give a run directory"):
        rmdm.load(tmp_path / "a" / "checkpoints" / "step-00000005" / "model" / "model.json")
