"""The writer of all pages: templates, filters that turn numbers into words, one file that asks
nothing of the network."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tasks.page import formats
from tasks.page.charts import marker
from tasks.page.pictures import data_uri

TEMPLATES = Path(__file__).parent / "templates"
FORMATS = ("percent", "score", "duration", "interval", "number", "count", "runs", "short", "power",
           "decibels", "whole")  # fmt: skip


def page_html(template: str, filters: Mapping[str, Any], **values: Any) -> str:
    """The page that `template` makes of `values`.

    All of `FORMATS` are filters, and `uri` of a picture; `filters` come on top. Raises
    jinja2.UndefinedError for a value that is not there.
    """
    import jinja2

    found = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.filters |= {name: getattr(formats, name) for name in FORMATS}
    found.filters |= {"uri": data_uri, **filters}
    found.globals |= {"marker": marker}
    return found.get_template(template).render(**values)
