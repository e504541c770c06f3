"""`palimpsest report` and `palimpsest compare`, from the words to the files."""

from __future__ import annotations

from pathlib import Path

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
