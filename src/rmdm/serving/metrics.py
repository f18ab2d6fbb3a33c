"""Figures of a running server in Prometheus' text format."""

import threading
from bisect import bisect_left
from collections import Counter

BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
"""Upper bounds of the histogram of seconds."""


class Metrics:
    """Counts requests, tokens and seconds; safe to use from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._requests: Counter[tuple[str, int]] = Counter()
        self._tokens: Counter[str] = Counter()
        self._buckets = [0] * (len(BUCKETS) + 1)
        self._seconds = 0.0

    def answered(self, route: str, status: int, seconds: float) -> None:
        """A request was answered."""
        with self._lock:
            self._requests[route, status] += 1
            self._buckets[bisect_left(BUCKETS, seconds)] += 1
            self._seconds += seconds

    def wrote(self, model: str, tokens: int) -> None:
        """Tokens were written."""
        with self._lock:
            self._tokens[model] += tokens

    def text(self, gauges: dict[str, tuple[str, float]], counters: dict[str, tuple[str, float]]) -> str:
        """All of it, with figures that are kept elsewhere: name to (help, value)."""
        with self._lock:
            lines = _family("requests_total", "Requests answered.", "counter")
            lines += [
                f'rmdm_requests_total{{route="{_quoted(route)}",status="{status}"}} {count}'
                for (route, status), count in sorted(self._requests.items())
            ]
            lines += _family("tokens_total", "Tokens written.", "counter")
            lines += [f'rmdm_tokens_total{{model="{_quoted(m)}"}} {count}' for m, count in sorted(self._tokens.items())]
            lines += _family("request_seconds", "Time from a request's arrival to the end of its answer.", "histogram")
            below = 0
            for bound, count in zip([*BUCKETS, "+Inf"], self._buckets, strict=True):
                below += count
                lines.append(f'rmdm_request_seconds_bucket{{le="{bound}"}} {below}')
            lines += [f"rmdm_request_seconds_sum {self._seconds:.6f}", f"rmdm_request_seconds_count {below}"]
        for kind, figures in (("gauge", gauges), ("counter", counters)):
            for name, (about, value) in figures.items():
                lines += [*_family(name, about, kind), f"rmdm_{name} {value:g}"]
        return "\n".join(lines) + "\n"


def _family(name: str, about: str, kind: str) -> list[str]:
    return [f"# HELP rmdm_{name} {about}", f"# TYPE rmdm_{name} {kind}"]


def _quoted(label: str) -> str:
    return label.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
