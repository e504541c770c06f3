"""The page of an audit in a real browser: nothing is asked, nothing fails, everything shows."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tasks.audit.records import PAGES, audit, nothing, weights
from tests.tasks.browser import IN_A_BROWSER, Browser, check_charts, check_that_it_works

pytestmark = IN_A_BROWSER


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("audits")
    return {
        make.__name__: PAGES.page.write(PAGES.write(folder / make.__name__, *make()))
        for make in (audit, weights, nothing)
    }


@pytest.mark.parametrize("name", ["audit", "weights", "nothing"])
@pytest.mark.parametrize(("width", "dark"), [(1280, False), (390, True)])
def test_a_page_works_by_itself(
    browser: Browser, pages: dict[str, Path], name: str, width: int, dark: bool
) -> None:
    n_images = check_that_it_works(browser, pages[name], width=width, dark=dark)
    assert (n_images > 0) == (name != "nothing")
    check_charts(browser, pages[name], width=width)


def test_a_line_can_be_hidden_without_a_script(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["audit"], width=1280)
    shown = "getComputedStyle(document.querySelector('figure:has(.t2) .s2')).display"
    assert browser.value_of(shown) != "none"
    browser.value_of("document.querySelector('figure:has(.t2) .t2').click()")
    assert browser.value_of(shown) == "none"


def test_the_answer_fits_on_the_first_screen(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["audit"], width=1280)
    end = "document.querySelector('.sides .couples').getBoundingClientRect().bottom"
    assert browser.value_of(end) < 900
