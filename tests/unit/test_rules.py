import pytest

from rmdm.errors import ConfigError
from rmdm.presets import decode


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"train": {"steps": 0}}, "train.steps=0 is outside 1..1000000000000; use"),
        ({"seed": -1}, "seed=-1 is outside 0..9223372036854775807; use"),
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
        *(({"name": name}, f"name={name!r} is no name of a folder; use") for name in ("", ".", "..", "../evil", "a/b")),
        ({"sample": {"latent_temperature": 0}}, "sample.latent_temperature=0.0 is not above 0 and at most 1000"),
        ({"sample": {"temperature": 0}}, "sample.temperature=0.0 is outside 1e-06..1e+06; use"),
    ],
)
def test_a_broken_rule_is_one_line_that_names_field_and_remedy(values, message):
    with pytest.raises(ConfigError) as caught:
        decode(values, "here")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_ends_of_a_range_are_allowed_unless_it_is_open():
    for tau in (1e-6, 1000, "paper"):
        assert decode({"sample": {"latent_temperature": tau}}, "here").sample.latent_temperature == tau
    assert decode({"latent": {"sigma": 0}}, "here").latent.sigma == 0
