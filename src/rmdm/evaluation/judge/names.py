"""Who judges: the paper's two judges by name, or any model behind an address that speaks the OpenAI chat protocol."""

import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import urlsplit

from rmdm.errors import ConfigError, nearest

NO_KEY = "none"
"""`--key-env none`: ask without a key, as local servers allow."""
OPTIONS: dict[str, Any] = {"temperature": 0, "max_tokens": 1024}
"""What every request says beside model and message, unless told otherwise."""


@dataclass(frozen=True)
class Judge:
    """A model to ask, and how."""

    name: str
    model: str
    url: str
    """Base URL; requests go to URL/chat/completions."""
    key_env: str | None
    """Environment variable with the key; None asks without one."""
    options: dict[str, Any] = field(default_factory=lambda: dict(OPTIONS))
    """Other fields of the request."""
    price: tuple[float, float] | None = None
    """Price of a million tokens, in and out."""

    def key(self) -> str | None:
        """The key, which no message may show."""
        if self.key_env is None:
            return None
        key = os.environ.get(self.key_env, "").strip()
        if not key:
            raise ConfigError(
                f"judge {self.name} needs a key, and {self.key_env} is not set in the environment; "
                f"set it, name another variable with --key-env, or use --key-env {NO_KEY} for a server without keys"
            )
        if not (key.isascii() and key.isprintable()) or " " in key:
            raise ConfigError(f"{self.key_env} holds no key (spaces or odd characters in it); set it to the key alone")
        return key

    def identity(self) -> dict[str, Any]:
        """What its answers depend on, besides prompt and text."""
        return {"model": self.model, "url": self.url, "options": self.options}


PRESETS = {
    judge.name: judge
    for judge in (
        Judge(
            "deepseek-v4-flash",
            "deepseek-v4-flash",
            "https://api.deepseek.com",
            "DEEPSEEK_API_KEY",
            OPTIONS | {"thinking": {"type": "disabled"}},
        ),
        Judge(
            "gemini-3.1-flash-lite",
            "gemini-3.1-flash-lite",
            "https://generativelanguage.googleapis.com/v1beta/openai",
            "GEMINI_API_KEY",
        ),
    )
}
"""The judges of the paper's Appendix D, the primary one first."""
PRIMARY = "deepseek-v4-flash"


def choose_judges(
    words: Sequence[str],
    *,
    base_url: str | None = None,
    key_envs: Sequence[str] = (),
    options: Sequence[str] = (),
    prices: Sequence[str] = (),
) -> list[Judge]:
    """Judges from the command line's words; `[MODEL=]VALUE` says something of one judge, or of all."""
    judges = [find_judge(word, base_url) for word in words or (PRIMARY,)]
    places = [(judge.model, judge.url) for judge in judges]
    if len(set(places)) < len(places):
        raise ConfigError(f"--judge {' '.join(words)} names a judge twice; give each once")
    models = [judge.model for judge in judges]
    judges = [replace(j, name=f"{j.model}@{j.url}") if models.count(j.model) > 1 else j for j in judges]
    for model, name in told("--key-env", key_envs, models):
        judges = _changed(judges, model, key_env=None if name == NO_KEY else name)
    for model, text in told("--options", options, models):
        given = read_options(text)
        judges = [
            replace(j, options={k: v for k, v in (j.options | given).items() if v is not None})
            if model in (None, j.model)
            else j
            for j in judges
        ]
    for model, text in told("--price", prices, models):
        judges = _changed(judges, model, price=read_price(text))
    return judges


def find_judge(word: str, base_url: str | None = None) -> Judge:
    """The judge that a preset's name or `MODEL@BASE_URL` means."""
    split = re.fullmatch(r"(?P<model>.+?)@(?P<url>\w+://.*)", word)
    model, url = (split["model"], split["url"]) if split else (word, base_url)
    known = PRESETS.get(model)
    if url is not None:
        url = check_url(url)
        return replace(known, url=url) if known and not split else Judge(model, model, url, "OPENAI_API_KEY")
    if known is None:
        raise ConfigError(f"judge {word!r} is no preset ({nearest(word, PRESETS)}); give one, or MODEL@BASE_URL")
    return known


def check_url(url: str) -> str:
    """A base URL without the slash at its end."""
    try:
        parts = urlsplit(url)
        host = (parts.hostname or "").encode("idna")  # as the name's look-up will
        usable = parts.scheme in ("http", "https") and bool(host) and (parts.port or 1) > 0
    except ValueError:
        usable = False
    if not usable or not url.isprintable() or not url.isascii() or " " in url:
        raise ConfigError(f"{url!r} is no base URL; use http://localhost:8000/v1, for example")
    return url.rstrip("/").removesuffix("/chat/completions")


def told(flag: str, words: Sequence[str], models: Sequence[str]) -> list[tuple[str | None, str]]:
    """(model or None for all, value) of each `[MODEL=]VALUE`; what is said of one model comes last and wins."""
    found: list[tuple[str | None, str]] = []
    for word in words:
        model, mark, value = word.partition("=")
        if not mark or word.startswith("{"):
            found.insert(0, (None, word))
        elif model in models:
            found.append((model, value))
        else:
            raise ConfigError(f"{flag} {word}: {model!r} is no judge here; {nearest(model, models)}")
    return found


def read_options(text: str) -> dict[str, Any]:
    """Fields of a request from JSON."""
    try:
        options = json.loads(text)
    except ValueError:
        options = None
    if not isinstance(options, dict):
        raise ConfigError(f"--options {text} is no JSON object; use '{{\"temperature\": 0}}', for example")
    for name in ("model", "messages", "stream", "n"):
        if name in options:
            raise ConfigError(f"--options sets {name!r}, which this program sets itself; leave it out")
    return options


def read_price(text: str) -> tuple[float, float]:
    """`IN,OUT`, or one price for both."""
    try:
        prices = [float(word) for word in text.split(",")]
    except ValueError:
        prices = []
    if len(prices) not in (1, 2) or not all(0 <= price < float("inf") for price in prices):
        raise ConfigError(f"--price {text} is no price of a million tokens; use 0.14,0.28 for in and out, for example")
    return prices[0], prices[-1]


def _changed(judges: list[Judge], model: str | None, **changes: Any) -> list[Judge]:
    return [replace(judge, **changes) if model in (None, judge.model) else judge for judge in judges]
