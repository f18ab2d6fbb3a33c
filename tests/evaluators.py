"""Evaluators in seconds: GPT-2s with random weights or trained on a few stories, as `transformers` saves them."""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
from tokenizers import models, pre_tokenizers

from rmdm.config import DataConfig, TokenizerConfig
from rmdm.data.prepare import prepare
from rmdm.data.sources import STORY_SEED
from rmdm.data.storyworld import storyworld
from rmdm.data.tokenizer import Tokenizer
from tests.release import save_release

SPECIAL = ["<|endoftext|>", "<unk>"]


def documents(n: int, first: int = 0) -> list[str]:
    """Texts of three true stories of storyworld-mini each, some 80 words."""
    world = storyworld("mini")
    return [" ".join(world.story(STORY_SEED, 3 * i + k) for k in range(3)) for i in range(first, first + n)]


def repeated(texts: Sequence[str]) -> list[str]:
    """The first sentence of each text again and again, up to its number of words."""
    sentences = [[*text.split(" . ")[0].split(), "."] for text in texts]
    return [
        " ".join(itertools.islice(itertools.cycle(sentence), len(text.split())))
        for sentence, text in zip(sentences, texts, strict=True)
    ]


def shuffled(texts: Sequence[str], seed: int = 0) -> list[str]:
    """The same words of each text in another order."""
    random = np.random.default_rng(seed)
    return [" ".join(random.permutation(text.split())) for text in texts]


def save_evaluator(folder: Path, words: Sequence[str], **changes: Any) -> Path:
    """A random GPT-2 that knows these words."""
    import transformers

    vocabulary = {word: i for i, word in enumerate(dict.fromkeys([*SPECIAL, *words]))}
    backend = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    settings = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 96, "bos_token_id": 0, "eos_token_id": 0}
    torch.manual_seed(0)
    network = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=len(vocabulary), **(settings | changes)))
    network.eval().save_pretrained(folder)
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token=SPECIAL[0], eos_token=SPECIAL[0], unk_token=SPECIAL[1]
    ).save_pretrained(folder)
    return folder


def train_evaluator(folder: Path, texts: Sequence[str], steps: int = 150) -> Path:
    """The GPT-2 of a folder after some steps on texts, saved again."""
    import transformers

    network = transformers.GPT2LMHeadModel.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    rows = [tokenizer(text).input_ids for text in texts]
    x_NL = torch.tensor([row[: min(map(len, rows))] for row in rows])
    optimizer = torch.optim.AdamW(network.parameters(), lr=5e-3)
    generator = torch.Generator().manual_seed(0)
    network.eval()  # dropout off
    for _ in range(steps):
        x_BL = x_NL[torch.randint(len(x_NL), (16,), generator=generator)]
        loss = network(input_ids=x_BL, labels=x_BL).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    network.save_pretrained(folder)
    return folder


def prepare_documents(folder: Path, n: int = 160, holdout: int = 100) -> Path:
    """Token shards of such documents from a file, so that they count as any text: padded rows of 96 words."""
    folder.mkdir(parents=True)
    (folder / "text.txt").write_text("\n".join(documents(n)), encoding="utf-8")
    data = DataConfig(
        path=str(folder / "text.txt"), layout="padded", length=96, holdout=holdout, dir=str(folder / "shards"),
        tokenizer=TokenizerConfig(kind="word"), workers=1,
    )  # fmt: skip
    prepare(data, progress=False)
    return folder / "shards"


def save_run(folder: Path, process: str, shards: Path, **changes: Any) -> Path:
    """A model with random weights that could have been trained on these shards."""
    tokenizer = Tokenizer.load(shards / "tokenizer")
    own = {"data__dir": str(shards), "data__length": 96, "encoder__name": None, "latent__independent": True}
    return save_release(folder, process, tokenizer, **(own | changes))
