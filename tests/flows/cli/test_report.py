"""`palimpsest report` and `palimpsest compare`, from the words to the files."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tasks.report.report_records import evaluation, write


def test_a_report_is_rebuilt_from_a_folder(palimpsest, tmp_path: Path) -> None:
    folder = write(tmp_path / "run" / "evaluation", *evaluation())
    assert str(folder / "report.html") in palimpsest.done("report", str(tmp_path / "run")).replace(
        "\n", ""
    )
    page = tmp_path / "page.html"
    palimpsest.done("report", str(folder), "--out", str(page))
    assert page.read_text() == (folder / "report.html").read_text()
    assert (tmp_path / "report-data" / "methods.csv").is_file()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["report", "{a}", "--store", "{a}"], "leave out --store"),
        (["report", "{a}", "--set", "seed=1"], "leave out --store, --preset and --set"),
        (["report", "--out", "page.html"], "goes with a folder"),
        (["report", "{empty}"], "has no finished evaluation"),
        (["report", "{old}"], "version 2, expected"),
        (["compare", "{a}"], "at least two folders"),
        (["compare", "{a}", "{a}"], "is given twice"),
        (["compare", "{a}", "{b}", "--out", "page.pdf"], "does not end in .html"),
    ],
)
def test_bad_usage_is_said_in_one_line(
    palimpsest, monkeypatch, tmp_path: Path, words: list[str], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    record, pictures = evaluation()
    write(tmp_path / "a", record, pictures)
    write(tmp_path / "b", record, pictures)
    write(tmp_path / "old", record | {"version": 2}, pictures)
    (tmp_path / "empty").mkdir()
    places = {name: str(tmp_path / name) for name in ("a", "b", "old", "empty")}
    shown = palimpsest.refused(*[word.format(**places) for word in words])
    assert said in shown
    assert not list(tmp_path.rglob("*.html"))


def test_runs_are_compared(palimpsest, tmp_path: Path) -> None:
    write(tmp_path / "a", *evaluation())
    write(tmp_path / "b", *evaluation(planted=4))
    out = tmp_path / "pages" / "ab.html"
    words = ["compare", str(tmp_path / "a"), str(tmp_path / "b"), "--out", str(out)]
    shown = palimpsest.done(*words)
    assert "paired" in shown
    assert str(out) in shown
    assert out.is_file()
    assert out.with_suffix(".json").is_file()
