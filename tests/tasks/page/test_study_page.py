"""Pages of all kinds of studies: what is refused, and what lies beside them."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.tasks.page.kept import PAGES, SMALLEST, kept
from tests.tasks.page.study_pages import Made, StudyPages

EVIL = '</title><script>alert("x")</script>&amp;\'"'
TEXTS = ("title", "question", "paper", "command", "created", "machine", "where", "caption",
         "cannot", "claim", "theirs", "ours", "rule", "perceptual", "sentence",
         "about", "class")  # fmt: skip
kinds = pytest.mark.parametrize("pages", PAGES.values(), ids=PAGES)


def small(pages: StudyPages) -> Made:
    """A study of this kind."""
    return kept(pages.page.name)


@pytest.mark.parametrize(
    ("kind", "study"), [*SMALLEST.items(), ("study", "weight-decay"), ("audit", "audit-wide")]
)
def test_every_table_is_in_the_page_and_beside_it(kind: str, study: str, tmp_path: Path) -> None:
    record, pictures = kept(kind, study)
    page = PAGES[kind].page_of(tmp_path, (record, pictures))
    beside = {file.name for file in (tmp_path / f"{kind}-data").iterdir()}
    assert set(page.downloads) <= beside
    assert {f"{figure['name']}.csv" for figure in record["figures"]} <= beside
    assert len(PAGES[kind].rows_of(tmp_path, "cells")) == len(record["cells"])
    outcomes = [claim["outcome"] for claim in record["claims"]]
    if outcomes:
        assert [r["outcome"] for r in PAGES[kind].rows_of(tmp_path, "claims")] == outcomes
    assert page.images


@kinds
def test_a_large_table_is_only_beside_the_page_and_an_earlier_figure_is_not(
    pages: StudyPages, tmp_path: Path
) -> None:
    record, pictures = small(pages)
    pages.page_of(tmp_path, (record, pictures))
    gone = record["figures"].pop()["name"]
    beside = tmp_path / f"{pages.page.name}-data" / f"{gone}.csv"
    assert beside.exists()
    few = StudyPages(replace(pages.page, most_inline=200))
    page = few.page_of(tmp_path, (record, pictures))
    assert not beside.exists()
    assert "cells.csv" not in page.downloads
    assert "rows, only beside this page" in page.prose
    assert few.rows_of(tmp_path, "cells")


@kinds
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"kind": "pie"}, "is of kind 'pie'; expected one of"),
        ({"name": "../up"}, "a figure is named '../up'; expected letters"),
        ({"name": "cells"}, "a figure is named 'cells'"),
        ({}, "expected letters"),  # of the name of another
    ],
)
def test_a_figure_that_is_none_is_refused(
    pages: StudyPages, changes: dict[str, Any], said: str
) -> None:
    record, pictures = small(pages)
    record["figures"].append(record["figures"][0] | changes)
    with pytest.raises(ValueError, match=re.escape(said)):
        pages.page.render(record, pictures)


@kinds
@pytest.mark.parametrize(
    ("record", "pictures", "said"),
    [
        (None, None, "has no NAME.json; run `palimpsest"),
        ("{", None, "is not JSON"),
        ("[]", None, "is a list, expected a JSON object"),
        ('{"schema": "palimpsest-NAME", "version": 9}', None, "version 9, expected"),
        ("made", None, "has no NAME-pictures.npz"),
        ("made", "PK", "cannot be read"),
    ],
)
def test_what_is_no_study_is_refused(
    pages: StudyPages, tmp_path: Path, record: str | None, pictures: str | None, said: str
) -> None:
    name = pages.page.name
    text = json.dumps(small(pages)[0]) if record == "made" else record
    for file, content in ((f"{name}.json", text), (f"{name}-pictures.npz", pictures)):
        if content is not None:
            (tmp_path / file).write_text(content.replace("NAME", name))
    with pytest.raises(ValueError, match=said.replace("NAME", name)):
        pages.page.write(tmp_path)
    assert not (tmp_path / f"{name}.html").exists()


def _spoil(value: Any) -> None:
    """Puts markup behind every text of a record that is for people."""
    if isinstance(value, list):
        for item in value:
            _spoil(item)
    elif isinstance(value, dict):
        for key, item in value.items():
            if key in TEXTS and isinstance(item, str):
                value[key] = item + EVIL
            _spoil(item)


@kinds
def test_names_are_text_not_markup(pages: StudyPages, tmp_path: Path) -> None:
    record, pictures = small(pages)
    _spoil(record)
    record |= {"settings": {EVIL: EVIL}, "name": EVIL, "preset": EVIL}
    if pages.page.name in ("study", "audit"):
        for cell in record["cells"]:
            cell["name"] += EVIL
    page = pages.page_of(tmp_path, (record, pictures))
    text = "".join(page.text)
    assert text.count(EVIL) > 20
    assert all(claim["claim"] in text for claim in record["claims"])
