"""Lines of a training log, for the tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tasks.training.loop import LOG


def read_log(out: Path) -> list[dict[str, Any]]:
    """The lines of the log in `out`, as they were written."""
    return [json.loads(line) for line in (out / LOG).read_bytes().splitlines()]
