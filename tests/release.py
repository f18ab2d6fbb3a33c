"""Released models in a second: random weights, real tokenizers, and for RMDM a random encoder, whitening and flow."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers, trainers

from rmdm.config import Config, FlowModelConfig
from rmdm.data.tokenizer import Tokenizer
from rmdm.encoders.find import open_encoder
from rmdm.encoders.whitening import Moments, Whitening
from rmdm.hub import build_backbone, save_model
from rmdm.meanflow.flow import Flow, FlowSettings
from rmdm.meanflow.net import FlowNet
from tests.unit.encoders.networks import save_encoder

WORDS = [
    "anna", "tom", "was", "is", "happy", "sad", "near", "the", "river", "farm", "park", "with", "her", "his", "cat",
    "dog", "one", "day", ".", "she", "he", "saw", "a", "red", "ball",
]  # fmt: skip
LENGTH, GROUPS, DIM = 16, 4, 6


def word_tokenizer() -> Tokenizer:
    """Words and two control tokens, as `rmdm prepare` makes them."""
    names = ["<pad>", "<eos>", "<unk>", *WORDS]
    backend = tokenizers.Tokenizer(models.WordLevel({word: i for i, word in enumerate(names)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens(["<pad>", "<eos>"])
    return Tokenizer(backend, name="words", separator_id=1, pad_id=0)


def byte_tokenizer() -> Tokenizer:
    """A byte-level BPE with merges of a few words."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<pad>", "<eos>"], initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator([" ".join(WORDS), "The capital of France is Paris."] * 8, trainer)
    return Tokenizer(backend, name="bpe", separator_id=1, pad_id=0)


def config_of(process: str, **changes: Any) -> Config:
    """A tiny model on padded rows; keyword `a__b` sets `a.b`."""
    values = {
        "data__length": LENGTH, "data__layout": "padded", "model__layers": 2, "model__width": 16, "model__heads": 2,
        "latent__groups": GROUPS, "latent__dim": DIM, "latent__project": None, "latent__width": 8, "sample__steps": 5,
        "encoder__name": None, **changes,
    }  # fmt: skip
    config = Config(name=f"tiny-{process}", process=process)
    for name, value in values.items():
        section, field = name.split("__")
        part = dataclasses.replace(getattr(config, section), **{field: value})
        config = dataclasses.replace(config, **{section: part})
    return config


def save_release(folder: Path, process: str = "mdlm", tokenizer: Tokenizer | None = None, **changes: Any) -> Path:
    """A release of random weights; an RMDM that is not independent of its text gets a random stage I."""
    tokenizer = tokenizer or word_tokenizer()
    config = config_of(process, **changes)
    with_text = process == "rmdm" and not config.latent.independent
    if with_text and config.encoder.name is None:
        encoder = save_encoder(
            folder.parent / f"{folder.name}-encoder", "Bert", ["<s>", "<pad>", "</s>", "[UNK]", *WORDS]
        )
        config = config_of(process, **changes, encoder__name=str(encoder))
    backbone = build_backbone(config, tokenizer.size)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in backbone.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    save_model(folder, backbone.state_dict(), config, tokenizer, 7)
    if with_text:
        save_stage_one(folder, config, tokenizer)
    return folder


def save_stage_one(folder: Path, config: Config, tokenizer: Tokenizer) -> None:
    """A whitening of random rows and a flow with random weights."""
    encoder = open_encoder(config.encoder, tokenizer, config.data.length, torch.device("cpu"))
    x_BL = np.random.default_rng(0).integers(3, tokenizer.size, (64, config.data.length))
    e_BGD = encoder.embed(
        encoder.pieces(x_BL, np.full(64, config.data.length), config.latent.groups), config.latent.groups
    )
    moments = Moments.zero(encoder.dim)
    moments.add(e_BGD.flatten(0, 1))
    Whitening.fit(moments, config.latent.dim).save(folder / "whitening.safetensors")
    torch.manual_seed(0)
    shape = FlowModelConfig(layers=1, width=16, heads=2)
    net = FlowNet(shape, config.latent.groups, config.latent.dim)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    settings = FlowSettings(
        "robust",
        config.latent.groups,
        config.latent.dim,
        1,
        16,
        2,
        4.0,
        transport_steps=4,
        draw_steps=4,
        cache="",
        step=1,
    )
    Flow(settings, net).save(folder / "flow")
