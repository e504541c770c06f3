"""The entry point of `palimpsest`: takes signals before anything slow is imported."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import NoReturn

from tasks.interruption import end_on_sigterm, interrupted_code, take_ctrl_c_alone


def main() -> NoReturn:
    """Import the command and run it."""
    end_on_sigterm()
    take_ctrl_c_alone()
    try:
        from flows.cli.main import main as run
    except BaseException:  # an import that is cut off may raise anything
        end_if_interrupted()
        raise
    run()


def end_if_interrupted() -> None:
    """End a command that was asked to, whatever its clean-up raised, and say how to go on.

    What is left of the command's processes is the guard's (`tasks.interruption`).
    """
    code = interrupted_code()
    if code is None:
        return
    with suppress(OSError):  # nobody may listen any more
        sys.stdout.flush()
        sys.stderr.write(resume_line() + "\n")
        sys.stderr.flush()
    os._exit(code)


def resume_line() -> str:
    """The line that an interrupted command ends with."""
    words = " ".join(word for word in sys.argv[1:] if word != "--fresh")
    return f"interrupted; nothing finished is lost. Resume with: palimpsest {words}"
