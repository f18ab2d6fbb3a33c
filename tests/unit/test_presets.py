"""Presets parse, one that names a base changes only what it says, and arms of a corpus stand on the same footing."""

import dataclasses

import pytest
import yaml

from rmdm.errors import ConfigError
from rmdm.hub import build_backbone
from rmdm.presets import decode, load_config, merged, preset_names, to_yaml


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


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"optim": {"lrr": 1}}, "unknown field 'optim.lrr'; did you mean 'lr'?"),
        ({"optm": {}}, "unknown field 'optm'; did you mean 'optim'?"),
        ({"data": {"tokenizer": {"vocab": 3}}}, "unknown field 'data.tokenizer.vocab'; did you mean 'vocab_size'?"),
        ({"optim": {"lr": "fast"}}, "optim.lr='fast'"),
        ({"process": "sed"}, "process='sed'"),
        ({"optim": {"clip": False}}, "optim.clip=false is no number"),
        ({"data": {"holdout": True}}, "data.holdout=true is no number"),
        (None, "here is empty; write fields such as 'name:' and 'data:'"),
        ([1], "here holds a list alone; write fields"),
        ("storyworld-mini", "here holds text alone; write fields"),
        (True, "here holds true or false alone"),
        (1.5, "here holds a number alone"),
    ],
)
def test_a_mistake_is_one_line_that_names_field_and_remedy(values, message):
    with pytest.raises(ConfigError) as caught:
        decode(values, "here")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_unknown_preset_suggests_the_nearest():
    with pytest.raises(ConfigError, match="did you mean 'storyworld-mini'"):
        load_config("storyworld-mni")


def test_broken_yaml_names_the_line(tmp_path):
    path = tmp_path / "bad.yaml"
    path.write_text("name: x\ndata: {length: 3\n")
    with pytest.raises(ConfigError, match=r"bad.yaml is not valid YAML at line"):
        load_config(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("train: {steps: 10}\ntrain: {batch: 8}\n", "at line 2: 'train' stands twice in one section, also at line 1"),
        ("optim:\n  lr: 1\n  lr: 2\n", "at line 3: 'lr' stands twice"),
        ("seed: 010\n", "010 is no plain decimal number"),
        ("seed: 1:30\n", "1:30 is no plain decimal number"),
        ("name: {{ foo }}\n", "odd.yaml is not valid YAML at line 1: found unhashable key"),
        ("? [a, b]\n: 1\n", "odd.yaml is not valid YAML at line 1: found unhashable key"),
    ],
)
def test_what_yaml_would_take_in_another_sense_is_refused(tmp_path, text, message):
    path = tmp_path / "odd.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert message in str(caught.value)


def test_changes_are_put_in_section_by_section():
    base = {"a": 1, "b": {"c": 2, "d": [1, 2]}}
    assert merged(base, {"b": {"d": [3]}, "e": None}) == {"a": 1, "b": {"c": 2, "d": [3]}, "e": None}
    assert base == {"a": 1, "b": {"c": 2, "d": [1, 2]}}


