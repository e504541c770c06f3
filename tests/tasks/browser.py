"""A headless Chromium that opens one file, spoken to in the DevTools protocol over two pipes."""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

BINARY = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), ""
)
FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run",
         "--disable-background-networking", "--remote-debugging-pipe", "about:blank")  # fmt: skip
IN_A_BROWSER = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not BINARY,
        reason="no chromium, chromium-browser or google-chrome here; other tests still check that "
        "tags nest, that links stay in the page and that numbers are the record's",
    ),
]
"""The marks of a file of tests that open pages."""
SECONDS = 60.0
LAUNCH = "import os, sys; os.dup2(int(sys.argv[1]), 3); os.dup2(int(sys.argv[2]), 4); " \
    "os.execv(sys.argv[3], sys.argv[3:])"  # fmt: skip


class Browser:
    """One tab. `requests` are the addresses that it asked for, `complaints` what it found wrong."""

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self.to_browser, self.from_browser = to_browser, from_browser
        self.buffer = b""
        self.n_sent = 0
        self.session: str | None = None
        self.requests: list[str] = []
        self.complaints: list[str] = []
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        attached = self.ask("Target.attachToTarget", targetId=target, flatten=True)
        self.session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.ask(f"{domain}.enable")

    def open(self, page: Path, *, width: int, dark: bool = False) -> None:
        """Loads `page` in a window of `width` pixels."""
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.ask("Emulation.setEmulatedMedia", features=scheme)
        self.ask("Emulation.setDeviceMetricsOverride", width=width, height=900,
                 deviceScaleFactor=1, mobile=False)  # fmt: skip
        self.ask("Page.navigate", url=page.absolute().as_uri())
        while self._next().get("method") != "Page.loadEventFired":
            pass

    def value_of(self, expression: str) -> Any:
        """What a script in the page gives; promises are waited for."""
        found = self.ask(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def ask(self, method: str, **params: Any) -> dict[str, Any]:
        self.n_sent += 1
        message: dict[str, Any] = {"id": self.n_sent, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.to_browser, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self.n_sent:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return dict(answer["result"])

    def _next(self) -> dict[str, Any]:
        deadline = time.monotonic() + SECONDS
        while b"\0" not in self.buffer:
            left = deadline - time.monotonic()
            ready, _out, _err = select.select([self.from_browser], [], [], max(0.0, left))
            piece = os.read(self.from_browser, 1 << 20) if ready else b""
            assert piece, f"the browser said nothing for {SECONDS:g} s, or ended"
            self.buffer += piece
        content, _nul, self.buffer = self.buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(content)
        self._note(message.get("method"), message.get("params", {}))
        return message

    def _note(self, method: str | None, params: dict[str, Any]) -> None:
        if method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.complaints.append(str(params["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled":
            self.complaints.append(f"{params['type']}: {params['args']}")
        elif method == "Log.entryAdded":
            self.complaints.append(f"{params['entry']['level']}: {params['entry']['text']}")


STICKS_OUT = """[...document.querySelectorAll('body *')].filter(e => {
    const box = e.getBoundingClientRect(), region = e.parentElement.closest('.wide, .block');
    return !region && box.width > 1 && (box.left < -1
        || box.right > document.documentElement.clientWidth + 1); }).map(e => e.outerHTML)"""
SCROLLS = "document.documentElement.scrollWidth > document.documentElement.clientWidth"
UNREACHABLE = """[...document.querySelectorAll('main *')].filter(e =>
    e.scrollWidth > e.clientWidth + 1 && ['auto', 'scroll'].includes(getComputedStyle(e).overflowX)
    && (e.tabIndex < 0 || !e.getAttribute('aria-label'))).map(e => e.outerHTML)"""
WIDTHS_OF_IMAGES = (
    "Promise.all([...document.images].map(image => image.decode().then(() => image.naturalWidth)))"
)
LETTERS = """[...document.querySelectorAll('svg text')].map(text => {
    const svg = text.ownerSVGElement;
    return parseFloat(getComputedStyle(text).fontSize)
        * svg.getBoundingClientRect().width / svg.viewBox.baseVal.width; })"""
LABELS_THAT_OVERLAP = """[...document.querySelectorAll('svg')].flatMap(svg => {
    const boxes = [...svg.querySelectorAll('text')].map(t => [t, t.getBoundingClientRect()]);
    return boxes.flatMap(([a, p], i) => boxes.slice(i + 1).filter(([b, q]) =>
        p.left < q.right - 1 && q.left < p.right - 1 && p.top < q.bottom - 3 && q.top < p.bottom - 3
    ).map(([b, q]) => a.textContent + ' | ' + b.textContent)); })"""
LABELS_CUT_OFF = """[...document.querySelectorAll('svg text')].filter(t => {
    const p = t.getBoundingClientRect(), q = t.ownerSVGElement.getBoundingClientRect();
    return p.left < q.left - 1 || p.right > q.right + 1; }).map(t => t.textContent)"""


def check_that_it_works(browser: Browser, page: Path, *, width: int, dark: bool = False) -> int:
    """The page asks for nothing, complains of nothing, and everything in it shows and can be
    reached; the number of its pictures."""
    browser.requests.clear()
    browser.complaints.clear()
    browser.open(page, width=width, dark=dark)
    browser.value_of("document.querySelectorAll('details').forEach(d => { d.open = true; })")
    assert browser.value_of(SCROLLS) is False
    assert browser.value_of(STICKS_OUT) == []
    assert browser.value_of(UNREACHABLE) == []
    widths = browser.value_of(WIDTHS_OF_IMAGES)
    assert all(found > 0 for found in widths)
    asked = [url for url in browser.requests if not url.startswith("data:")]
    assert asked == [page.absolute().as_uri()]
    assert browser.complaints == []
    return len(widths)


def check_charts(browser: Browser, page: Path, *, width: int) -> None:
    """The letters of the charts can be read, and none overlap or are cut off."""
    browser.open(page, width=width)
    letters = browser.value_of(LETTERS)
    assert 9.5 <= min(letters) <= max(letters) <= 19
    assert browser.value_of(LABELS_THAT_OVERLAP) == []
    assert browser.value_of(LABELS_CUT_OFF) == []


@contextmanager
def chromium(profile: Path) -> Iterator[Browser]:
    """A browser that keeps its files in `profile`, and is ended afterwards."""
    its_in, to_browser = os.pipe()
    from_browser, its_out = os.pipe()
    words = [sys.executable, "-c", LAUNCH, str(its_in), str(its_out), BINARY,
             f"--user-data-dir={profile}", *FLAGS]  # fmt: skip
    with subprocess.Popen(
        words,
        pass_fds=(its_in, its_out),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as process:
        os.close(its_in)
        os.close(its_out)
        try:
            yield Browser(to_browser, from_browser)
        finally:
            process.terminate()
            os.close(to_browser)
            os.close(from_browser)
