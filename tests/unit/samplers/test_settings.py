import pytest

from rmdm.errors import ConfigError
from rmdm.samplers.settings import SAMPLERS, SampleSettings
from tests.reference.tiny import tiny_backbone

MODELS = {
    "mdlm": tiny_backbone(3, 4),
    "rmdm": tiny_backbone(3, 4, groups=2),
    "sedd": tiny_backbone(3, 4, time=True),
    "ar": tiny_backbone(3, 4, causal=True),
}
FITTING = {
    "mdlm": {"ancestral", "spaced", "max_prob", "margin", "entropy", "balanced"},
    "rmdm": {"ancestral", "spaced", "max_prob", "margin", "entropy", "balanced"},
    "sedd": {"analytic", "euler"},
    "ar": {"ar"},
}


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"steps": 0}, "steps=0 is below 1"),
        ({"temperature": 0.0}, "temperature=0.0 is not a positive number"),
        ({"temperature": -1.0}, "temperature=-1.0 is not a positive number"),
        ({"temperature": float("nan")}, "temperature=nan is not a positive number"),
        ({"temperature": float("inf")}, "temperature=inf is not a positive number"),
        ({"top_p": 0.0}, "top_p=0.0 is not above 0 and at most 1"),
        ({"top_p": 1.1}, "top_p=1.1 is not above 0 and at most 1"),
        ({"top_p": float("nan")}, "top_p=nan"),
        ({"sampler": "entropy", "remask": 1.0}, "remask=1.0 is not at least 0 and below 1"),
        ({"sampler": "entropy", "remask": -0.1}, "remask=-0.1 is not at least 0 and below 1"),
        ({"remask": 0.1}, "remask=0.1 needs a sampler that knows how sure it was, not 'ancestral'"),
        ({"sampler": "spaced", "spacing": 1}, "spacing=1 is below 2"),
        ({"spacing": 8}, "spacing=8 is for the spaced order, not 'ancestral'; use spaced, or leave it out"),
        ({"guidance": float("inf")}, "guidance=inf is not in -1000..1000"),
        ({"guidance": 2.0}, "guidance=2.0 on a model without a latent"),
        ({"sampler": "maxprob"}, "sampler='maxprob' is unknown; did you mean 'max_prob'?"),
    ],
)
def test_a_wrong_value_is_one_line_with_a_remedy(wrong, says):
    with pytest.raises(ConfigError) as caught:
        SampleSettings(**wrong).check(MODELS["mdlm"])
    message = str(caught.value)
    assert message.startswith(says)
    assert "; " in message
    assert "\n" not in message


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_sampler_runs_only_on_models_it_fits(kind, sampler):
    settings = SampleSettings(sampler=sampler)
    if sampler in FITTING[kind]:
        settings.check(MODELS[kind])
    else:
        with pytest.raises(ConfigError, match=f"sampler='{sampler}' does not fit .*; use {min(FITTING[kind])}"):
            settings.check(MODELS[kind])


def test_everything_at_once_on_a_model_with_a_latent():
    SampleSettings("entropy", steps=1, temperature=0.5, top_p=0.9, remask=0.5, guidance=-1.5).check(MODELS["rmdm"])


@pytest.mark.parametrize("kind", MODELS)
def test_an_unknown_sampler_is_told_of_those_that_fit_the_model(kind):
    with pytest.raises(ConfigError) as caught:
        SampleSettings(sampler="foo").check(MODELS[kind])
    assert str(caught.value) == f"sampler='foo' is unknown; known: {', '.join(sorted(FITTING[kind]))}"
