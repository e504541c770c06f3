from __future__ import annotations

import io
import logging
import re
import sys
from collections.abc import Callable

import pytest
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from flows.cli import main as cli
from flows.cli import options
from flows.cli.options import Screen, show_notices
from storage.errors import SourceError

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
