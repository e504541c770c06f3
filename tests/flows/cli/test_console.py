"""What the terminal shows: no name of a file steers it, and what the system refuses is one line
with the file and the fix."""

from __future__ import annotations

import errno
import io
import logging
import os
import re
import sys
from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from typing import Any, NoReturn

import pytest
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from flows.cli import main as cli
from flows.cli import options
from flows.cli.options import Screen, show_notices, start_over
from flows.failures import expected_line
from storage import files
from storage.errors import SourceError
from tests.storage import stores
from tests.tasks.report.report_records import evaluation, write

EVIL = "a\x1b[2J\x07\x9b\udcff\u202eb.png"
SEEN = r"a\x1b[2J\x07\x9b\xff\u202eb.png"


def in_a_table(console: Console) -> None:
    table = Table(EVIL)
    table.add_row(EVIL)
    console.print(table)


WAYS: dict[str, Callable[[Console], None]] = {
    "plain": lambda console: console.print(EVIL, markup=False),
    "with markup": lambda console: console.print(f"[bold]{escape(EVIL)}[/]"),
    "facts": lambda _console: options.show_facts(EVIL, {"file": EVIL}),
    "a table": in_a_table,
}


@pytest.mark.parametrize("name", WAYS)
def test_no_name_of_a_file_steers_the_terminal(name: str, monkeypatch: pytest.MonkeyPatch):
    """Colours are our own, and go through."""
    file = io.StringIO()
    screen = Screen(file=file, width=200, force_terminal=True, color_system="truecolor")
    monkeypatch.setattr(options, "out", screen)
    WAYS[name](screen)
    printed = re.sub(r"\x1b\[[0-9;]*m", "", file.getvalue())
    assert SEEN in printed
    for steering in ("\x1b[2J", "\x07", "\x9b", "\u202e", "\udcff"):
        assert steering not in printed
    printed.encode()


def test_errors_are_one_line_whatever_a_file_is_called(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        cli._fail(SourceError(f"x\nerror: {EVIL} is not there"), cli.BAD_USAGE)
    assert capsys.readouterr().err == rf"error: x\nerror: {SEEN} is not there" + "\n"


def test_notices_are_printable(capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    """Prefect's own handler, if an earlier test set it up, writes to another place."""
    show_notices()
    monkeypatch.setattr(logging.getLogger("palimpsest"), "propagate", False)
    logging.getLogger("palimpsest").warning("waiting for %s", EVIL)
    assert capsys.readouterr().err.endswith(f"waiting for {SEEN}\n")


def test_a_path_that_is_not_utf8_is_refused_by_its_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(sys, "argv", ["palimpsest", "restore", "--input", "pictures\udcff"])
    with pytest.raises(SystemExit) as ended:
        cli._refuse_other_bytes(sys.argv[1:])
    assert ended.value.code == cli.BAD_USAGE
    assert r"pictures\xff is not UTF-8; rename it" in capsys.readouterr().err


def test_usage_errors_are_printable(palimpsest):
    said = palimpsest.refused("demo\x1b[2J")
    assert r"demo\x1b[2J" in said
    assert "\x1b[2J" not in said


COMMANDS = {
    "curate": "curate --store {job}",
    "pause": "campaign pause --store {job}",
    "export": "dataset export --store {job} --format webdataset --out {job}/export",
    "show": "dataset show --store {job} --out {job}/sheet.png",
    "report": "report {job} --out {job}/page.html",
    "compare": "compare {job} {job}-2 --out {job}/page.html",
}


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A job with pairs and an evaluation, and JOB-2 with another evaluation."""
    root = tmp_path_factory.mktemp("jobs") / "job"
    stores.store(root / "pairs", n_parts=1, size=8)
    write(root / "evaluation", *evaluation())
    write(root.with_name("job-2") / "evaluation", *evaluation(planted=4))
    return root


@pytest.mark.parametrize(
    ("command", "code"),
    list(zip(COMMANDS, cycle([errno.EROFS, errno.EACCES, errno.ENOSPC]), strict=False)),
)
def test_a_file_that_cannot_be_written_is_one_line(
    monkeypatch, palimpsest, job: Path, command: str, code: int
) -> None:
    """As on a device that is full or mounted read-only; permissions would not stop root."""

    def refused(path: Path, *_how: Any, **_options: Any) -> NoReturn:
        raise OSError(code, os.strerror(code), str(path))

    monkeypatch.setattr(files, "temporary_file", lambda folder, _c: refused(folder / ".tmp-1"))
    monkeypatch.setattr(Path, "mkdir", refused)
    exit_code, _said, complained = palimpsest(*COMMANDS[command].format(job=job).split())
    assert exit_code == 1
    assert complained.count("\n") == 1
    assert complained.startswith("error: ")
    assert str(job) in complained
    assert ".tmp-" not in complained
    assert any(fix in complained for fix in ("use a", "choose another", "ome space", "make room"))
    assert {path.name for path in job.iterdir()} == {"pairs", "evaluation"}


@pytest.mark.parametrize(
    "words", ["campaign status", "dataset verify", "curate", "report", "train", "evaluate"]
)
def test_a_name_that_is_too_long_is_one_line(palimpsest, tmp_path: Path, words: str) -> None:
    store = tmp_path / ("x" * 300)
    complained = palimpsest.refused(*words.split(), "--store", store, code=1)
    assert complained.splitlines()[-1].startswith(f"error: {store}")
    assert complained.endswith(
        "give a shorter name; most file systems take 255 bytes between slashes\n"
    )


def test_a_folder_that_cannot_be_deleted_is_named(monkeypatch, tmp_path: Path) -> None:
    def refused(_folder: Path) -> NoReturn:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), "store.json")

    monkeypatch.setattr("shutil.rmtree", refused)
    with pytest.raises(OSError, match="Read-only") as caught:
        start_over(tmp_path, {"pairs"}, option="--store")
    assert caught.value.filename == str(tmp_path)


def test_what_the_machine_has_no_more_of_is_said_whoever_met_it_first() -> None:
    """Dask's own error on its way out hides the system's."""

    def start() -> NoReturn:
        try:
            try:
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            finally:
                assert not Path()  # a clean-up that fails
        except AssertionError as error:
            raise RuntimeError("Nanny failed to start.") from error

    with pytest.raises(RuntimeError) as raised:
        start()
    said = expected_line(raised.value)
    assert said == "Too many open files; raise the limit of open files: ulimit -n 4096"
    for unexpected in (RuntimeError("of ours"), KeyError("x"), OSError("no number")):
        assert expected_line(unexpected) is None
