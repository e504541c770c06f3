"""`palimpsest compare`: several evaluations on one page, from a terminal.

A short piece of work on finished files, so no flow. Exit codes as everywhere.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from flows.cli.console import say, show_rows
from flows.cli.options import command, out

report_app = typer.Typer()


@command(report_app, "compare")
def compare(
    runs: Annotated[
        list[Path],
        typer.Argument(help="Jobs' folders or evaluations' own; the first is compared with."),
    ],
    page: Annotated[
        Path, "--out", "The page; .json and -data/ with the CSVs come beside it."
    ] = Path("compare.html"),
) -> None:
    """Put evaluations side by side: settings that differ, scores, differences with intervals.

    Examples: `palimpsest compare runs/a runs/b` · `palimpsest compare runs/plain runs/defended
    runs/larger --out pages/defence.html`
    """
    from tasks.report.compare_page import compare_runs, difference_rows

    comparison, written = compare_runs(runs, page)
    if rows := difference_rows(comparison):
        table = Table(title="Difference from the first run, targets", title_justify="left")
        show_rows(out, rows, table)
    else:
        out.print("The runs have no method in common.")
    for path in written.values():
        say(out, str(path.absolute()))
