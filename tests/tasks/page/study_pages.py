"""Pages of made-up studies: writing one, and reading it, its tables and its figures."""

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


def claims(*where: str) -> list[dict[str, Any]]:
    """A claim of each outcome but one, found `where` in the paper."""
    said = (
        {"claim": "More classes, more good ones", "theirs": "101 against 40",
         "ours": "12 against 3", "rule": "more good at 10 classes than at 2", "outcome": "holds"},
        {"claim": "Weight decay helps", "theirs": "higher", "ours": 0.25,
         "rule": "the best decay beats both baselines", "outcome": "does not hold"},
        {"claim": "5,000 images", "theirs": "some", "ours": None,
         "rule": "good ones among 5,000", "outcome": "undecided"},
    )  # fmt: skip
    return [{**one, "where": place} for one, place in zip(said, where, strict=True)]


def header(kind: str, name: str, paper: str) -> dict[str, Any]:
    """What every record of a study begins with."""
    return {
        "schema": f"palimpsest-{kind}", "version": 2, "name": name, "preset": "test",
        "title": "More classes, more pictures", "question": "Do more classes leak more?",
        "paper": paper, "command": f"palimpsest study {name} --set x=<1>",
        "created": "1 May", "machine": "a toaster", "fingerprint": "c" * 64,
    }  # fmt: skip


@dataclass(frozen=True)
class Edge:
    """A study that was changed, or asked for otherwise, and what its page says then."""

    change: Callable[[dict[str, Any], Arrays], None]
    asked: dict[str, Any]
    said: tuple[str, ...]


class Edges(list[Edge]):
    """Changes of a study, collected as they are defined."""

    def says(self, *said: str, **asked: Any) -> Callable[[Any], Any]:
        def collect(change: Any) -> Any:
            self.append(Edge(change, asked, said))
            return change

        return collect

    def parametrised(self) -> pytest.MarkDecorator:
        return pytest.mark.parametrize("edge", self, ids=lambda edge: edge.change.__name__)


def written(pages: StudyPages, make: Callable[[], Made]) -> tuple[Any, Any]:
    """Two fixtures for the tests of a module: a made-up study, and the folder of its page."""

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
