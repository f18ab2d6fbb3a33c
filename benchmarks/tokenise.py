"""How fast `prepare` is, against a bare `encode_batch` loop over the same text with the same tokenizer.

    python benchmarks/tokenise.py /work/shared/data/train/wiki-00.jsonl.xz

Both run in this one process, turn by turn: the loop has the texts in memory and uses every core (the library's own
threads); `prepare` reads, decompresses and parses the file, tokenises it in worker processes and writes shards.
"""

import argparse
import json
import os
import resource
import statistics
import tempfile
import threading
import time
from pathlib import Path

import tokenizers

from rmdm.config import DataConfig, TokenizerConfig
from rmdm.data.prepare import prepare
from rmdm.data.sources import open_source
from rmdm.data.tokenizer import build_tokenizer


def bare_loop(tokenizer: tokenizers.Tokenizer, texts: list[str], batch: int) -> tuple[float, int]:
    """Seconds and tokens of the plainest use of the library."""
    start, count = time.perf_counter(), 0
    for i in range(0, len(texts), batch):
        count += sum(len(encoding) for encoding in tokenizer.encode_batch(texts[i : i + batch]))
    return time.perf_counter() - start, count


class PeakMemory:
    """The most memory this process and its children held together, by sampling /proc; a second figure counts pages
    that several of them share once."""

    def __enter__(self) -> "PeakMemory":
        self.rss = self.pss = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(0.5):
            totals = {"Rss": 0, "Pss": 0}
            for pid in [os.getpid(), *self._children()]:
                try:
                    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
                        key, _, value = line.partition(":")
                        if key in totals:
                            totals[key] += int(value.split()[0]) * 1024
                except OSError:
                    continue
            self.rss, self.pss = max(self.rss, totals["Rss"]), max(self.pss, totals["Pss"])

    @staticmethod
    def _children() -> list[int]:
        found: list[int] = []
        for task in Path("/proc/self/task").iterdir():
            try:
                found += map(int, (task / "children").read_text().split())
            except OSError:
                continue
        return found


def main() -> None:
    """Time both, print a table and one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path")
    parser.add_argument("--vocab-size", type=int, default=16384)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batch", type=int, default=1000, help="documents a call of the bare loop")
    parser.add_argument("--memory-only", action="store_true", help="only run prepare, once, and report peak memory")
    options = parser.parse_args()

    tokenizer_config = TokenizerConfig(vocab_size=options.vocab_size, train_bytes=50_000_000)
    source = open_source(DataConfig(path=options.path), "train")
    assert source is not None
    with tempfile.TemporaryDirectory() as scratch:
        build_tokenizer(tokenizer_config, source).save(Path(scratch, "tokenizer"))
        pretrained = TokenizerConfig(kind="pretrained", name=f"{scratch}/tokenizer", separator="<eos>")
        loop_seconds, prepare_seconds, report = [], [], {"path": options.path, "cores": len(os.sched_getaffinity(0))}
        texts: list[str] = []
        if not options.memory_only:
            texts = [text for part in source.parts for block in part.blocks() for text in block.documents()]
        bare = tokenizers.Tokenizer.from_file(f"{scratch}/tokenizer/tokenizer.json")
        for turn in range(1 if options.memory_only else options.rounds):
            if texts:
                seconds, count = bare_loop(bare, texts, options.batch)
                loop_seconds.append(seconds)
                report["tokens"] = count
            start = time.perf_counter()
            config = DataConfig(path=options.path, holdout=1, tokenizer=pretrained, dir=f"{scratch}/shards-{turn}")
            with PeakMemory() as memory:
                prepared = prepare(config, progress=False)
            prepare_seconds.append(time.perf_counter() - start)
            # Each document has a separator besides its own tokens.
            stored = sum(part.tokens - part.documents for part in prepared.manifest.parts)
            assert not texts or stored == report["tokens"], "both ways must give the same tokens"
    text_bytes = sum(len(text.encode()) for text in texts)
    report |= {"prepare_seconds": prepare_seconds, "peak_rss": memory.rss, "peak_pss": memory.pss}
    report["peak_rss_main"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    if texts:
        report |= {"bytes": text_bytes, "loop_seconds": loop_seconds}
        report["ratio"] = statistics.median(loop_seconds) / statistics.median(prepare_seconds)
        print(f"{'':22}{'seconds (median)':>18}{'MB/s':>8}{'tokens/s':>12}")
        for name, seconds in (("encode_batch loop", loop_seconds), ("prepare", prepare_seconds)):
            median = statistics.median(seconds)
            print(f"{name:22}{median:18.2f}{text_bytes / median / 1e6:8.2f}{report['tokens'] / median:12,.0f}")
        print(f"throughput of prepare over the loop: {report['ratio']:.2f}")
    print(f"peak memory, all processes: {memory.rss / 1e6:,.0f} MB RSS, {memory.pss / 1e6:,.0f} MB PSS")
    print(json.dumps(report))


if __name__ == "__main__":
    main()
