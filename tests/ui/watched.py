"""A page in a browser, and all that is heard of it."""

import json
import urllib.request
from collections.abc import Callable
from typing import Any

from playwright.sync_api import BrowserContext, Page, Request

KEY = "a-key-of-the-tests"


class Watched:
    """A page whose console, errors and requests are kept."""

    def __init__(self, context: BrowserContext, url: str) -> None:
        self.url = url
        self.page: Page = context.new_page()
        self.page.set_default_timeout(15_000)
        self.faults: list[str] = []
        self.sent: list[dict[str, Any]] = []
        """Bodies of the requests for text, oldest first."""
        self._open: set[Request] = set()
        self.page.on("console", lambda said: said.type in ("error", "warning") and self.faults.append(said.text))
        self.page.on("pageerror", lambda error: self.faults.append(f"{error}"))
        self.page.on("requestfailed", self._failed)
        self.page.on("requestfinished", lambda request: self._open.discard(request))
        self.page.on("request", self._heard)

    def _heard(self, request: Request) -> None:
        self._open.add(request)
        if not request.url.startswith(self.url):
            self.faults.append(f"{request.url} is not of the server")
        if request.url.endswith("/v1/denoise"):
            self.sent.append(json.loads(request.post_data or ""))

    def _failed(self, request: Request) -> None:
        self._open.discard(request)
        # Chromium says this of streams that were read to their end too (microsoft/playwright#42742); the page itself
        # has an alert for those that were not.
        if not (request.url.endswith("/v1/denoise") and request.failure == "net::ERR_ABORTED"):
            self.faults.append(f"{request.url}: {request.failure}")

    def open(self, fragment: str = "") -> Page:
        """The page under a link, as soon as its texts are written."""
        self.page.goto(f"{self.url}/{fragment}")
        self.settle()
        return self.page

    def settle(self) -> None:
        """Wait until nothing is being written."""
        self.page.locator("#panes[aria-busy=false]").wait_for()

    def check(self) -> None:
        """Nothing may have gone wrong, up to the last request."""
        while self._open:
            self.page.wait_for_timeout(10)
        assert self.faults == []

    def texts(self) -> list[str]:
        """What the panes say, the first first."""
        return [self.text(number) for number in range(self.page.locator(".pane").count())]

    def text(self, number: int = 0) -> str:
        """The words in a pane that are text and written."""
        words = self.page.locator(".pane").nth(number).locator(".text .token:is(.written, .given)")
        return " ".join(words.all_inner_texts())


Watch = Callable[..., Watched]
"""Opens a page of a server; takes what a browser context takes."""


def ask(url: str, body: dict[str, Any]) -> dict[str, Any]:
    """What the server itself answers."""
    request = urllib.request.Request(
        url, data=json.dumps(body).encode(), headers={"content-type": "application/json"}, method="POST"
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)
