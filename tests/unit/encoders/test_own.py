"""A run of this project as encoder: its trunk on unmasked text, whatever rows share the batch."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import tokenizers
import torch
from tokenizers import models, pre_tokenizers

from rmdm.config import EncoderConfig
from rmdm.data.tokenizer import Tokenizer
from rmdm.encoders.find import open_encoder
from rmdm.errors import ConfigError, DataError
from rmdm.hub import build_backbone, load_model, save_model
from tests.conftest import small_config

CPU = torch.device("cpu")
WORDS = ["<pad>", "<eos>", "<unk>", "the", "cat", "sat", "on", "mat", "dog", "ran"]
LENGTH = 8


def words(order: list[str]) -> Tokenizer:
    backend = tokenizers.Tokenizer(models.WordLevel({w: i for i, w in enumerate(order)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens(["<pad>", "<eos>"])
    return Tokenizer(backend, name="words", separator_id=1, pad_id=0)


def release(folder: Path, process: str = "mdlm", layout: str = "padded") -> Path:
    base = small_config(process)
    data = dataclasses.replace(base.data, length=LENGTH, layout=layout)
    config = dataclasses.replace(base, data=data)
    tokenizer = words(WORDS)
    backbone = build_backbone(config, tokenizer.size)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in backbone.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    save_model(folder, backbone.state_dict(), config, tokenizer, 3)
    return folder


ROWS = np.array([[3, 4, 5, 1, 0, 0, 0, 0], [3, 8, 9, 6, 3, 7, 1, 0], [4, 1, 0, 0, 0, 0, 0, 0]])
COUNTS = np.array([4, 7, 2])


@pytest.mark.parametrize("process", ["mdlm", "ar"])
@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_the_trunk_on_unmasked_text(tmp_path: Path, process: str, layout: str) -> None:
    folder = release(tmp_path / "run" / "model", process, layout)
    encoder = open_encoder(EncoderConfig(name=str(tmp_path / "run")), words(WORDS), LENGTH, CPU)
    assert (encoder.dim, encoder.context) == (32, LENGTH)
    pieces = encoder.pieces(ROWS, COUNTS, 1)
    assert [piece.ids_T.tolist() for piece in pieces] == [row[:n].tolist() for row, n in zip(ROWS, COUNTS, strict=True)]
    e = encoder.embed(pieces, 1)
    model = load_model(folder)
    for row in range(3):
        shown = ROWS[row] if layout == "padded" else ROWS[row, : COUNTS[row]]
        hidden = model.backbone(torch.from_numpy(shown)[None])[0].detach()
        torch.testing.assert_close(e[row, 0], hidden[: COUNTS[row] - 1].mean(0), rtol=1e-4, atol=1e-4)
        alone = encoder.embed(pieces[row : row + 1], 1)
        torch.testing.assert_close(alone[0], e[row], rtol=1e-5, atol=1e-5)


def test_another_tokenizer_goes_through_text(tmp_path: Path) -> None:
    release(tmp_path / "run")
    config = EncoderConfig(name=str(tmp_path / "run"), channels=5)
    other = words(["<pad>", "<eos>", *reversed(WORDS[2:])])
    texts = ["the cat sat", "dog ran on", "mat"]
    embeddings = []
    for tokenizer in (words(WORDS), other):
        ids = [tokenizer.encode(text).tolist() for text in texts]
        x = np.array([row + [0] * (LENGTH - len(row)) for row in ids])
        encoder = open_encoder(config, tokenizer, LENGTH, CPU)
        embeddings.append(encoder.embed(encoder.pieces(x, np.array([len(row) for row in ids]), 4), 4))
    assert embeddings[0].shape == (3, 4, 5)
    assert embeddings[0][0].any()
    assert torch.equal(*embeddings)
    assert not embeddings[0][2, 1:].any()


def test_rows_longer_than_the_run_was_trained_on_are_refused(tmp_path: Path) -> None:
    release(tmp_path / "run")
    config = EncoderConfig(name=str(tmp_path / "run"))
    with pytest.raises(DataError, match=r"data\.length=16 is 16 tokens of encoder .*, which reads at most 8"):
        open_encoder(config, words(WORDS), 16, CPU)
    with pytest.raises(ConfigError, match=r"encoder\.channels=33 is outside 1\.\.32"):
        open_encoder(dataclasses.replace(config, channels=33), words(WORDS), LENGTH, CPU)


def test_the_fingerprint_follows_weights_and_reading(tmp_path: Path) -> None:
    release(tmp_path / "a")
    release(tmp_path / "b")
    release(tmp_path / "c", layout="packed")
    release(tmp_path / "d", process="ar")
    a, b, c, d = (
        open_encoder(EncoderConfig(name=str(tmp_path / name)), words(WORDS), LENGTH, CPU).fingerprint for name in "abcd"
    )
    assert a == b
    assert len({a, c, d}) == 3
