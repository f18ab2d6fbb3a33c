"""A real server with tiny models, and Debian's Chromium to look at its page with."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, BrowserContext, sync_playwright

from tests.release import save_release
from tests.serving import Server, serve
from tests.ui.watched import KEY, Watch, Watched

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if CHROMIUM is not None:
        return
    reason = "no Chromium: none of chromium, chromium-browser, google-chrome is on the PATH"
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def releases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("served")
    return {kind: save_release(root / kind, kind) for kind in ("rmdm", "mdlm", "ar")}


@pytest.fixture(scope="session")
def server(releases: dict[str, Path]) -> Iterator[Server]:
    """tiny-mdlm, tiny-rmdm and tiny-ar; the page shows the first two side by side."""
    with serve([releases[kind] for kind in ("mdlm", "rmdm", "ar")]) as running:
        yield running


@pytest.fixture(scope="session")
def strict_server(releases: dict[str, Path]) -> Iterator[Server]:
    """One model, a key, one text at a time and one in the queue."""
    flags = ("--api-key-env", "TESTS_KEY", "--rows", "1", "--queue", "1")
    with serve([releases["mdlm"]], *flags, TESTS_KEY=KEY) as running:
        yield running


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Of a module, not of the session: while Playwright runs, no other test of the process could use asyncio."""
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture
def watch(browser: Browser) -> Iterator[Watch]:
    """Opens pages on which things may go wrong; takes what a browser context takes."""
    contexts: list[BrowserContext] = []

    def opened(server: Server, **options: Any) -> Watched:
        contexts.append(browser.new_context(**{"reduced_motion": "reduce", **options}))
        return Watched(contexts[-1], server.url)

    yield opened
    for context in contexts:
        context.close()


@pytest.fixture
def calm(watch: Watch, server: Server) -> Iterator[Watched]:
    """The page for someone who wants no motion: texts are shown when they are there. Nothing may go wrong."""
    watched = watch(server, viewport={"width": 1280, "height": 900})
    yield watched
    watched.check()
