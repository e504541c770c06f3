"""Pages in a real browser: nothing is asked, nothing fails, everything shows."""

from __future__ import annotations

from pathlib import Path

import pytest

from tasks.report.compare import compare_runs
from tasks.report.page import write_report
from tests.tasks.audit import records
from tests.tasks.browser import IN_A_BROWSER, Browser, check_charts, check_that_it_works
from tests.tasks.page.kept import PAGES, kept
from tests.tasks.report.report_records import evaluation, write

pytestmark = IN_A_BROWSER
STUDIES = {"study": "weight-decay", "recovery": "autoencoder", "inversion": "inversion"}
HIDDEN = {"study": 2, "recovery": 2, "inversion": 1, "report": 4, "audit": 2}
"""A line of the page."""
COLUMNS = """getComputedStyle(document.querySelector('.of-rates .matrix'))
    .gridTemplateColumns.split(' ').length"""


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    found = {
        name: PAGES[name].page.write(PAGES[name].write(folder / name, *kept(name, study)))
        for name, study in STUDIES.items()
    }
    for make in (records.audit, records.weights, records.nothing):
        kind = PAGES["audit"]
        found[make.__name__] = kind.page.write(kind.write(folder / make.__name__, *make()))
    found["report"] = write_report(write(folder / "a", *evaluation()), {})
    stopped = evaluation(outcomes=(3, 3, 3))
    found["stopped"] = write_report(write(folder / "b", *stopped), {})
    found["compare"] = folder / "compare.html"
    compare_runs([folder / "a", folder / "b"], found["compare"])
    return found


@pytest.mark.parametrize("name", [*HIDDEN, "weights", "nothing", "stopped", "compare"])
@pytest.mark.parametrize(("width", "dark"), [(1280, False), (390, True)])
def test_a_page_works_by_itself(
    browser: Browser, pages: dict[str, Path], name: str, width: int, dark: bool
) -> None:
    n_images = check_that_it_works(browser, pages[name], width=width, dark=dark)
    assert (n_images > 0) == (name not in ("compare", "nothing"))


@pytest.mark.parametrize("name", [*HIDDEN, "weights", "nothing", "compare"])
@pytest.mark.parametrize(("width", "columns"), [(1280, 6), (390, 2)])
def test_charts_can_be_read(
    browser: Browser, pages: dict[str, Path], name: str, width: int, columns: int
) -> None:
    check_charts(browser, pages[name], width=width)
    if name == "recovery":
        assert browser.value_of(COLUMNS) == columns


@pytest.mark.parametrize("name", HIDDEN)
def test_a_line_can_be_hidden_without_a_script(
    browser: Browser, pages: dict[str, Path], name: str
) -> None:
    browser.open(pages[name], width=1280)
    k = HIDDEN[name]
    shown = f"getComputedStyle(document.querySelector('figure:has(.t{k}) .s{k}')).display"
    assert browser.value_of(shown) != "none"
    browser.value_of(f"document.querySelector('figure:has(.t{k}) .t{k}').click()")
    assert browser.value_of(shown) == "none"


def test_the_answer_of_an_audit_fits_on_the_first_screen(
    browser: Browser, pages: dict[str, Path]
) -> None:
    browser.open(pages["audit"], width=1280)
    end = "document.querySelector('.sides .couples').getBoundingClientRect().bottom"
    assert browser.value_of(end) < 900
