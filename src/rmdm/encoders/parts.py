"""The work of an embedding cache: which rows are left, the pass that fits the PCA, and the pass that stores.

Shapes: n rows, G groups, D channels of the encoder, K dimensions kept.
"""

import contextlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file
from torch import Tensor

from rmdm.config import Config
from rmdm.data.progress import RowProgress
from rmdm.data.shards import Manifest, TokenRows, read_json, write_json
from rmdm.data.writer import await_file, writing
from rmdm.encoders.cache import (
    DTYPES,
    PART_ROWS,
    ArrayManifest,
    ArraySpec,
    Facts,
    RowsWriter,
    fingerprint,
    fit_indices,
    refuse_differences,
)
from rmdm.encoders.encoder import Encoder
from rmdm.encoders.offsets import check_groups
from rmdm.encoders.online import SPLITS, RowEncoder, fill_empty
from rmdm.encoders.whitening import Moments, Whitening, check_count, check_dim, save_atomically
from rmdm.errors import ConfigError, DataError

KEEP_BYTES = 8 << 30
"""Raw embeddings of the fit rows are kept until the end if they take no more than this; else they are made twice."""
SCALE_VECTORS = 16_384
"""For int8: vectors of each fit part that the steps are fitted on."""


class CacheParts:
    """The work one cache takes: two passes over the rows, cut in parts, each part done by one rank."""

    def __init__(self, config: Config, shards: Path, encoder: Encoder, facts: Facts, folder: Path) -> None:
        self.config, self.encoder, self.what = config, encoder, f"the embeddings of {encoder.name}"
        self.facts, self.folder, self.fit_folder = facts, folder, folder / "fit"
        manifest, latent = Manifest.load(shards), config.latent
        check_groups(latent.groups, manifest.length)
        check_dim(latent.dim, encoder.dim, self.what)
        if latent.fit_rows < 1:
            raise ConfigError(f"latent.fit_rows={latent.fit_rows} is below 1; use 65536, for example")
        self.rows: dict[str, int] = {split: manifest.splits[split].rows for split in SPLITS}
        self.fit_rows = fit_indices(self.rows["train"], latent.fit_rows)
        check_count(latent.dim, len(self.fit_rows) * latent.groups, self.what)
        self.encoders: dict[str, RowEncoder] = {
            split: RowEncoder(config, TokenRows.open(shards, split), encoder) for split in SPLITS if self.rows[split]
        }
        self.raw_shape = (latent.groups, encoder.dim)
        self.keeps_raw = len(self.fit_rows) * self._raw_bytes <= KEEP_BYTES

    @property
    def _raw_bytes(self) -> int:
        return 4 * self.raw_shape[0] * self.raw_shape[1]

    def spec(self, scale: list[float] | None = None) -> ArraySpec:
        """The array to write."""
        latent, rows = self.config.latent, dict(self.rows)
        if latent.store == "z0":
            rows["train"] = len(self.fit_rows)
        return ArraySpec(kind="e", rows=rows, groups=latent.groups, dim=latent.dim, dtype=latent.dtype, scale=scale)

    def writers(self, scale: list[float] | None = None) -> list[RowsWriter]:
        """One for each split that has rows."""
        return [RowsWriter(self.folder, split, self.spec(scale)) for split in self.encoders]

    def finished(self) -> ArrayManifest:
        """The finished cache's manifest, once all its facts and files are found to be right."""
        manifest = ArrayManifest.load(self.folder)
        refuse_differences(self.folder, manifest.facts, self.facts)
        manifest.check_files(self.folder)
        Whitening.load(self.folder / "whitening.safetensors")
        return manifest

    def begin(self, show: Callable[[str], None]) -> None:
        """Say how much room it takes, refuse what cannot fit, and lay down the files."""
        with contextlib.suppress(FileNotFoundError):
            refuse_differences(self.folder, read_json(self.folder / "plan.json"), self.facts)
        spec = self.spec()
        size = sum(map(spec.nbytes, self.encoders))
        raw = len(self.fit_rows) * self._raw_bytes if self.keeps_raw else 0
        beside = f" (and {human_bytes(raw)} for as long as it works)" if raw else ""
        show(
            f"encode: {sum(spec.rows.values()):,} rows of {spec.groups} x {spec.dim} as {spec.dtype}: "
            f"{human_bytes(size)} in {self.folder}{beside}"
        )
        needed = size + raw - _taken(self.folder)
        free = shutil.disk_usage(self.folder).free
        if needed > free:
            raise DataError(
                f"{self.folder} needs {human_bytes(needed)} more, the disk has {human_bytes(free)} free; "
                "make room, use latent.dtype int8, a smaller latent.dim or latent.store z0, or set another data.dir"
            )
        with writing(self.folder, "latents"):
            self.fit_folder.mkdir(parents=True, exist_ok=True)
            for left in [*self.folder.glob("*.tmp"), *self.fit_folder.glob("*.tmp")]:
                left.unlink()  # what a killed run was about to put in its place
            write_json(self.folder / "plan.json", self.facts)
        for writer in self.writers():
            writer.create(fingerprint(self.facts))

    def left(self, rank: int, world: int) -> int:
        """Rows this rank has yet to take through the encoder."""
        fit = sum(len(self._fit_part(part)) for part in self._fit_todo(rank, world))
        return fit + sum(len(self._new(w, part)) for w in self.writers() for part in w.todo(rank, world))

    def encode_fit_rows(self, rank: int, world: int, bar: RowProgress) -> None:
        """Encode this rank's share of the rows the PCA is fitted on; keep their moments and, if small, themselves."""
        todo = self._fit_todo(rank, world)
        moments, sample, seen = Moments.zero(self.encoder.dim), list[Tensor](), 0
        raw: NDArray[np.float32] | None = None
        for job, batch, e_BGD in self.encoders["train"].stream(map(self._fit_part, todo)):
            n = len(self._fit_part(todo[job]))
            if seen == 0 and self.keeps_raw:
                raw = np.empty((n, *self.raw_shape), dtype=np.float32)
            e_ND = e_BGD[torch.from_numpy(batch.present_BG).to(e_BGD.device)]
            moments.add(e_ND)
            if self.config.latent.dtype == "int8":
                sample.append(e_ND[:: max(1, n * self.raw_shape[0] // SCALE_VECTORS)].float().cpu())
            if raw is not None:
                raw[batch.places_B] = np.where(batch.present_BG[..., None], e_BGD.float().cpu().numpy(), np.nan)
            seen += len(batch.places_B)
            bar.move(len(batch.places_B))
            if seen == n:
                self._save_fit_part(todo[job], raw, moments, sample)
                moments, sample, seen = Moments.zero(self.encoder.dim), [], 0

    def _save_fit_part(
        self, part: int, raw: NDArray[np.float32] | None, moments: Moments, sample: list[Tensor]
    ) -> None:
        path = self._fit_file(part)
        tensors = moments.tensors()
        if sample:
            tensors["sample_ND"] = torch.cat(sample)
        with writing(self.folder, "latents"):
            if raw is not None:
                temporary = path.with_suffix(f".raw.{os.getpid()}.tmp")
                with open(temporary, "wb") as file:
                    file.write(raw.data)
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(temporary, path.with_suffix(".raw"))
            save_atomically(tensors, path)

    def fit(self) -> None:
        """Merge the moments in the order of the parts and write the whitening, unless it is there."""
        path = self.folder / "whitening.safetensors"
        if path.exists():
            return
        moments, sample = Moments.zero(self.encoder.dim), list[Tensor]()
        for part in range(-(-len(self.fit_rows) // PART_ROWS)):
            await_file(self._fit_file(part))
            tensors = load_file(self._fit_file(part))
            moments.merge(Moments.of_tensors(tensors))
            sample += [tensors["sample_ND"]] if "sample_ND" in tensors else []
        whitening = Whitening.fit(moments, self.config.latent.dim, self.what)
        if sample:
            whitening = whitening.with_scale(torch.cat(sample))
        with writing(self.folder, "latents"):
            whitening.save(path)

    def encode_rest(self, rank: int, world: int, bar: RowProgress) -> None:
        """Whiten and store this rank's parts of both splits; rows that are not kept are encoded on the way."""
        await_file(self.folder / "whitening.safetensors")
        whitening = Whitening.load(self.folder / "whitening.safetensors")
        on_device = whitening.to(self.encoder.device)
        for writer in self.writers(_scale(whitening)):
            split, todo = writer.split, list[int]()
            for part in writer.todo(rank, world):
                if len(self._new(writer, part)):
                    todo.append(part)
                else:
                    writer.write(part, *self._open_part(writer, part, whitening))
            stored, clipped, seen, new = np.empty(0), 0, 0, np.empty(0, dtype=np.int64)
            jobs = (self._numbers(writer, part)[self._new(writer, part)] for part in todo)
            for job, batch, z_BGK in self.encoders[split].stream(jobs, on_device.apply):
                if seen == 0:
                    new = self._new(writer, todo[job])
                    stored, clipped = self._open_part(writer, todo[job], whitening)
                places, z = new[batch.places_B], z_BGK.float().cpu().numpy()
                fill_empty(z, batch.present_BG, self._numbers(writer, todo[job])[places], split)
                stored[places], more = writer.spec.pack(z)
                clipped, seen = clipped + more, seen + len(z)
                bar.move(len(z))
                if seen == len(new):
                    writer.write(todo[job], stored, clipped)
                    seen = 0

    def _new(self, writer: RowsWriter, part: int) -> NDArray[np.int64]:
        """Places in a part of the rows the first pass does not keep."""
        return np.flatnonzero(~self._is_kept(writer.split, self._numbers(writer, part)))

    def _open_part(self, writer: RowsWriter, part: int, whitening: Whitening) -> tuple[NDArray[Any], int]:
        """A part with the rows that are kept from the first pass in their places, and how many numbers were clipped."""
        numbers, spec = self._numbers(writer, part), writer.spec
        stored, clipped = np.zeros((len(numbers), spec.groups, spec.dim), dtype=DTYPES[spec.dtype]), 0
        places = np.flatnonzero(self._is_kept(writer.split, numbers))
        at = np.searchsorted(self.fit_rows, numbers[places])
        for fit_part in np.unique(at // PART_ROWS).tolist():
            here = at // PART_ROWS == fit_part
            path = self._fit_file(fit_part).with_suffix(".raw")
            await_file(path)
            raw = np.memmap(path, dtype=np.float32, mode="r")
            e_nGD = np.asarray(raw.reshape(-1, *self.raw_shape)[at[here] % PART_ROWS])
            z = whitening.apply(torch.from_numpy(np.nan_to_num(e_nGD))).numpy()
            fill_empty(z, ~np.isnan(e_nGD[..., 0]), numbers[places[here]], writer.split)
            stored[places[here]], more = spec.pack(z)
            clipped += more
        return stored, clipped

    def finish(self) -> None:
        """Write the manifest once every part is there, and drop what only the work needed."""
        whitening = Whitening.load(self.folder / "whitening.safetensors")
        writers = self.writers(_scale(whitening))
        numbers = sum(w.spec.rows[w.split] for w in writers) * writers[0].spec.groups * writers[0].spec.dim
        figures = {
            "variance kept": whitening.kept,
            "clipped share": sum(writer.clipped() for writer in writers) / numbers,
        }
        spec = self.spec(_scale(whitening))
        with writing(self.folder, "latents"):
            ArrayManifest(
                fingerprint=fingerprint(self.facts), facts=self.facts, spec=spec, split_rows=self.rows, figures=figures
            ).save(self.folder)
        self.clear()

    def clear(self) -> None:
        """Drop what only the work needed."""
        for writer in self.writers():
            writer.clear()
        shutil.rmtree(self.fit_folder, ignore_errors=True)
        (self.folder / "plan.json").unlink(missing_ok=True)

    def _numbers(self, writer: RowsWriter, part: int) -> NDArray[np.int64]:
        """Row numbers, in the token shards, of a part."""
        first, after = writer.span(part)
        whole = writer.spec.rows[writer.split] == self.rows[writer.split]
        return np.arange(first, after) if whole else self.fit_rows[first:after]

    def _is_kept(self, split: str, numbers: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which of these rows the first pass keeps."""
        if split != "train" or not self.keeps_raw:
            return np.zeros(len(numbers), dtype=np.bool_)
        at = np.searchsorted(self.fit_rows, numbers).clip(max=len(self.fit_rows) - 1)
        return self.fit_rows[at] == numbers

    def _fit_part(self, part: int) -> NDArray[np.int64]:
        return self.fit_rows[part * PART_ROWS : (part + 1) * PART_ROWS]

    def _fit_file(self, part: int) -> Path:
        return self.fit_folder / f"{part:06d}.safetensors"

    def _fit_todo(self, rank: int, world: int) -> list[int]:
        def finished(part: int) -> bool:
            raw, size = self._fit_file(part).with_suffix(".raw"), len(self._fit_part(part)) * self._raw_bytes
            return self._fit_file(part).exists() and (
                not self.keeps_raw or (raw.exists() and raw.stat().st_size == size)
            )

        return [p for p in range(rank, -(-len(self.fit_rows) // PART_ROWS), world) if not finished(p)]


def _scale(whitening: Whitening) -> list[float] | None:
    return None if whitening.scale_K is None else whitening.scale_K.tolist()


def _taken(folder: Path) -> int:
    """Bytes the folder's files hold on the disk already."""
    return sum(512 * path.stat().st_blocks for path in folder.rglob("*") if path.is_file())


def human_bytes(size: float) -> str:
    """1234567 as 1.18 MiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if size >= 100 else f"{size:.3g} {unit}"
        size /= 1024
    return f"{size:,.3g} TiB"
