"""The page of an attack on InstaHide: its numbers are the record's, its figures those of the graph,
and it works in a browser, narrow and wide."""

from __future__ import annotations

import csv
import io
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from flows.families.instahide.attack import outcome, screen_rows
from tasks.families.instahide.attack import METHODS
from tasks.families.instahide.report import (
    COLUMNS_OF_CSV,
    DRAWN,
    clear_images,
    instahide_page,
    tiles,
    write_images,
)
from tasks.families.instahide.results import WHY, record_of
from tests.tasks.browser import BINARY, Browser, check_charts, check_that_it_works
from tests.tasks.families.instahide.challenges import RING, TAIL, attacked, normal_challenge
from tests.tasks.pages import Page

CONTEXT = {"command": "palimpsest attack instahide c", "created": "2026-01-01", "n_shown": 40,
           "versions": {"code": "x"}}  # fmt: skip


def made(folder: Path, edges: object, *, k_pub: int = 2, **settings: object) -> Path:
    path = normal_challenge(folder / "c", edges, k_pub=k_pub)  # type: ignore[arg-type]
    job, prepared, scored = attacked(path, **settings)
    record = record_of(job, prepared, scored)
    context = CONTEXT | {"outcome": outcome(record)}
    page = instahide_page(record, prepared, scored, context)
    (folder / "report.html").write_text(page)
    return folder / "report.html"


def many(n: int, m: int) -> list[list[int]]:
    """Edges of n images of which each has some."""
    rng = np.random.default_rng(1)
    ring = [[k, (k + 1) % n] for k in range(n)]
    return [*ring, *(rng.choice(n, 2, replace=False).tolist() for _ in range(m - n))]


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    with pytest.MonkeyPatch.context() as patch:

        def fails(*_words: object) -> None:
            raise ValueError("its public images are too few")

        patch.setitem(METHODS, "practical", replace(METHODS["practical"], run=fails))
        of = tmp_path_factory.mktemp
        return {
            "few": made(of("few"), TAIL, n_private=8, method="both"),
            "many": made(of("many"), many(DRAWN + 3, 90)),
            "plain": made(of("plain"), RING, k_pub=0),
        }


def test_numbers_are_the_records(pages: dict[str, Path]) -> None:
    page = Page(pages["few"])
    page.check()
    row = [cell.strip() for cell in page.rows["exact"]]
    assert row[1:4] == ["5 of 8", "5", "0"]
    assert row[6] == "11 of 11"
    assert "its public images are too few" in page.rows["practical"][1]
    assert WHY["ambiguous"] in page.prose
    assert len(pages["few"].read_bytes()) < 1_000_000


def test_many_images_are_a_matrix(pages: dict[str, Path]) -> None:
    page = Page(pages["many"])
    page.check()
    assert "Encodings by pairs of images" in [image["alt"] for image in page.images]
    assert "<svg" not in pages["many"].read_text()


def test_without_public_images_absolute_values_are_shown(tmp_path: Path) -> None:
    path = normal_challenge(tmp_path / "c", RING, k_pub=0)
    _job, prepared, (found,) = attacked(path)
    cells = tiles(found, prepared, 40)
    assert all(int(cell["picture"].min()) >= 127 for cell in cells)
    assert all(cell["label"] == "exact" for cell in cells)


def test_files_of_images(tmp_path: Path) -> None:
    _job, prepared, (found,) = attacked(normal_challenge(tmp_path / "c", TAIL))
    write_images(tmp_path, found, prepared)
    images = np.load(tmp_path / "images.npy", allow_pickle=False)
    assert (images.shape, images.dtype) == ((7, 3, 24, 24), np.float32)
    lost = np.flatnonzero(np.isnan(images).all((1, 2, 3)))
    assert len(lost) == 2
    pictures = sorted(p.name for p in (tmp_path / "images").iterdir())
    assert pictures == [f"{k:04}.png" for k in range(7) if k not in lost]
    with Image.open(tmp_path / "images" / pictures[0]) as shown:
        assert shown.size == (24, 24)
    rows = list(csv.DictReader(io.StringIO((tmp_path / "statuses.csv").read_text())))
    assert tuple(rows[0]) == COLUMNS_OF_CSV
    assert [row["status"] for row in rows].count("recovered") == 5
    assert [rows[k]["n_pixels_open"] for k in lost] == ["1728", "1728"]
    assert sum(int(row["n_encodings"]) for row in rows) == 2 * len(TAIL)
    clear_images(tmp_path)
    assert list((tmp_path / "images").iterdir()) == []
    assert not (tmp_path / "images.npy").exists()


def test_without_the_truth_there_are_no_scores(tmp_path: Path) -> None:
    path = normal_challenge(tmp_path / "c", RING)
    (path / "secret").rename(tmp_path / "elsewhere")
    job, prepared, scored = attacked(path)
    record = record_of(job, prepared, scored)
    assert "exact" not in screen_rows(record)[0]
    assert "originals" not in outcome(record)
    write_images(tmp_path, scored[0], prepared)
    assert (tmp_path / "statuses.csv").read_text().splitlines()[1].endswith(",0,,,,,")
    page = instahide_page(record, prepared, scored, CONTEXT | {"outcome": ""})
    (tmp_path / "r.html").write_text(page)
    Page(tmp_path / "r.html").check()
    _job, _prepared, again = attacked(path, truth=tmp_path / "elsewhere")
    assert again[0].n_exact == 5


@pytest.mark.skipif(not BINARY, reason="no chromium, chromium-browser or google-chrome here")
@pytest.mark.parametrize("name", ["few", "many", "plain"])
@pytest.mark.parametrize(("width", "dark"), [(1280, False), (390, True)])
def test_the_page_works_by_itself(
    browser: Browser, pages: dict[str, Path], name: str, width: int, dark: bool
) -> None:
    check_that_it_works(browser, pages[name], width=width, dark=dark)
    if name != "many":
        check_charts(browser, pages[name], width=width)
