"""`palimpsest compare`: several evaluations on one page, from a terminal.

A short piece of work on finished files, so no flow. Exit codes as everywhere.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from flows.cli.console import say
from flows.cli.options import out

report_app = typer.Typer()


@report_app.command(
    "compare",
    epilog="Examples: `palimpsest compare runs/a runs/b` · "
    "`palimpsest compare runs/plain runs/defended runs/larger --out pages/defence.html`",
)
def compare(
    runs: Annotated[
        list[Path],
        typer.Argument(help="Jobs' folders or evaluations' own; the first is compared with."),
    ],
    page: Annotated[
        Path,
        typer.Option("--out", help="The page; .json and -data/ with the CSVs come beside it."),
    ] = Path("compare.html"),
) -> None:
    """Put evaluations side by side: settings that differ, scores, differences with intervals."""
    from tasks.report.compare_page import compare_runs, difference_rows

    comparison, written = compare_runs(runs, page)
    _show(difference_rows(comparison))
    for path in written.values():
        say(out, str(path.absolute()))


def _show(rows: list[dict[str, str]]) -> None:
    if not rows:
        out.print("The runs have no method in common.")
        return
    table = Table(title="Difference from the first run, targets", title_justify="left")
    for name in rows[0]:
        table.add_column(name, justify="left" if name == "method" else "right")
    for row in rows:
        table.add_row(*(value for value in row.values()))
    out.print(table)
