"""An evaluator that knows what stories are like, trained once."""

from pathlib import Path

import pytest

from tests.evaluators import documents, repeated, save_evaluator, train_evaluator


@pytest.fixture(scope="session")
def trained_evaluator(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny GPT-2 after a second on stories and, as in any corpus, some that repeat themselves."""
    texts = documents(400)
    words = sorted({word for text in texts for word in text.split()})
    folder = save_evaluator(tmp_path_factory.mktemp("evaluator") / "tiny", words)
    return train_evaluator(folder, texts + repeated(texts[:130]), 60)
