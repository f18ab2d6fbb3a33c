"""Encoders in `transformers` format: the last hidden state of a BERT, MPNet, ModernBERT, Qwen3 or their like.

Shapes: B rows, T tokens of the encoder, G groups, D channels.
"""

import contextlib
import hashlib
import inspect
import json
import logging
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from rmdm.data.tokenizer import Tokenizer, refuse_void
from rmdm.encoders.encoder import Pieces
from rmdm.encoders.find import weight_files
from rmdm.encoders.offsets import Frame, Reader
from rmdm.errors import ConfigError, DataError

LOG = logging.getLogger(__name__)
UNLIMITED = 1 << 30
"""Context of an encoder that has no table of positions and names no limit."""
ROUND_TO = 8
"""On a GPU rows are padded to a multiple of this, so that matrices are aligned for tensor cores."""
RECOMPILES = 64
"""Most versions of a layer to compile: with and without a mask, for fixed and for any shape, and for each kind of layer
(ModernBERT has three); torch's own limit is 8, past which it runs uncompiled."""
POOL_ELEMENTS = 1 << 26
"""Most numbers in the pooling matrices made at once (256 MiB)."""
IRRELEVANT = {"_name_or_path", "transformers_version", "torch_dtype", "dtype", "_attn_implementation_autoset"}
"""Keys of config.json that do not change what the network computes."""


