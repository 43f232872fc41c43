"""Debian's Chromium for tests: what a view did is asserted when its test has ended.

Every request must have gone to the test's server, and no script may have failed, been refused by
the policy of the page, or shown a dialog that the test did not expect.
"""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Literal

import pytest
from playwright.sync_api import Browser, Dialog, Page, ViewportSize, expect, sync_playwright

from evaluation.servers import Live
from waiting import LIMIT_S, wait_until

__all__ = ["WIDE", "Scheme", "View", "chromium", "viewing"]

Scheme = Literal["light", "dark"]
AXE = "axe_playwright_python"
WIDE = ViewportSize(width=1200, height=900)


@contextmanager
def chromium() -> Iterator[Browser]:
    """Run a browser as long as this lasts; without one, skip the test, but not in CI."""
    path = os.environ.get("UNSHARD_CHROMIUM") or shutil.which("chromium")
    if path is None:
        why = "no Chromium: install Debian's, or set UNSHARD_CHROMIUM to the path of one"
        assert "CI" not in os.environ, why
        pytest.skip(why)
    expect.set_options(timeout=LIMIT_S * 1000)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        try:
            yield browser
        finally:
            browser.close()


@dataclass
class View:
    """A tab of a browser, and what happened in it.

    Attributes:
        page: the tab.
        server: which it looks at.
        requests: the addresses of all requests.
        mistakes: errors of scripts, and what the policy of the page refused.
        dialogs: the texts of dialogs, each of which was accepted.
    """

    page: Page
    server: Live
    requests: list[str] = field(default_factory=list)
    mistakes: list[str] = field(default_factory=list)
    dialogs: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.page.set_default_timeout(LIMIT_S * 1000)
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("pageerror", lambda error: self.mistakes.append(str(error)))
        self.page.on("console", lambda message: self._note(message.type, message.text))
        self.page.on("dialog", self._accept)

    def _note(self, kind: str, text: str) -> None:
        is_network = "Failed to load resource" in text or "net::ERR" in text  # a server is away
        if kind == "error" and not is_network:
            self.mistakes.append(text)

    def _accept(self, dialog: Dialog) -> None:
        self.dialogs.append(dialog.message)
        dialog.accept("for a reason" if dialog.type == "prompt" else None)

    def open(self, address: str) -> None:
        """Open an address of the server."""
        self.page.goto(f"{self.server.url}{address}")

    def mark(self) -> None:
        """Leave a mark that goes when the page is loaded again."""
        self.page.evaluate("window.wasHere = true")

    def is_marked(self) -> bool:
        return bool(self.page.evaluate("window.wasHere === true"))

    def until(self, condition: str) -> None:
        """Wait for a condition in JavaScript, asked from here: the page's policy forbids `eval`."""
        wait_until(lambda: self.page.evaluate(condition), condition)

    def press_until(self, key: str, selector: str) -> None:
        """Press a key until the focus is on what a selector means."""
        for _ in range(100):
            self.page.keyboard.press(key)
            if self.page.evaluate("one => document.activeElement?.matches(one)", selector):
                return
        raise AssertionError(f"{selector}: cannot be reached by {key}")

    def violations(self) -> list[str]:
        """Return what axe finds that is serious."""
        if not self.page.evaluate("typeof axe !== 'undefined'"):
            self.page.evaluate(files(AXE).joinpath("axe.min.js").read_text())
        found = self.page.evaluate("axe.run()")["violations"]
        return [
            f"{one['id']}: {node['html']}"
            for one in found
            if one["impact"] in {"serious", "critical"}
            for node in one["nodes"]
        ]


@contextmanager
def viewing(
    browser: Browser, server: Live, *, size: ViewportSize = WIDE, scheme: Scheme = "light"
) -> Iterator[View]:
    """Open a tab of its own, and assert at the end that nothing went wrong in it."""
    context = browser.new_context(viewport=size, color_scheme=scheme, accept_downloads=True)
    view = View(context.new_page(), server)
    try:
        yield view
        assert view.mistakes == []
        strangers = [one for one in view.requests if not one.startswith(f"{server.url}/")]
        assert strangers == []
    finally:
        context.close()
