"""`rmdm bench data`: how fast text is tokenised."""

import argparse
import tempfile
from pathlib import Path

from rmdm.arguments import at_least_one
from rmdm.errors import ConfigError, nearest
from rmdm.kinds import Outcome, Show

HELP = "text and tokens a second of tokenising, against a bare loop over the same text"
STORIES = {"tiny": 500, "stories": 200_000}
"""Stories of the corpora that need no file."""


def flags(parser: argparse.ArgumentParser) -> None:
    """Flags of `rmdm bench data`."""
    parser.add_argument("path", nargs="?", help="a file, a folder or a glob of text, as data.path takes it")
    parser.add_argument(
        "--size", help="built-in stories instead: " + ", ".join(f"{k} ({n:,})" for k, n in STORIES.items())
    )
    parser.add_argument("--vocab-size", type=int, help="tokens of the BPE both use (default 16384; 512 for stories)")
    parser.add_argument("--rounds", type=int, default=3, help="times each is measured; the median counts (default 3)")
    parser.add_argument("--batch", type=int, default=1000, help="documents of a call of the bare loop (default 1000)")
    parser.add_argument("--memory-only", action="store_true", help="only run prepare, and tell its peak memory")
    parser.add_argument("--device", choices=["auto", "cpu"], default="auto", help="tokenising runs on the CPU")


def run(args: argparse.Namespace, show: Show) -> Outcome:
    """Measure, and show the table."""
    rounds = at_least_one("--rounds", args.rounds, "time")
    batch = at_least_one("--batch", args.batch, "document")
    vocab = args.vocab_size
    if vocab is not None and vocab < 300:
        raise ConfigError(f"--vocab-size {vocab} is below 300; a byte-level BPE needs 256 bytes and some merges")
    if (args.path is None) == (args.size is None):
        raise ConfigError("name a path or a size, one of the two: 'rmdm bench data PATH' or '--size tiny'")
    if args.size is not None and args.size not in STORIES:
        raise ConfigError(f"--size {args.size} is unknown; {nearest(args.size, STORIES)}")
    from rmdm.bench.data import bench_data, ratios, render, write_stories

    with tempfile.TemporaryDirectory() as place:
        path, name = args.path, None
        if args.size is not None:
            name = f"{STORIES[args.size]:,} built-in stories"
            path = str(Path(place) / f"{args.size}.txt")
            write_stories(Path(path), STORIES[args.size])
        vocab = vocab or (512 if args.size else 16_384)
        rows = bench_data(path, vocab, rounds, batch, args.memory_only, show, name)
    compared = ratios(rows)
    show(render(rows, compared))
    return {"bench": rows, "ratios": compared}
