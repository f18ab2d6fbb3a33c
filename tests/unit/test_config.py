import dataclasses
import inspect
import re

import pytest
import yaml

import rmdm.config
from rmdm.config import Config, decode, field_names, load_config, preset_names, to_yaml
from rmdm.errors import ConfigError
from rmdm.hub import build_backbone


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_parses_and_says_what_it_is(name):
    config = load_config(name)
    assert config.name == name
    assert config.description


@pytest.mark.parametrize("name", preset_names())
def test_a_resolved_config_is_a_preset(name, tmp_path):
    config = dataclasses.replace(load_config(name), seed=7)
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    assert load_config(tmp_path) == config
    assert load_config(tmp_path / "config.yaml") == config


@pytest.mark.parametrize("process", ["mdlm", "ar"])
def test_paper_presets_have_the_papers_settings(process):
    for corpus, steps, length in (("lm1b", 1_000_000, 128), ("owt", 50_000, 1024)):
        config = load_config(f"{corpus}-{process}")
        assert (config.model.layers, config.model.width, config.model.heads) == (12, 768, 12)
        assert (config.train.steps, config.train.batch, config.data.length) == (steps, 512, length)
        assert (config.optim.lr, config.optim.warmup, config.optim.schedule) == (3e-4, 2500, "constant")
        assert (config.optim.ema, config.optim.clip) == (0.9999, 1.0)
        assert config.process == process
    lm1b, owt = load_config(f"lm1b-{process}").data, load_config(f"owt-{process}").data
    assert (lm1b.layout, lm1b.pad_in_loss, lm1b.valid_split) == ("padded", True, "test")
    assert (owt.layout, owt.holdout, owt.valid_split) == ("packed", 100_000, None)


@pytest.mark.parametrize("process", ["mdlm", "ar"])
def test_wiki_small_has_at_most_20m_parameters(process):
    config = load_config(f"wiki-small-{process}")
    assert config.data.tokenizer.vocab_size == 16384
    parameters = sum(p.numel() for p in build_backbone(config, 16384).parameters())
    assert 15e6 < parameters <= 20e6


def test_arms_of_one_corpus_differ_in_the_objective_alone():
    for corpus in ("lm1b", "owt", "wiki-small"):
        mdlm, ar = (yaml.safe_load(to_yaml(load_config(f"{corpus}-{arm}"))) for arm in ("mdlm", "ar"))
        differing = {key for key in mdlm if mdlm[key] != ar[key]}
        assert differing == {"name", "description", "process"}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"optim": {"lrr": 1}}, "unknown field 'optim.lrr'; did you mean 'lr'?"),
        ({"optm": {}}, "unknown field 'optm'; did you mean 'optim'?"),
        ({"data": {"tokenizer": {"vocab": 3}}}, "unknown field 'data.tokenizer.vocab'; did you mean 'vocab_size'?"),
        ({"optim": {"lr": "fast"}}, "optim.lr='fast'"),
        ({"train": {"steps": 0}}, "train.steps=0 is outside 1.."),
        (
            {"model": {"width": 30, "heads": 4}},
            "model.heads=4 must divide model.width=30 into even parts; use model.heads=3",
        ),
        ({"data": {"wrap": True, "layout": "padded"}}, "data.wrap needs data.layout=packed"),
        ({"model": {"width": 33, "heads": 3}}, "use an even width"),
        ({"optim": {"betas": [0.9, float("nan")]}}, "optim.betas[1]=nan"),
        ({"optim": {"clip": -1}}, "optim.clip=-1.0 is below 0"),
        ({"optim": {"lr": float("inf")}}, "optim.lr=inf"),
        ({"seed": 10**23}, "seed="),
        ({"sample": {"latent_temperature": 0}}, "sample.latent_temperature=0.0 is not above 0 and at most 1000"),
        ({"sample": {"temperature": 0}}, "sample.temperature=0.0 is outside 1e-06.."),
        ({"process": "sed"}, "process='sed'"),
        ([1], "expected fields"),
    ],
)
def test_a_mistake_is_one_line_that_names_field_and_remedy(values, message):
    with pytest.raises(ConfigError) as caught:
        decode(values, "here")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_ends_of_a_range_are_allowed_unless_it_is_open():
    for tau in (1e-6, 1000, "paper"):
        assert decode({"sample": {"latent_temperature": tau}}, "here").sample.latent_temperature == tau
    assert decode({"latent": {"sigma": 0}}, "here").latent.sigma == 0


def test_broken_yaml_names_the_line(tmp_path):
    path = tmp_path / "bad.yaml"
    path.write_text("name: x\ndata: {length: 3\n")
    with pytest.raises(ConfigError, match=r"bad.yaml is not valid YAML at line"):
        load_config(path)


def test_unknown_preset_suggests_the_nearest():
    with pytest.raises(ConfigError, match="did you mean 'storyworld-mini'"):
        load_config("storyworld-mni")


def test_every_field_has_a_docstring_for_the_help_page():
    from rmdm.cli import config_flags

    assert set(config_flags().values()) == set(field_names(Config))
    documented = re.findall(r"^    (\w+): [^\n]*\n    \"\"\"", inspect.getsource(rmdm.config), flags=re.MULTILINE)
    leaves = {name.rpartition(".")[2] for name in field_names(Config)}
    assert leaves <= set(documented)


def test_a_file_of_ones_own_may_name_a_preset_as_its_base(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("base: storyworld-mini-mdlm\nname: mine\noptim: {lr: 0.5}\n", encoding="utf-8")
    mine, base = load_config(path), load_config("storyworld-mini-mdlm")
    assert (mine.name, mine.optim.lr) == ("mine", 0.5)
    assert mine == dataclasses.replace(base, name="mine", optim=dataclasses.replace(base.optim, lr=0.5))
    path.write_text("base: storyworld-mimi\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"mine.yaml: base='storyworld-mimi' is no preset; did you mean 'storyworld-"):
        load_config(path)
