"""How fast text is tokenised: `rmdm prepare`, beside a bare `encode_batch` loop over the same text.

Both run in this one process, turn by turn: the loop has the texts in memory and uses every core (the library's own
threads); `prepare` reads, decompresses and parses the files, tokenises them in worker processes and writes shards.

A row: `arm`, `seconds` (median), `rounds`, `bytes` (of text) and `bytes_per_s`, `tokens` and `tokens_per_s`, `cores`,
and for `ours` `peak_rss` and `peak_pss`: the most memory of this process and its workers together, as `PeakMemory` has
it. No floor can be counted.
"""

import os
import tempfile
import threading
import time
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

import tokenizers

from rmdm.bench.machine import memory, spoken
from rmdm.config import DataConfig, TokenizerConfig
from rmdm.data.prepare import prepare
from rmdm.data.sources import Source, open_source
from rmdm.data.storyworld import storyworld
from rmdm.data.tokenizer import build_tokenizer
from rmdm.errors import DataError
from rmdm.evaluation.record import Rows
from rmdm.kinds import Show
from rmdm.tables import grid

TRAIN_BYTES = 50_000_000
"""Text that trains the tokenizer both arms use."""
LENGTH = 8
"""Tokens of a row, few enough for the one document that is held out; shards do not depend on it."""


class PeakMemory:
    """The most memory this process and its children held together, by sampling /proc; `pss` counts pages that several
    of them share once. 0 where there is no /proc."""

    def __init__(self, every: float = 0.5) -> None:
        self.rss = self.pss = 0
        self._every, self._stop = every, threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> "PeakMemory":
        self._look()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(self._every):
            self._look()

    def _look(self) -> None:
        totals = {"Rss": 0, "Pss": 0}
        for pid in [os.getpid(), *self._children()]:
            try:
                for line in Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="utf-8").splitlines():
                    key, _, value = line.partition(":")
                    if key in totals:
                        totals[key] += int(value.split()[0]) * 1024
            except OSError:  # a worker that has just ended
                continue
        self.rss, self.pss = max(self.rss, totals["Rss"]), max(self.pss, totals["Pss"])

    @staticmethod
    def _children() -> list[int]:
        found: list[int] = []
        try:
            for task in Path("/proc/self/task").iterdir():
                found += map(int, (task / "children").read_text(encoding="utf-8").split())
        except OSError:
            pass
        return found


def write_stories(path: Path, count: int) -> None:
    """A corpus of stories, one a line."""
    world = storyworld("mini")
    path.write_text("\n".join(world.story(0, index) for index in range(count)) + "\n", encoding="utf-8")


def bare_loop(tokenizer: tokenizers.Tokenizer, texts: list[str], batch: int) -> int:
    """Tokens of all texts, in the plainest use of the library."""
    return sum(
        len(encoding) for i in range(0, len(texts), batch) for encoding in tokenizer.encode_batch(texts[i : i + batch])
    )


def read_texts(source: Source) -> list[str]:
    """All documents."""
    return [text for part in source.parts for block in part.blocks() for text in block.documents()]


def bench_data(
    path: str, vocab_size: int, rounds: int, batch: int, memory_only: bool, show: Show, name: str | None = None
) -> Rows:
    """Both arms in turn, on what is called `name`; with `memory_only`, `prepare` alone, no text held beside it."""
    source = open_source(DataConfig(path=path), "train")
    assert source is not None
    seconds: dict[str, list[float]] = {"ours": [], "reference": []}
    peak, counted, stored, name = PeakMemory(), 0, 0, name or path
    with tempfile.TemporaryDirectory() as scratch:
        show(f"bench: train a tokenizer of {vocab_size:,} on {name}")
        trained = TokenizerConfig(vocab_size=vocab_size, train_bytes=TRAIN_BYTES)
        build_tokenizer(trained, source).save(Path(scratch, "tokenizer"))
        own = TokenizerConfig(kind="pretrained", name=f"{scratch}/tokenizer", separator="<eos>")
        bare = tokenizers.Tokenizer.from_file(f"{scratch}/tokenizer/tokenizer.json")
        texts = [] if memory_only else read_texts(source)
        for turn in range(rounds):
            if not memory_only:
                began = time.perf_counter()
                counted = bare_loop(bare, texts, batch)
                seconds["reference"].append(time.perf_counter() - began)
            config = DataConfig(path=path, holdout=1, length=LENGTH, tokenizer=own, dir=f"{scratch}/shards-{turn}")
            began = time.perf_counter()
            with PeakMemory() as watched:
                prepared = prepare(config, progress=False)
            seconds["ours"].append(time.perf_counter() - began)
            peak = max(peak, watched, key=lambda each: each.rss)
            # Each document has a separator besides its own tokens.
            stored = sum(part.tokens - part.documents for part in prepared.manifest.parts)
            if not memory_only and stored != counted:
                raise DataError(f"prepare made {stored} tokens of {name}, a bare loop {counted}; they must be the same")
    size = sum(len(text.encode()) for text in texts) if texts else None
    about: dict[str, Any] = {
        "path": name, "vocab_size": vocab_size, "rounds": rounds, "cores": len(os.sched_getaffinity(0)),
        "bytes": size, "tokens": stored, "date": datetime.now(UTC).date().isoformat(),
    }  # fmt: skip
    rows: Rows = []
    for arm, taken in seconds.items():
        if taken:
            middle = median(taken)
            rows.append(
                {"arm": arm, "seconds": middle, "bytes_per_s": size / middle if size else None,
                 "tokens_per_s": stored / middle, "peak_rss": peak.rss if arm == "ours" else None,
                 "peak_pss": peak.pss if arm == "ours" else None, **about}
            )  # fmt: skip
    return rows


def ratios(rows: Rows) -> Rows:
    """Throughput of `prepare` over that of the bare loop."""
    found = {row["arm"]: row["seconds"] for row in rows}
    return [{"throughput": found["reference"] / found["ours"]}] if len(found) == 2 else []


def render(rows: Rows, compared: Rows) -> str:
    """The table, and the comparison."""
    names = {"ours": "rmdm prepare", "reference": "bare encode_batch loop"}
    titles = ["", "seconds", "text", "tokens/s", "peak RSS", "peak PSS"]
    body = [
        [
            names[row["arm"]], f"{row['seconds']:.2f}", spoken(row["bytes_per_s"], "B/s"),
            f"{row['tokens_per_s']:,.0f}", memory(row["peak_rss"]), memory(row["peak_pss"]),
        ]
        for row in rows
    ]  # fmt: skip
    first = rows[0]
    title = f"{first['path']}: {first['tokens']:,} tokens, vocabulary {first['vocab_size']:,}, {first['cores']} cores"
    lines = [f"throughput of prepare over the bare loop: {each['throughput']:.2f}" for each in compared]
    return "\n".join([title, grid([("", each) for each in titles], body), *lines])
