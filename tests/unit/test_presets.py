"""Presets that name a base change only what they say, and arms of a corpus stand on the same footing."""

import dataclasses

import pytest

from rmdm.config import load_config, merged, preset_names
from rmdm.hub import build_backbone


def test_changes_are_put_in_section_by_section():
    base = {"a": 1, "b": {"c": 2, "d": [1, 2]}}
    assert merged(base, {"b": {"d": [3]}, "e": None}) == {"a": 1, "b": {"c": 2, "d": [3]}, "e": None}
    assert base == {"a": 1, "b": {"c": 2, "d": [1, 2]}}


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
        assert mine == theirs, section


@pytest.mark.parametrize("name", [n for n in preset_names() if n.startswith(("lm1b-rmdm", "owt-rmdm", "owt-indep"))])
def test_the_papers_presets_are_the_papers(name):
    config = load_config(name)
    assert config.meanflow.recipe == "paper"
    assert (config.latent.dropout, config.latent.sigma, config.sample.latent_temperature) == (0.0, 1.0, "paper")
    assert config.latent.draw == "prior"
