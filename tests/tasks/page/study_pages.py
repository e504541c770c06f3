"""Pages of studies: writing one, and reading it, its tables and its figures."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tasks.page.study_page import StudyPage
from tests.tasks.pages import Page

Arrays = dict[str, npt.NDArray[Any]]
Made = tuple[dict[str, Any], Arrays]
FORBIDDEN = ("http:", "https:", "url(", "@import", "<script", "<iframe")


@dataclass(frozen=True)
class StudyPages:
    """The files of one kind of study."""

    page: StudyPage

    def write(self, folder: Path, record: dict[str, Any], pictures: Arrays) -> Path:
        """The two files as the study leaves them; returns the folder."""
        folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(record, allow_nan=False)
        (folder / f"{self.page.name}.json").write_text(text)
        np.savez(folder / f"{self.page.name}-pictures.npz", allow_pickle=False, **pictures)
        return folder

    def page_of(self, folder: Path, made: Made) -> Page:
        """The page of a record, checked for what every page keeps to: it asks nothing of the
        network, has tables that lie beside it, too, and is what `render` gives."""
        path = self.page.write(self.write(folder, *made))
        page, source = Page(path), path.read_text()
        page.check()
        assert [text for text in FORBIDDEN if text in source] == []
        assert self.page.render(*made)[0] == source
        data = (folder / f"{self.page.name}-data").iterdir()
        beside = {file.name: file.read_bytes().decode() for file in data}
        assert page.downloads.items() <= beside.items()
        assert re.search(r"\b(nan|inf|None(?! is good)|null)\b", page.prose) is None
        return page

    def rows_of(self, folder: Path, name: str) -> list[dict[str, str]]:
        """The rows of a table beside the page."""
        text = (folder / f"{self.page.name}-data" / f"{name}.csv").read_bytes().decode()
        return list(csv.DictReader(io.StringIO(text, newline="")))

    def figure_of(self, folder: Path, name: str) -> str:
        """The page's source from the heading of a figure to its end."""
        source = (folder / f"{self.page.name}.html").read_text()
        return source.partition(f'id="figure-{name}"')[2].partition("</figure>")[0]


def written(pages: StudyPages, make: Callable[[], Made]) -> tuple[Any, Any]:
    """Two fixtures for the tests of a module: a study, and the folder of its page."""

    @pytest.fixture(scope="module")
    def made() -> Made:
        return make()

    @pytest.fixture(scope="module")
    def folder(made: Made, tmp_path_factory: pytest.TempPathFactory) -> Path:
        found = tmp_path_factory.mktemp(pages.page.name)
        pages.page_of(found, made)
        return found

    return made, folder


def floats(pattern: str, text: str) -> list[float]:
    """The numbers that `pattern` finds."""
    return [float(found) for found in re.findall(pattern, text)]
