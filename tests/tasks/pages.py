"""Reading a page that was made: its tags must nest, and its numbers are found again."""

from __future__ import annotations

import base64
import re
from html.parser import HTMLParser
from pathlib import Path

VOID = {"meta", "img", "br", "link", "input", "hr"}
STYLED = {"panels", "heat", "graph"}
"""Classes around a chart that give its letters their size and colour."""
FIRST_SCREEN = 140
"""Words before the first picture, with which it is still on a screen of 1280 x 800."""
DRAWN = {"line", "polyline", "polygon", "circle", "path"}


class Page(HTMLParser):
    """Checks that tags nest, and collects text, images, links, ids, downloads and table rows."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.open: list[str] = []
        self.classes: list[set[str]] = []
        self.n_bare_labels = 0
        self.n_first_words = 0
        self.text: list[str] = []
        self.images: list[dict[str, str | None]] = []
        self.addresses: list[str] = []
        self.ids: list[str] = []
        self.unnamed: list[str] = []
        self.downloads: dict[str, str] = {}
        self.rows: dict[str, list[str]] = {}
        self.method: str | None = None
        self.feed(page.read_text())
        assert self.open == []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        found = dict(attributes)
        self.addresses += [v for k, v in attributes if k in ("src", "href", "srcset") and v]
        self.ids += [found["id"]] if found.get("id") else []
        if tag == "img":
            if not self.images:
                self.n_first_words = len(self.prose.split())
            self.images.append(found)
        if tag == "a" and found.get("download"):
            content = (found["href"] or "").partition("base64,")[2]
            self.downloads[str(found["download"])] = base64.b64decode(content).decode()
        if found.get("role") in ("img", "region") and not found.get("aria-label"):
            self.unnamed.append(tag)
        if tag == "tr":
            self.method = found.get("data-method")
        if tag in ("td", "th") and self.method:
            self.rows.setdefault(self.method, []).append("")
        if tag not in VOID:
            self.open.append(tag)
            self.classes.append(set((found.get("class") or "").split()))
        if tag == "text" and not STYLED & set().union(*self.classes):
            self.n_bare_labels += 1

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        assert tag in DRAWN

    def handle_endtag(self, tag: str) -> None:
        self.classes.pop()
        assert self.open.pop() == tag, f"</{tag}> closes something else"

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.text.append(data)
        if self.method and self.rows.get(self.method) and "tr" in self.open:
            self.rows[self.method][-1] += data

    @property
    def prose(self) -> str:
        return re.sub(r"\s+", " ", " ".join(self.text))

    def check(self) -> None:
        """What every page keeps to: no request, links that lead somewhere, names for all."""
        for address in self.addresses:
            inside = address.startswith("#") and address[1:] in self.ids
            assert inside or address.startswith(("data:image/", "data:text/csv")) or (
                address == "data:,"
            ), address[:80]  # fmt: skip
        assert len(self.ids) == len(set(self.ids))
        assert all(image.get("alt") for image in self.images)
        assert self.unnamed == []
        assert self.n_bare_labels == 0, "labels of a chart have the size and colour of no style"
