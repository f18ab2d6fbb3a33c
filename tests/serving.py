"""A real `rmdm serve` in a process of its own, for tests that speak HTTP to it."""

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Server:
    """A server that runs."""

    url: str
    process: subprocess.Popen[str]
    log: list[str] = field(default_factory=list)
    """Lines of its standard error."""

    def stop(self) -> int:
        """SIGTERM, and its exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout=60)


@contextmanager
def serve(models: Sequence[Path | str], *flags: str, **env: str) -> Iterator[Server]:
    """Serve some models on a free port until the block ends."""
    command = [sys.executable, "-m", "rmdm", "serve", *map(str, models), "--port", "0", "--device", "cpu", *flags]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, **env}
    ) as process:
        server, said = Server("", process), list[str]()
        out, err = process.stdout, process.stderr
        assert out is not None
        assert err is not None
        readers = [threading.Thread(target=server.log.extend, args=(err,))]
        readers[0].start()
        try:
            for line in out:
                said.append(line)
                found = re.search(r"page: (http://\S+)/ ", line)
                if found:
                    server.url = found[1]
                    break
            assert server.url, "".join(said + server.log)
            readers.append(threading.Thread(target=out.read))
            readers[1].start()
            yield server
        finally:
            process.terminate()
            try:
                process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                process.kill()
            for reader in readers:
                reader.join()
