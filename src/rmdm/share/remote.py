"""Models on the Hugging Face hub: fetched into its cache, and pushed. What goes wrong is told in one line."""

import difflib
import os
import socket
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import rmdm
from rmdm.data.network import hub_is_unreachable
from rmdm.errors import CheckpointError, ConfigError, RMDMError
from rmdm.share.manifest import MANIFEST, META, PARTS, verify

PROXIES = ("HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy")
CONNECT_SECONDS = 5.0
"""How long the hub is waited for: its own library would wait without end."""
GO_ONLINE = "try again with a network, or give a folder"
LOG_IN = "log in with 'hf auth login', or set HF_TOKEN"
PAST = {"load": "fetched", "push": "pushed"}
NETWORK_ERRORS = {
    "ConnectError", "TimeoutException", "NetworkError", "RemoteProtocolError", "ProxyError", "OfflineModeIsEnabled",
    "ConnectionError", "Timeout",
}  # fmt: skip
"""What versions of the hub's library raise for a network that fails."""
OTHERS_FILES = {".gitattributes", "README.md"}
"""What a repo may hold and still be free to be filled."""


@dataclass(frozen=True)
class Pushed:
    """Where a model lies on the hub."""

    url: str
    commit: str


def fetch(name: str, revision: str | None = None) -> Path:
    """The folder of a model of the hub in the Hugging Face cache, as new as the hub has it, and verified.

    Without a network, and while the hub is out of order, what the cache has is taken.
    """
    folder = snapshot(name, revision)
    try:
        check_is_model(folder, name)
        verify(folder)
    except CheckpointError:
        if is_offline():
            raise
        # A file that was cut or changed in the cache would be found there again and again.
        folder = snapshot(name, revision, anew=True)
        check_is_model(folder, name)
        verify(folder, f"so it is on the hub too, tell the owner of {name}")
    return folder


def check_is_model(folder: Path, name: str) -> None:
    """Refuse a repo of something else."""
    if not any((folder / file).is_file() for file in (META, MANIFEST)):
        raise CheckpointError(f"{name} on the hub is no model of rmdm: it has no {META}; check the name")


def snapshot(name: str, revision: str | None, *, anew: bool = False) -> Path:
    """The parts of a model in the cache: no code, nothing pickled."""
    from huggingface_hub import HfApi, snapshot_download

    options: dict[str, Any] = {"allow_patterns": [*PARTS, MANIFEST], "endpoint": endpoint()}
    offline = is_offline()
    with told(name, "load", revision, offline=offline):
        if offline:
            return Path(snapshot_download(name, revision=revision, local_files_only=True, **options))
        try:
            found = HfApi(endpoint=endpoint()).model_info(name, revision=revision, timeout=30).sha
        except Exception as error:
            if is_of_network(error) or status_of(error) >= 500:
                with suppress(Exception):
                    return Path(snapshot_download(name, revision=revision, local_files_only=True, **options))
            raise
        if not anew:
            # What is all there needs no progress bar.
            with suppress(OSError):
                return Path(snapshot_download(name, revision=found, local_files_only=True, **options))
        return Path(snapshot_download(name, revision=revision, force_download=anew, **options))


def check_can_push(name: str) -> None:
    """Refuse what is bound to fail, before anything is written for it."""
    from huggingface_hub import get_token

    if get_token() is None:
        raise ConfigError(f"no Hugging Face token is set, and {name} cannot be written without; {LOG_IN}")
    reason = reason_offline()
    if reason is not None:
        raise ConfigError(f"{name} cannot be pushed: the hub cannot be reached ({reason}); {GO_ONLINE}")


def push(folder: Path, name: str, message: str, *, private: bool = False, revision: str | None = None) -> Pushed:
    """Put a released folder on the hub in one commit, which also removes parts that only an earlier release had.

    In one commit, so that nobody finds the files of two releases mixed.
    """
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi

    check_can_push(name)
    api = HfApi(endpoint=endpoint(), library_name="rmdm", library_version=rmdm.__version__)
    with told(name, "push", revision):
        api.create_repo(name, private=private or None, exist_ok=True)
        if revision is not None:
            api.create_branch(name, branch=revision, exist_ok=True)
        there = set(api.list_repo_files(name, revision=revision))
        if there - OTHERS_FILES and META not in there:
            example = min(there - OTHERS_FILES)
            raise ConfigError(f"{name} is taken: it holds {example}, and no model of rmdm; choose another name")
        here = [part for part in (*PARTS, MANIFEST) if (folder / part).is_file()]
        done = api.create_commit(
            name,
            [
                *(CommitOperationAdd(part, folder / part) for part in here),
                *(CommitOperationDelete(part) for part in PARTS if part in there and part not in here),
            ],
            commit_message=message,
            revision=revision,
        )
    return Pushed(url_of(name), done.oid)


def endpoint() -> str | None:
    """Where the hub is: $HF_ENDPOINT, or the library's own."""
    return (os.environ.get("HF_ENDPOINT") or "").rstrip("/") or None


