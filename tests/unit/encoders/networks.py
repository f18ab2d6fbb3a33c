"""Tiny networks with random weights in the format of `transformers`, saved as people save theirs."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

TEXTS = ["the cats sat on a mat .", "it was red", "a big dog ran , and the cat sat .", "the"]
WORDS = ["<s>", "<pad>", "</s>", "[UNK]", "##s", *sorted({w for text in TEXTS for w in text.split()} - {"cats"})]
SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}


def piece_tokenizer(words: Sequence[str] = WORDS) -> tokenizers.Tokenizer:
    """Cut like BERT's, framed like MPNet's; the first four words are special."""
    backend = tokenizers.Tokenizer(models.WordPiece({w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    backend.add_special_tokens(list(words[:4]))
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    # As published: these must neither cut nor pad what is encoded.
    backend.enable_truncation(3)
    backend.enable_padding(direction="left", length=5, pad_id=1)
    return backend


def bpe_tokenizer() -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(TEXTS * 4, trainer)
    backend.post_processor = processors.TemplateProcessing(
        single="$A <|endoftext|>", special_tokens=[("<|endoftext|>", 0)]
    )
    return backend


def save_encoder(folder: Path, kind: str, words: Sequence[str] = WORDS, **changes: Any) -> Path:
    """A random network of one of the classes, beside its tokenizer."""
    import transformers

    backend = bpe_tokenizer() if kind in ("Qwen3", "ModernBert") else piece_tokenizer(words)
    vocab = {"vocab_size": backend.get_vocab_size()}
    extra: dict[str, dict[str, Any]] = {
        "Bert": {"max_position_embeddings": 40, "pad_token_id": 1},
        "MPNet": {"max_position_embeddings": 42, "pad_token_id": 1},
        "ModernBert": {"max_position_embeddings": 64, "pad_token_id": 0, "local_attention": 8},
        "Qwen3": {"max_position_embeddings": 64, "num_key_value_heads": 1, "head_dim": 8},
    }
    ids = {"bos_token_id": 0, "eos_token_id": 0, "cls_token_id": 0, "sep_token_id": 0} if kind == "ModernBert" else {}
    settings = getattr(transformers, f"{kind}Config")(**(SMALL | vocab | extra[kind] | ids | changes))
    torch.manual_seed(0)
    network = getattr(transformers, f"{kind}Model")(settings)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    network.save_pretrained(folder)
    backend.save(str(folder / "tokenizer.json"))
    return folder


KINDS = ["Bert", "MPNet", "ModernBert", "Qwen3"]