def test_a_file_of_ones_own_may_name_a_preset_as_its_base(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("base: storyworld-mini-mdlm\nname: mine\noptim: {lr: 0.5}\n", encoding="utf-8")
    mine, base = load_config(path), load_config("storyworld-mini-mdlm")
    assert (mine.name, mine.optim.lr) == ("mine", 0.5)
    assert mine == dataclasses.replace(base, name="mine", optim=dataclasses.replace(base.optim, lr=0.5))
    path.write_text("base: storyworld-mimi\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"mine.yaml: base='storyworld-mimi' is no preset; did you mean 'storyworld-"):
        load_config(path)


def test_a_file_of_ones_own_may_name_another_as_its_base(tmp_path, monkeypatch):
    """Given a base in a folder beside it, then it is found from wherever the command is typed."""
    (tmp_path / "bases").mkdir()
    (tmp_path / "bases" / "ours.yaml").write_text("base: storyworld-mini-mdlm\nname: ours\noptim: {lr: 0.5}\n")
    (tmp_path / "bases" / "mine.yml").write_text("base: ours.yaml\nname: mine\n")
    (tmp_path / "last.yaml").write_text("base: bases/mine.yml\noptim: {warmup: 3}\n")
    config = load_config(tmp_path / "last.yaml")
    assert (config.name, config.optim.lr, config.optim.warmup) == ("mine", 0.5, 3)
    monkeypatch.chdir(tmp_path / "bases")
    assert load_config("../last.yaml") == config


@pytest.mark.parametrize(
    ("base", "message"),
    [
        ("gone.yaml", r"mine\.yaml: base='gone\.yaml' does not exist; name a preset, or a file from "),
        (
            "~nobody-here/x.yaml",
            r"mine\.yaml: base='~nobody-here/x\.yaml' does not exist; name a preset, or a file from ",
        ),
        ("mine.yaml", r"mine\.yaml: base='mine\.yaml' has this file as its own base; name another, or a preset"),
        ("other.yaml", r"other\.yaml: base='mine\.yaml' has this file as its own base; name another, or a preset"),
        ("empty.yaml", r"empty\.yaml is empty; write fields such as 'name:' and 'data:'"),
    ],
)
def test_a_base_that_leads_nowhere_is_named(base, message, tmp_path):
    (tmp_path / "mine.yaml").write_text(f"base: {base}\n")
    (tmp_path / "other.yaml").write_text("base: mine.yaml\n")
    (tmp_path / "empty.yaml").touch()
    with pytest.raises(ConfigError, match=message):
        load_config(tmp_path / "mine.yaml")


def test_a_folder_that_is_no_run_does_not_hide_a_preset(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "storyworld-mini").mkdir()
    assert load_config("storyworld-mini").name == "storyworld-mini"
    (tmp_path / "other").mkdir()
    with pytest.raises(ConfigError, match=r"other has no config\.yaml"):
        load_config("other")


@pytest.mark.parametrize("corpus", ["storyworld-mini", "storyworld"])
def test_arms_have_the_size_of_their_rmdm(corpus):
    sizes = {}
    for name in (corpus, *(f"{corpus}-{arm}" for arm in ("mdlm", "sedd", "ar", "indep"))):
        sizes[name] = sum(p.numel() for p in build_backbone(load_config(name), 325).parameters())
    own = sizes[corpus]
    assert all(abs(size - own) < 0.02 * own for size in sizes.values()), sizes


@pytest.mark.parametrize("name", [name for name in preset_names() if not name.startswith("storyworld")])
def test_arms_of_a_corpus_share_data_trunk_and_optimiser(name):
    corpus = name.removesuffix("-60k").rsplit("-", 1)[0].removesuffix("-rmdm")
    own, reference = load_config(name), load_config(f"{corpus}-mdlm")
    for section in ("data", "model", "optim"):
        mine, theirs = (dataclasses.asdict(getattr(config, section)) for config in (own, reference))
        if (corpus, section) == ("wiki-small", "model"):  # of one size with what the condition weighs
            mine["mlp_ratio"] = theirs["mlp_ratio"]
        assert mine == theirs, section


@pytest.mark.parametrize("name", [n for n in preset_names() if n.startswith(("lm1b-rmdm", "owt-rmdm", "owt-indep"))])
def test_the_papers_presets_are_the_papers(name):
    config = load_config(name)
    assert config.meanflow.recipe == "paper"
    assert (config.latent.dropout, config.latent.sigma, config.sample.latent_temperature) == (0.0, 1.0, "paper")
    assert config.latent.draw == "prior"


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


def test_wiki_small_has_at_most_20m_parameters_in_every_arm():
    sizes = {}
    for arm in ("mdlm", "ar", "sedd", "rmdm", "paper", "indep"):
        config = load_config(f"wiki-small-{arm}")
        assert config.data.tokenizer.vocab_size == 8192
        sizes[arm] = sum(p.numel() for p in build_backbone(config, 8192).parameters())
    assert max(sizes.values()) <= 20e6
    assert max(sizes.values()) < 1.002 * min(sizes.values()), sizes


def test_arms_of_one_corpus_differ_in_the_objective_alone():
    for corpus in ("lm1b", "owt", "wiki-small"):
        mdlm, ar = (yaml.safe_load(to_yaml(load_config(f"{corpus}-{arm}"))) for arm in ("mdlm", "ar"))
        differing = {key for key in mdlm if mdlm[key] != ar[key]}
        assert differing == {"name", "description", "process"}
