"""The page in a real browser: nothing is asked of the network, nothing fails, everything shows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tasks.report.compare import compare, open_runs
from tasks.report.compare_page import write_comparison
from tasks.report.page import write_report
from tests.tasks.browser import IN_A_BROWSER, Browser, chromium
from tests.tasks.report.report_records import made_up, write

pytestmark = IN_A_BROWSER
STICKS_OUT = """[...document.querySelectorAll('body *')].filter(e => {
    const box = e.getBoundingClientRect(), region = e.parentElement.closest('.wide, .block');
    return !region && box.width > 1 && (box.left < -1
        || box.right > document.documentElement.clientWidth + 1); }).map(e => e.outerHTML)"""
SCROLLS = "document.documentElement.scrollWidth > document.documentElement.clientWidth"
WIDTHS_OF_IMAGES = (
    "Promise.all([...document.images].map(image => image.decode().then(() => image.naturalWidth)))"
)
SMALLEST_LETTERS = """Math.min(...[...document.querySelectorAll('svg text')].map(text =>
    parseFloat(getComputedStyle(text).fontSize) *
    text.ownerSVGElement.getBoundingClientRect().width / 360))"""
LABELS_THAT_OVERLAP = """[...document.querySelectorAll('svg')].flatMap(svg => {
    const boxes = [...svg.querySelectorAll('text')].map(t => [t, t.getBoundingClientRect()]);
    return boxes.flatMap(([a, p], i) => boxes.slice(i + 1).filter(([b, q]) =>
        p.left < q.right - 1 && q.left < p.right - 1 && p.top < q.bottom - 3 && q.top < p.bottom - 3
    ).map(([b, q]) => a.textContent + ' | ' + b.textContent)); })"""
LABELS_CUT_OFF = """[...document.querySelectorAll('svg text')].filter(t => {
    const p = t.getBoundingClientRect(), q = t.ownerSVGElement.getBoundingClientRect();
    return p.left < q.left - 1 || p.right > q.right + 1; }).map(t => t.textContent)"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with chromium(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    found = {"full": write_report(write(folder / "a", *made_up()), {})}
    stopped = made_up(outcome="stopped", excluded=0, margins=False)
    found["stopped"] = write_report(write(folder / "b", *stopped), {})
    runs = open_runs([folder / "a", folder / "b"])
    found["compare"] = write_comparison(compare(runs), runs, folder / "compare.html")["page"]
    return found


@pytest.mark.parametrize("name", ["full", "stopped", "compare"])
@pytest.mark.parametrize(("width", "dark"), [(1280, False), (390, True)])
def test_the_page_works_by_itself(
    browser: Browser, pages: dict[str, Path], name: str, width: int, dark: bool
) -> None:
    browser.requests.clear()
    browser.complaints.clear()
    browser.open(pages[name], width=width, dark=dark)
    browser.value_of("document.querySelectorAll('details').forEach(d => { d.open = true; })")
    assert browser.value_of(SCROLLS) is False
    assert browser.value_of(STICKS_OUT) == []
    widths = browser.value_of(WIDTHS_OF_IMAGES)
    assert (len(widths) > 0) == (name != "compare")
    assert all(found > 0 for found in widths)
    asked = [url for url in browser.requests if not url.startswith("data:")]
    assert asked == [pages[name].absolute().as_uri()]
    assert browser.complaints == []


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("name", ["full", "compare"])
def test_charts_can_be_read(
    browser: Browser, pages: dict[str, Path], name: str, width: int
) -> None:
    browser.open(pages[name], width=width)
    assert browser.value_of(SMALLEST_LETTERS) >= 10
    assert browser.value_of(LABELS_THAT_OVERLAP) == []
    assert browser.value_of(LABELS_CUT_OFF) == []


def test_a_method_can_be_hidden_without_a_script(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["full"], width=1280)
    shown = "getComputedStyle(document.querySelector('figure:has(.t4) .s4')).display"
    assert browser.value_of(shown) != "none"
    browser.value_of("document.querySelector('figure:has(.t4) .t4').click()")
    assert browser.value_of(shown) == "none"
