"""What a flow leaves on its Prefect page: a table of facts, and a picture.

Thin on purpose: which facts is the flows' business.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from prefect.artifacts import create_image_artifact, create_markdown_artifact, create_table_artifact


def leave_table(key: str, rows: list[dict[str, Any]], description: str) -> None:
    """A table artifact; `key` is lower-case words joined by dashes."""
    create_table_artifact(table=rows, key=key, description=description)


def leave_facts(key: str, facts: Mapping[str, Any], description: str) -> None:
    """A table artifact of names and values."""
    leave_table(key, [{"what": name, "value": value} for name, value in facts.items()], description)


def leave_picture(key: str, png: bytes, description: str) -> None:
    """An image artifact that needs no file server: the PNG is in the artifact itself."""
    url = "data:image/png;base64," + base64.b64encode(png).decode()
    create_image_artifact(image_url=url, key=key, description=description)


def leave_link(key: str, path: Path, description: str) -> None:
    """A note that says where on this machine a file is."""
    create_markdown_artifact(f"`{path.absolute()}`", key=key, description=description)
