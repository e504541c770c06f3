"""The console of the commands: lines, facts in two columns, tables."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Container, Mapping, Sequence
from typing import Any

from rich.console import Console, OverflowMethod
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from storage.errors import shown


class Screen(Console):
    """The terminal, where every text is printed as `storage.errors.shown` makes it: the name of a
    file neither clears the screen nor ends the command because it is not UTF-8."""

    def render_str(self, text: str, **how: Any) -> Text:
        """A text that is printed, or in a table, as it will appear."""
        return super().render_str(shown(text, keep="\n\t"), **how)


class _Notices(logging.Handler):
    """Lines on the standard error of the moment, so that a bar there makes room for them."""

    def emit(self, record: logging.LogRecord) -> None:
        sys.stderr.write(shown(self.format(record), keep="\n") + "\n")


def say(screen: Console, text: str) -> None:
    """A line as it is, however long."""
    screen.print(text, markup=False, highlight=False, soft_wrap=True)


def print_json(screen: Console, value: Any) -> None:
    """A JSON value for programs."""
    say(screen, json.dumps(value, indent=1))


def show_notices() -> None:
    """Show from now on what a campaign waits for, repeats or gives up."""
    logger = logging.getLogger("palimpsest")
    if any(isinstance(handler, _Notices) for handler in logger.handlers):
        return
    handler = _Notices()
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
    logger.addHandler(handler)


def show_facts(console: Console, title: str, facts: Mapping[str, Any]) -> None:
    """`title`, then one line per fact."""
    console.print(f"[bold]{escape(title)}[/]", soft_wrap=True)
    width = max(len(name) for name in facts) + 2
    for name, value in facts.items():
        text = f"  {name.replace('_', ' '):{width}}{fact_text(value)}"
        console.print(text, markup=False, soft_wrap=True)


def show_images(console: Console, split: str, facts: Mapping[str, str]) -> None:
    """Facts of what was read of a source (`ImageSet.facts`), before work starts on it."""
    show_facts(console, f"Images ({split})", facts)


def show_rows(
    console: Console,
    rows: Sequence[Mapping[str, Any]],
    table: Table,
    *,
    left: Container[str] = ("method",),
    overflow: OverflowMethod = "ellipsis",
) -> None:
    """Rows under the columns of the last one first, numbers on the right; nothing of no rows."""
    names = list(dict.fromkeys(name for row in reversed(rows) for name in row))
    for name in names:
        table.add_column(name, justify="left" if name in left else "right", overflow=overflow)
    for row in rows:
        table.add_row(*(row.get(name, "") for name in names))
    if rows:
        console.print(table)


def fact_text(value: Any) -> str:
    """A number as people read it."""
    if isinstance(value, float):
        return f"{value:,.3f}".rstrip("0").rstrip(".")
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def size_text(n_bytes: float) -> str:
    """`1.4 GB`, in powers of 1000."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if n_bytes < 1000:
            return f"{n_bytes:.0f} {unit}" if unit == "bytes" else f"{n_bytes:.1f} {unit}"
        n_bytes /= 1000
    return f"{n_bytes:,.1f} TB"