class PretrainedEncoder:
    """A network loaded through `transformers.AutoModel`, frozen."""

    def __init__(
        self,
        name: str,
        folder: Path,
        tokenizer: Tokenizer,
        length: int,
        device: torch.device,
        precision: torch.dtype,
        channels: int | None = None,
    ) -> None:
        self.name, self.device = name, device
        backend = load_backend(name, folder)
        files = weight_files(folder)
        if not files:
            raise _no_weights(name, folder)
        self.precision = "bf16" if precision == torch.bfloat16 else "fp32"
        self._model, settings = load_network(name, folder, precision)
        self.dim = check_channels(name, channels, int(settings.hidden_size))
        self.context = _context(self._model, settings)
        self._reader = Reader(name, backend, Frame.of(backend), self.context, tokenizer, length)
        rows = self._model.get_input_embeddings().num_embeddings
        highest = max(backend.get_vocab(with_added_tokens=True).values())
        if highest >= rows:
            raise DataError(
                f"encoder {name!r} has embeddings for {rows} tokens, its tokenizer goes up to {highest}; "
                f"restore the files that belong together in {folder}"
            )
        # Some classes tell padding by this id (MPNet counts positions with it); the others are told by the mask.
        self._pad_id = settings.pad_token_id if settings.pad_token_id is not None else 0
        # Causal networks would keep keys and values nobody reads.
        takes_cache = "use_cache" in inspect.signature(self._model.forward).parameters
        self._options = {"use_cache": False} if takes_cache else {}
        self._model.to(device)
        self._compiled = compile_layers(self._model) if device.type == "cuda" else []
        facts = [type(self._model).__name__, channels, _settings(folder), json.loads(backend.to_str())]
        self.fingerprint = fingerprint(files, facts)

    def pieces(self, x_BL: NDArray[np.int64], lengths_B: NDArray[np.int64], groups: int) -> list[Pieces]:
        """See `Encoder.pieces`."""
        return self._reader.pieces(x_BL, lengths_B, groups)

    @torch.no_grad()
    def embed(self, rows: list[Pieces], groups: int) -> Tensor:
        """See `Encoder.embed`."""
        e_BGD = torch.zeros(len(rows), groups, self.dim, device=self.device)
        used = [b for b, row in enumerate(rows) if len(row.token_N)]
        if not used:
            return e_BGD
        kept = [rows[b] for b in used]
        longest = max(len(row.ids_T) for row in kept)
        if self.device.type == "cuda":
            longest = min(-(-longest // ROUND_TO) * ROUND_TO, self.context)
        ids_BT, is_real_BT = pad(kept, longest, self._pad_id)
        # Without a mask attention is faster, and the network need not ask the device whether it can do without.
        is_full = all(len(row.ids_T) == longest for row in kept)
        mask_BT = None if is_full else send(is_real_BT, self.device)
        h_BTD = self._hidden(send(ids_BT, self.device), mask_BT)
        pooled = pool_rows(kept, h_BTD[..., : self.dim], groups)
        if len(used) == len(rows):
            return pooled
        e_BGD[send(torch.tensor(used), self.device)] = pooled
        return e_BGD

    def _hidden(self, ids_BT: Tensor, mask_BT: Tensor | None) -> Tensor:
        options = {"input_ids": ids_BT, "attention_mask": mask_BT} | self._options
        try:
            return self._model(**options).last_hidden_state
        except torch.cuda.OutOfMemoryError:
            raise
        except Exception as error:  # whatever the compiler stumbles on, the network itself may still run
            if not self._compiled:
                raise
            LOG.warning("encoder %r is not compiled: %s", self.name, " ".join(str(error).split())[:200])
            for layer in self._compiled:
                layer._compiled_call_impl = None
            self._compiled = []
            return self._model(**options).last_hidden_state


def compile_layers(network: nn.Module, **options: Any) -> list[nn.Module]:
    """Compile the layers of a network where they stand, and return them.

    Layers share their code, so one is compiled for all, in seconds. The first shape gets code of its own; lengths and
    numbers of rows that are met later share code for any.
    """
    stacks = [list(part) for part in network.modules() if isinstance(part, nn.ModuleList)]
    layers = max(stacks, key=len, default=[network])
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, RECOMPILES)
    for layer in layers:
        layer.compile(**options)
    return layers


def load_backend(name: str, folder: Path) -> tokenizers.Tokenizer:
    """The fast tokenizer of a folder, without the truncation and padding it was published with."""
    from transformers import AutoTokenizer

    file = folder / "tokenizer.json"
    try:
        if file.is_file():
            backend = tokenizers.Tokenizer.from_file(str(file))
        else:
            loaded: Any = AutoTokenizer.from_pretrained(str(folder), use_fast=True, trust_remote_code=False)
            backend = loaded.backend_tokenizer
            refuse_void(backend)
    except Exception as error:  # missing files, slow-only tokenizers, bare Exception of the backend
        raise DataError(
            f"encoder {name!r} has no tokenizer that can be loaded from {folder} ({_first_line(error)}); "
            "give a folder that holds tokenizer.json"
        ) from None
    backend.no_truncation()
    backend.no_padding()
    return backend


def load_network(name: str, folder: Path, precision: torch.dtype) -> tuple[Any, Any]:
    """The frozen network of a folder and its settings; nothing is unpickled and no code of the folder is run."""
    from transformers import AutoConfig, AutoModel

    try:
        with quiet():
            settings: Any = AutoConfig.from_pretrained(str(folder), trust_remote_code=False)
            if settings.is_encoder_decoder:
                raise ConfigError(f"encoder.name={name!r} is an encoder with a decoder; use an encoder alone")
            network = AutoModel._model_mapping[type(settings)]
            takes_pooler = "add_pooling_layer" in inspect.signature(network.__init__).parameters
            model, report = AutoModel.from_pretrained(
                str(folder),
                config=settings,
                dtype=precision,
                use_safetensors=True,
                trust_remote_code=False,
                output_loading_info=True,
                **({"add_pooling_layer": False} if takes_pooler else {}),
            )
    except ConfigError:
        raise
    except Exception as error:  # unknown class, damaged files, code in the folder
        raise DataError(f"encoder {name!r} cannot be loaded from {folder} ({_first_line(error)})") from None
    missing = sorted(report["missing_keys"])
    if missing:
        raise DataError(
            f"encoder {name!r} lacks {len(missing)} weights in {folder}, such as {missing[0]}; restore the file"
        )
    return model.eval().requires_grad_(False), settings


def check_channels(name: str, channels: int | None, width: int) -> int:
    """How many channels are kept."""
    if channels is None:
        return width
    if not 1 <= channels <= width:
        raise ConfigError(f"encoder.channels={channels} is outside 1..{width}, the channels of {name!r}")
    return channels


def pad(rows: Sequence[Pieces], length: int, pad_id: int) -> tuple[Tensor, Tensor]:
    """Ids of the rows, padded on the right, and 1 where they are real."""
    ids_BT = np.full((len(rows), length), pad_id, dtype=np.int64)
    lengths_B = np.array([len(row.ids_T) for row in rows])
    is_real = np.arange(length) < lengths_B[:, None]
    ids_BT[is_real] = np.concatenate([row.ids_T for row in rows])
    return torch.from_numpy(ids_BT), torch.from_numpy(is_real.astype(np.int64))


def pool_rows(rows: Sequence[Pieces], h_BTD: Tensor, groups: int) -> Tensor:
    """Weighted means (B, G, D) of hidden states, in float32."""
    B, T, _ = h_BTD.shape
    counts = [len(row.token_N) for row in rows]
    owner = np.repeat(np.arange(B), counts)
    group, token = (np.concatenate([getattr(row, key) for row in rows]) for key in ("group_N", "token_N"))
    weight = np.concatenate([row.weight_N for row in rows])
    step = max(1, POOL_ELEMENTS // (groups * T))
    means: list[Tensor] = []
    for first in range(0, B, step):
        a, b = np.searchsorted(owner, [first, first + step])
        size = min(step, B - first)
        where = ((owner[a:b] - first) * groups + group[a:b]) * T + token[a:b]
        matrix = torch.zeros(size * groups * T, device=h_BTD.device)
        # No (row, group, token) comes twice, so the order of writing does not matter.
        at, value = (send(torch.from_numpy(array), h_BTD.device) for array in (where, weight[a:b]))
        matrix[at] = value
        means.append(torch.bmm(matrix.view(size, groups, T), h_BTD[first : first + size].float()))
    return torch.cat(means)


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on the device, without waiting for what the device is doing."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def fingerprint(files: Sequence[Path], facts: Any) -> str:
    """sha256 over the bytes of weight files and over facts that JSON can spell."""
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True, ensure_ascii=False).encode())
    for file in files:
        with open(file, "rb") as opened:
            digest.update(hashlib.file_digest(opened, "sha256").digest())
    return digest.hexdigest()


