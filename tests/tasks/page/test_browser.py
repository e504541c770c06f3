"""Pages of studies in a real browser: nothing is asked, nothing fails, everything shows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.tasks.browser import IN_A_BROWSER, Browser, chromium
from tests.tasks.families.autoencoder import study_records as recoveries
from tests.tasks.families.inversion import inversions
from tests.tasks.families.weights.study import study_records as studies
from tests.tasks.report.test_page_browser import (
    LABELS_CUT_OFF,
    LABELS_THAT_OVERLAP,
    SCROLLS,
    STICKS_OUT,
    WIDTHS_OF_IMAGES,
)

pytestmark = IN_A_BROWSER
LETTERS = """[...document.querySelectorAll('svg text')].map(text => {
    const svg = text.ownerSVGElement;
    return parseFloat(getComputedStyle(text).fontSize)
        * svg.getBoundingClientRect().width / svg.viewBox.baseVal.width; })"""
UNREACHABLE = """[...document.querySelectorAll('main *')].filter(e =>
    e.scrollWidth > e.clientWidth + 1 && ['auto', 'scroll'].includes(getComputedStyle(e).overflowX)
    && (e.tabIndex < 0 || !e.getAttribute('aria-label'))).map(e => e.outerHTML)"""
N_SCROLLING = """[...document.querySelectorAll('.wide')].filter(e =>
    e.scrollWidth > e.clientWidth + 1).length"""
COLUMNS = """getComputedStyle(document.querySelector('.of-rates .matrix'))
    .gridTemplateColumns.split(' ').length"""
HIDDEN = {"study": 2, "recovery": 2, "inversion": 1}  # a line of the page


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with chromium(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.fixture(scope="module", params=HIDDEN)
def page(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    pages, make = {
        "study": (studies.PAGES, studies.study),
        "recovery": (recoveries.PAGES, recoveries.recovery),
        "inversion": (inversions.PAGES, inversions.inversion),
    }[request.param]
    return pages.page.write(pages.write(tmp_path_factory.mktemp("study"), *make()))


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (390, True)])
def test_the_page_works_by_itself(browser: Browser, page: Path, width: int, dark: bool) -> None:
    browser.requests.clear()
    browser.complaints.clear()
    browser.open(page, width=width, dark=dark)
    browser.value_of("document.querySelectorAll('details').forEach(d => { d.open = true; })")
    assert browser.value_of(SCROLLS) is False
    assert browser.value_of(STICKS_OUT) == []
    assert browser.value_of(UNREACHABLE) == []
    assert width > 390 or browser.value_of(N_SCROLLING) >= 1
    widths = browser.value_of(WIDTHS_OF_IMAGES)
    assert len(widths) > 100
    assert all(found > 0 for found in widths)
    asked = [url for url in browser.requests if not url.startswith("data:")]
    assert asked == [page.absolute().as_uri()]
    assert browser.complaints == []


@pytest.mark.parametrize(("width", "columns"), [(1280, 6), (1000, None), (390, 2)])
def test_charts_can_be_read(browser: Browser, page: Path, width: int, columns: int | None) -> None:
    browser.open(page, width=width)
    letters = browser.value_of(LETTERS)
    assert len(letters) > 100
    assert min(letters) >= 9.5
    assert max(letters) <= 19
    assert browser.value_of(LABELS_THAT_OVERLAP) == []
    assert browser.value_of(LABELS_CUT_OFF) == []
    if page.stem == "recovery" and columns:
        assert browser.value_of(COLUMNS) == columns


def test_a_line_can_be_hidden_without_a_script(browser: Browser, page: Path) -> None:
    browser.open(page, width=1280)
    k = HIDDEN[page.stem]
    shown = f"getComputedStyle(document.querySelector('figure:has(.t{k}) .s{k}')).display"
    assert browser.value_of(shown) != "none"
    browser.value_of(f"document.querySelector('figure:has(.t{k}) .t{k}').click()")
    assert browser.value_of(shown) == "none"
