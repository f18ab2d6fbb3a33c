"""An earlier run of this project as encoder: its trunk's hidden states on unmasked text, so nothing from outside is
needed."""

from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rmdm.config import ADAPTER
from rmdm.data.tokenizer import Tokenizer
from rmdm.encoders.encoder import Pieces
from rmdm.encoders.offsets import Frame, Reader
from rmdm.encoders.pretrained import check_channels, fingerprint, pad, pool_rows, send
from rmdm.hub import load_model


class OwnEncoder:
    """A trained backbone, read without special tokens.

    The trunk knows no attention mask, so a row must not depend on the rows it shares a batch with: runs trained on
    padded rows get rows padded to full length as in training, causal ones may have anything to the right, and all
    others take rows of equal length together.
    """

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
        model = load_model(folder, device)
        self.name, self.device, self._precision = name, device, precision
        self.precision = "bf16" if precision == torch.bfloat16 else "fp32"
        self._backbone = model.backbone.requires_grad_(False)
        self._pads, self._pad_id = model.config.data.layout == "padded", model.tokenizer.pad_id
        self.dim = check_channels(name, channels, model.config.model.width)
        self.context = self._backbone.length
        self._reader = Reader(name, model.tokenizer.backend, Frame(), self.context, tokenizer, length)
        facts = [
            "DiT", self._backbone.causal, self._pads, self._backbone.length, channels, model.tokenizer.fingerprint,
            ADAPTER.dump_python(model.config, mode="json")["model"],
        ]  # fmt: skip
        self.fingerprint = fingerprint([folder / "model.safetensors"], facts)

    def pieces(self, x_BL: NDArray[np.int64], lengths_B: NDArray[np.int64], groups: int) -> list[Pieces]:
        """See `Encoder.pieces`."""
        return self._reader.pieces(x_BL, lengths_B, groups)

    @torch.no_grad()
    def embed(self, rows: list[Pieces], groups: int) -> Tensor:
        """See `Encoder.embed`."""
        e_BGD = torch.zeros(len(rows), groups, self.dim, device=self.device)
        lengths = [len(row.ids_T) if len(row.token_N) else 0 for row in rows]
        for length, members in self._batches(lengths):
            kept = [rows[b] for b in members]
            ids_BT, _ = pad(kept, length, self._pad_id)
            with torch.autocast(self.device.type, self._precision, enabled=self._precision != torch.float32):
                h_BTD = self._backbone(send(ids_BT, self.device))
            e_BGD[send(torch.tensor(members), self.device)] = pool_rows(kept, h_BTD[..., : self.dim], groups)
        return e_BGD

    def _batches(self, lengths: list[int]) -> list[tuple[int, list[int]]]:
        """(padded length, rows) of the forward passes; rows without text need none."""
        used = [b for b, length in enumerate(lengths) if length]
        if not used:
            return []
        if self._pads:
            return [(self.context, used)]
        if self._backbone.causal:
            return [(max(lengths), used)]
        return [(n, [b for b in used if lengths[b] == n]) for n in sorted({lengths[b] for b in used})]