def _settings(folder: Path) -> dict[str, Any]:
    """config.json without what only says where it came from."""
    values: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return {key: value for key, value in values.items() if key not in IRRELEVANT}


def _context(model: nn.Module, settings: Any) -> int:
    """Most tokens the network can read: the size of its table of positions, less the places padding takes in it."""
    limit = getattr(settings, "max_position_embeddings", None) or UNLIMITED
    table = getattr(getattr(model, "embeddings", None), "position_embeddings", None)
    padding = getattr(table, "padding_idx", None)  # RoBERTa and MPNet number positions from after it
    return int(limit) - (padding + 1 if padding is not None else 0)


def _no_weights(name: str, folder: Path) -> DataError:
    if any(folder.glob("*.bin")):
        return DataError(
            f"encoder {name!r} has only pickled weights (*.bin) in {folder}, which are not loaded; save it again as "
            "safetensors (save_pretrained of a recent transformers does)"
        )
    return DataError(f"encoder {name!r} has no model.safetensors in {folder}; restore it or give another folder")


@contextlib.contextmanager
def quiet() -> Generator[None]:
    """Without the bar and the table `transformers` prints about a pooler nobody asked for."""
    from transformers.utils import logging as theirs

    verbosity, bar = theirs.get_verbosity(), theirs.is_progress_bar_enabled()
    theirs.set_verbosity_error()
    theirs.disable_progress_bar()
    try:
        yield
    finally:
        theirs.set_verbosity(verbosity)
        if bar:
            theirs.enable_progress_bar()


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__
