"""Load on a real server over loopback: many clients with mixed requests, some of which leave halfway.

    rmdm serve RUN [RUN ...] --port 8000 &
    python benchmarks/serve_load.py http://127.0.0.1:8000 RUN [RUN ...] --clients 64 --seconds 60

Every answer is checked against what its request gives alone, in this process, afterwards. Throughput is compared with
the same mix sent by one client that waits for each answer before it asks again. Prints one JSON object.
"""

import argparse
import asyncio
import json
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2 as httpx

import rmdm

PREFIXES = ("", "", "", "anna was", "tom was happy near the", "lily")
LEAVES = 0.1
"""Share of the clients' requests that are given up halfway."""


@dataclass
class Tally:
    """What the clients saw."""

    answers: list[tuple[dict[str, Any], list[str]]] = field(default_factory=list)
    statuses: Counter[str] = field(default_factory=Counter)
    latencies: list[float] = field(default_factory=list)
    tokens: int = 0
    seconds: float = 0.0


def mixed(rng: random.Random, models: list[str]) -> dict[str, Any]:
    """A request of the mix."""
    body: dict[str, Any] = {
        "model": rng.choice(models), "n": rng.choice((1, 1, 1, 2, 4)), "steps": rng.choice((4, 8, 16)),
        "seed": rng.randrange(2**31), "sampler": rng.choice(("ancestral", "balanced")),
        "temperature": rng.choice((0.7, 1.0)), "prompt": rng.choice(PREFIXES),
    }  # fmt: skip
    if rng.random() < 0.2:
        body |= {"prompt": None, "infill": f"anna was [MASK:{rng.randint(1, 4)}] near the [MASK] ."}
    return body


async def one_client(
    web: httpx.AsyncClient, seed: int, models: list[str], end: float, tally: Tally, leaves: float
) -> None:
    """Ask again and again until the time is up."""
    rng = random.Random(seed)
    while time.monotonic() < end:
        body = mixed(rng, models)
        if latent_needs_choice(body):
            body["given"] = "prior"
        began = time.monotonic()
        try:
            patience = rng.uniform(0.005, 0.1) if rng.random() < leaves else 120
            answer = await asyncio.wait_for(web.post("/v1/completions", json=with_known(body)), patience)
        except (TimeoutError, httpx.HTTPError) as error:
            tally.statuses["left" if isinstance(error, TimeoutError) else type(error).__name__] += 1
            continue
        tally.statuses[str(answer.status_code)] += 1
        if answer.status_code == 429:
            await asyncio.sleep(0.2)
        elif answer.status_code == 200:
            said = answer.json()
            tally.answers.append((body, [choice["text"] for choice in said["choices"]]))
            tally.latencies.append(time.monotonic() - began)
            tally.tokens += said["usage"]["completion_tokens"]


WITH_LATENT: set[str] = set()
"""Models that have a latent, and so a choice where it comes from when text is given."""


def latent_needs_choice(body: dict[str, Any]) -> bool:
    """Whether `given` is to be said: fitting a latent takes seconds on a CPU, and is another benchmark."""
    return body["model"] in WITH_LATENT and bool(body.get("prompt") or body.get("infill"))


def with_known(body: dict[str, Any]) -> dict[str, Any]:
    """The body without what was left open."""
    return {name: value for name, value in body.items() if value not in (None, "")}


async def load(url: str, clients: int, seconds: float, models: list[str], seed: int, leaves: float) -> Tally:
    """So many clients for so long."""
    tally = Tally()
    limits = httpx.Limits(max_connections=clients + 8, max_keepalive_connections=clients + 8)
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as web:
        began = time.monotonic()
        end = began + seconds
        await asyncio.gather(*(one_client(web, seed * 1000 + i, models, end, tally, leaves) for i in range(clients)))
        tally.seconds = time.monotonic() - began
    return tally


def memory_of(pid: int) -> float:
    """Resident MiB of a process."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) / 1024
    return float("nan")


def differing(tally: Tally, runs: dict[str, Any]) -> int:
    """Answers that are not what their request gives alone."""
    count = 0
    for body, texts in tally.answers:
        known = with_known(body)
        model = runs[known.pop("model")]
        prefix, infill = known.pop("prompt", None), known.pop("infill", None)
        alone = model.infill(infill, **known) if infill else model.generate(prefix=prefix, **known)
        own = [text.removeprefix(prefix or "") for text in alone.texts]
        count += own != texts
    return count


def main() -> None:
    """Run both loads, check every answer."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("runs", nargs="+")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--pid", type=int, help="the server's process, whose memory is watched")
    args = parser.parse_args()
    listed = httpx.get(f"{args.url}/v1/models", timeout=60).json()["data"]
    models = [one["id"] for one in listed]
    WITH_LATENT.update(one["id"] for one in listed if one["rmdm"]["latent"])
    asyncio.run(load(args.url, 4, 3, models, 9, 0.0))  # warm
    before = memory_of(args.pid) if args.pid else None
    alone = asyncio.run(load(args.url, 1, args.seconds / 2, models, 1, 0.0))
    many = asyncio.run(load(args.url, args.clients, args.seconds, models, 2, LEAVES))
    after = memory_of(args.pid) if args.pid else None
    runs = dict(zip(models, (rmdm.load(run, "cpu") for run in args.runs), strict=True))
    wrong = differing(alone, runs) + differing(many, runs)
    latencies = sorted(many.latencies)
    figures = {
        "clients": args.clients, "seconds": round(many.seconds, 1), "statuses": dict(many.statuses),
        "answers": len(many.answers), "checked": len(many.answers) + len(alone.answers), "differing": wrong,
        "tokens_per_s": round(many.tokens / many.seconds), "requests_per_s": round(len(many.answers) / many.seconds, 1),
        "one_at_a_time_tokens_per_s": round(alone.tokens / alone.seconds),
        "one_at_a_time_requests_per_s": round(len(alone.answers) / alone.seconds, 1),
        "ratio": round(many.tokens / many.seconds / (alone.tokens / alone.seconds), 2),
        "latency_median_s": round(latencies[len(latencies) // 2], 3),
        "latency_95_s": round(latencies[int(0.95 * len(latencies))], 3), "memory_mib": [before, after],
        "health": httpx.get(f"{args.url}/healthz", timeout=60).json(),
    }  # fmt: skip
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