def is_offline() -> bool:
    """Whether the hub surely cannot be reached, found out within seconds."""
    return reason_offline() is not None


def reason_offline() -> str | None:
    """Why the hub cannot be reached; None where it can, as far as is known."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    if hub_is_unreachable():
        return "no network"
    if any(os.environ.get(proxy) for proxy in PROXIES):
        return None
    place = urlsplit(endpoint() or "https://huggingface.co")
    try:
        port = place.port or (80 if place.scheme == "http" else 443)
        socket.create_connection((place.hostname or "", port), CONNECT_SECONDS).close()
    except (OSError, ValueError):
        return f"{place.netloc} does not answer"
    return None


@contextmanager
def told(name: str, doing: str, revision: str | None = None, *, offline: bool = False) -> Generator[None]:
    """Whatever the hub's library raises, as one line."""
    try:
        yield
    except RMDMError:
        raise
    except Exception as error:  # network, hub, disk, names: the library has a class for each, others in each version
        raise explain(error, name, doing, revision, offline=offline) from None


def explain(error: Exception, name: str, doing: str, revision: str | None, *, offline: bool = False) -> RMDMError:
    """What went wrong, and what to do about it."""
    from huggingface_hub.errors import GatedRepoError, HFValidationError, LocalEntryNotFoundError, RevisionNotFoundError

    owner, status = name.split("/")[0], status_of(error)
    if isinstance(error, HFValidationError):
        return ConfigError(f"{name!r} is no name on the hub ({first_line(error)}); use owner/name")
    if offline or (isinstance(error, LocalEntryNotFoundError) and not status):
        why = reason_offline() or "no network"
        at = f" at revision {revision}" if revision else ""
        return CheckpointError(
            f"{name} is neither a folder here nor in the Hugging Face cache{at}, and the hub cannot be asked ({why}); "
            f"{like_here(name) or 'check the path, or try again with a network'}"
        )
    if isinstance(error, RevisionNotFoundError):
        return CheckpointError(f"{name} has no revision {revision!r}; use a branch, tag or commit of it, such as main")
    if isinstance(error, GatedRepoError):
        return CheckpointError(f"{name} is only for those its owner lets in; ask at {url_of(name)}, then {LOG_IN}")
    if doing == "load" and status in (401, 404):
        return CheckpointError(
            f"{name} is neither a folder here nor a model on the hub that you may see ({status}); "
            f"{like_here(name) or f'check the name, or {LOG_IN} if it is private'}"
        )
    if status == 401:
        return ConfigError(f"the hub does not know your token (401), so {name} cannot be written; {LOG_IN}")
    if status == 403:
        may = "write to" if doing == "push" else "read"
        return ConfigError(
            f"your token may not {may} {name} (403); use one that {owner} lets {may.split()[0]}, or another name"
        )
    if status == 404:
        return ConfigError(
            f"{name} is not on the hub, or your token may not see it (404); check the name and the token"
        )
    if status == 400 or "Invalid metadata" in str(error):
        return ConfigError(f"the hub refused {name} ({first_line(error)}); check the name, and README.md's first lines")
    if status == 429:
        return ConfigError("the hub takes no more requests from you for now (429); try again in some minutes")
    if status >= 500:
        return ConfigError(f"the hub is out of order ({status}), so {name} could not be {PAST[doing]}; try again later")
    if is_of_network(error):
        return ConfigError(f"the connection to the hub failed ({first_line(error)}); run the same command again")
    if "Consistency check failed" in str(error):
        return CheckpointError(f"a file of {name} came in part ({first_line(error)}); run the same command again")
    if isinstance(error, OSError) and error.strerror:
        return CheckpointError(
            f"{name} could not be {PAST[doing]}: {error.strerror} ({error.filename}); make room there"
        )
    return CheckpointError(f"{name} could not be {PAST[doing]} ({first_line(error)}); check the name and the network")


def status_of(error: BaseException) -> int:
    """The HTTP status behind an error; 0 where there is none."""
    seen: BaseException | None = error
    while seen is not None:
        status = getattr(getattr(seen, "response", None), "status_code", None)
        if isinstance(status, int):
            return status
        seen = seen.__cause__ or seen.__context__
    return 0


def is_of_network(error: BaseException) -> bool:
    """Whether a request found nobody to answer it."""
    return bool(NETWORK_ERRORS & {kind.__name__ for kind in type(error).__mro__})


def first_line(error: BaseException) -> str:
    """What an error says first."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0].rstrip(".") if lines else type(error).__name__


def url_of(name: str) -> str:
    """The page of a model."""
    return f"{endpoint() or 'https://huggingface.co'}/{name}"


def like_here(name: str) -> str | None:
    """A folder here with almost that name: a slip of the pen is likelier than a model on the hub."""
    folder = Path(name).parent
    with suppress(OSError):
        names = [entry.name for entry in folder.iterdir() if entry.is_dir()]
        close = difflib.get_close_matches(Path(name).name, names, n=1, cutoff=0.5)
        if close:
            return f"did you mean {str(folder / close[0])!r}?"
    return None
