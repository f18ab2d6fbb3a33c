"""`rmdm serve`: flags, and the server's life."""

import argparse
import logging
import os
import socket
from importlib.util import find_spec
from typing import Any

from rmdm.errors import ConfigError
from rmdm.kinds import Outcome, Show
from rmdm.share.names import SHIPPED, SHIPPED_HELP, is_shipped

LOOPBACK = ("127.0.0.1", "localhost", "::1")
ROWS, QUEUE, MAX_BODY = 64, 256, 1 << 20


def flags(parser: argparse.ArgumentParser) -> None:
    """Flags of `serve`."""
    parser.add_argument(
        "models", nargs="*", metavar="MODEL", help=f"run directories, released folders or hub names ({SHIPPED_HELP})"
    )
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to listen at (default 127.0.0.1: this machine only)"
    )
    parser.add_argument("--port", type=int, default=8000, help="port to listen at (default 8000; 0 takes a free one)")
    parser.add_argument(
        "--api-key-env", metavar="NAME", help="environment variable that holds the key clients must send"
    )
    parser.add_argument("--rows", type=int, default=ROWS, help=f"texts written at the same time (default {ROWS})")
    parser.add_argument(
        "--queue", type=int, default=QUEUE, help=f"requests that may wait (default {QUEUE}); more get 429"
    )
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds a request may take (default 120)")
    parser.add_argument("--max-body", type=int, default=MAX_BODY, help=f"bytes a request may have (default {MAX_BODY})")
    parser.add_argument("--log-texts", action="store_true", help="write prompts and texts into the request log")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")


def run(args: argparse.Namespace, show: Show) -> Outcome:
    """Serve until a signal ends it; requests that are being written are finished first."""
    check(args)
    key = read_key(args.api_key_env)
    import uvicorn

    from rmdm.serving.app import make_app
    from rmdm.serving.patient import PatientProtocol, Server
    from rmdm.serving.work import Settings

    served = open_models(args.models, args.device)
    settings = Settings(args.timeout, args.rows, args.queue, args.max_body, key, args.log_texts)
    app = make_app(served, settings)
    with listen(args.host, args.port) as listener:
        host, port = listener.getsockname()[:2]
        config = uvicorn.Config(
            app, http=PatientProtocol, log_level="error", access_log=False, lifespan="on", server_header=False,
            timeout_keep_alive=30, timeout_graceful_shutdown=int(args.timeout) + 1,
        )  # fmt: skip
        url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        for one in served:
            show(f"{one.name}: {one.model}")
        show(f"page: {url}/   API: {url}/v1/completions   Ctrl-C ends it")
        if args.host not in LOOPBACK and key is None:
            show(f"note: {args.host} can be reached from other machines and no key is asked for; see --api-key-env")
        server = Server(config)
        # What is given up at a second signal is no error.
        logging.getLogger("uvicorn.error").addFilter(lambda _: not server.force_exit)
        server.run(sockets=[listener])
        app.state.engine.close()  # after a second signal nobody else has done so
    how = "requests that were being written were given up" if server.force_exit else "every request was answered"
    show(f"ended; {how}")
    return {"url": url, "models": [one.name for one in served]}


def check(args: argparse.Namespace) -> None:
    """Raise `ConfigError` for flags no server could follow."""
    for package in ("fastapi", "uvicorn"):
        if find_spec(package) is None:
            raise ConfigError(f"rmdm serve needs {package}; install it with: pip install fastapi uvicorn")
    if not 0 <= args.port <= 65535:
        raise ConfigError(f"--port {args.port} is outside 0..65535; use 8000, for example")
    for name, usual in (("rows", ROWS), ("queue", QUEUE), ("max_body", MAX_BODY)):
        if getattr(args, name) < 1:
            raise ConfigError(f"--{name.replace('_', '-')} {getattr(args, name)} is below 1; use {usual}, for example")
    if not 0 < args.timeout <= 86_400:
        raise ConfigError(f"--timeout {args.timeout:g} is not in 0..86400 seconds; use 120, for example")


def read_key(name: str | None) -> str | None:
    """The key an environment variable holds."""
    if name is None:
        return None
    key = os.environ.get(name, "").strip()
    if not key:
        raise ConfigError(f"--api-key-env {name}: that variable is empty; set it to the key, or drop the flag")
    if not key.isascii() or not key.isprintable() or " " in key:
        raise ConfigError(f"--api-key-env {name}: a key has ASCII letters, digits and signs only; choose another")
    return key


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens there."""
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address[:2], family=family, backlog=1024)
    except OSError as error:
        reason = os.strerror(error.errno) if isinstance(error.errno, int) and error.errno > 0 else str(error.strerror)
        raise ConfigError(f"--host {host} --port {port}: {reason}; use another, or --port 0 for a free one") from None


def open_models(refs: list[str], device: str) -> list[Any]:
    """The models, each under its config's name, or with a number if several share it; the package's own if none."""
    import rmdm
    from rmdm.serving.served import Served

    found: list[Served] = []
    for ref in refs or [None]:
        model = rmdm.load(ref, device)
        names = {one.name for one in found}
        name = model.config.name
        number = 2
        while name in names:
            name, number = f"{model.config.name}-{number}", number + 1
        if model.backbone.latent is not None:
            _ = model.latents.source  # a missing flow is said now, not to the first client
        created = int((model.folder / "model.json").stat().st_mtime)
        found.append(Served(name, model, created, alias=SHIPPED if is_shipped(ref) else None))
    return found
