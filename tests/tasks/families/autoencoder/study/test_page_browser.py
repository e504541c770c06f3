"""The page of a recovery study in a real browser: nothing is asked or fails, everything shows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tasks.families.autoencoder.study.page import write_page
from tests.tasks.browser import IN_A_BROWSER, Browser, chromium
from tests.tasks.families.autoencoder.study_records import recovery, write
from tests.tasks.report.test_page_browser import (
    LABELS_CUT_OFF,
    LABELS_THAT_OVERLAP,
    SCROLLS,
    STICKS_OUT,
    WIDTHS_OF_IMAGES,
)
from tests.tasks.study.test_page_browser import LETTERS, N_SCROLLING, UNREACHABLE

pytestmark = IN_A_BROWSER
OPEN = "document.querySelectorAll('details').forEach(d => { d.open = true; })"
COLUMNS = """getComputedStyle(document.querySelector('.of-rates .matrix'))
    .gridTemplateColumns.split(' ').length"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with chromium(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_page(write(tmp_path_factory.mktemp("recovery"), *recovery()))


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (390, True)])
def test_the_page_works_by_itself(browser: Browser, page: Path, width: int, dark: bool) -> None:
    browser.requests.clear()
    browser.complaints.clear()
    browser.open(page, width=width, dark=dark)
    browser.value_of(OPEN)
    assert browser.value_of(SCROLLS) is False
    assert browser.value_of(STICKS_OUT) == []
    assert browser.value_of(UNREACHABLE) == []
    assert (browser.value_of(N_SCROLLING) >= 3) == (width == 390)
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
    assert min(letters) >= 10
    assert max(letters) <= 18
    assert browser.value_of(LABELS_THAT_OVERLAP) == []
    assert browser.value_of(LABELS_CUT_OFF) == []
    assert columns in (None, browser.value_of(COLUMNS))


def test_a_method_can_be_hidden_without_a_script(browser: Browser, page: Path) -> None:
    browser.open(page, width=1280)
    shown = "getComputedStyle(document.querySelector('figure:has(.t2) .s2')).display"
    assert browser.value_of(shown) != "none"
    browser.value_of("document.querySelector('figure:has(.t2) .t2').click()")
    assert browser.value_of(shown) == "none"
