"""What the system refuses ends a command in one line with the file and the fix."""

from __future__ import annotations

import errno
import os
from itertools import cycle
from pathlib import Path
from typing import Any, NoReturn

import pytest

from flows.cli.options import start_over
from flows.failures import expected_line
from storage import files
from tests.storage import stores
from tests.tasks.report.report_records import evaluation, write

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
