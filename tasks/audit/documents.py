"""Documents made from the record of an audit: JUnit XML for continuous integration, and a section
to paste into a model card."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from xml.etree import ElementTree as ET

from tasks.audit.tables import (
    NUMBERS,
    accuracy,
    attacked,
    base_of,
    change,
    estimated,
    headline,
    key_of,
    points,
    price_of,
    rate_text,
    share,
    side_of,
    with_ends,
)
from tasks.page.files import Record
from tasks.page.formats import NOTHING, number

SUITE = "palimpsest audit"
HEADING = "## Privacy: what this model leaks of its training images"
_NO_XML = re.compile(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_MARKDOWN = re.compile(r"([\\`*_\[\]<>|])")


def junit(record: Record) -> bytes:
    """JUnit XML: a test case per limit that was set; without any, one that passes per defence and
    attack. Cases that could not be decided, or were not run, are skipped."""
    cases = [*(_limits(record) if record["checks"] else _attacks(record))]
    counts = {kind: sum(case.find(kind) is not None for case in cases)
              for kind in ("failure", "skipped")}  # fmt: skip
    head = {
        "name": SUITE,
        "tests": f"{len(cases)}",
        "failures": f"{counts['failure']}",
        "errors": "0",
        "skipped": f"{counts['skipped']}",
        "time": f"{sum(record['seconds'].values()):.3f}",
    }
    root = ET.Element("testsuites")
    suite = ET.SubElement(root, "testsuite", head)
    _properties(suite, [(key, record[key]) for key in ("title", "command", "fingerprint")]
                + [("verdict", record["verdict"]["sentence"])])  # fmt: skip
    suite.extend(cases)
    ET.indent(root)
    return bytes(ET.tostring(root, encoding="utf-8", xml_declaration=True)) + b"\n"


def _limits(record: Record) -> Iterator[ET.Element]:
    for check in record["checks"]:
        case = _case(check["cell"], f"{check['condition']} ({check['attack']})", 0.0)
        value, limit = share(check["value"]), share(check["limit"])
        said = f"{check['attack']} on {check['cell']}: {value}, the limit is {limit}"
        _properties(case, [(key, check[key]) for key in ("value", "limit", "outcome")])
        if check["outcome"] == "fails":
            _told(case, "failure", f"{check['condition']} fails: {said}")
        elif check["outcome"] != "passes":
            _told(case, "skipped", f"{check['outcome']}: {said}, which its interval reaches")
        yield case


def _attacks(record: Record) -> Iterator[ET.Element]:
    for cell in record["cells"]:
        for attack in record["attacks"]:
            found = cell["attacks"].get(attack["name"]) or {}
            case = _case(cell["name"], attack["title"], found.get("seconds") or 0.0)
            ran = attacked(cell, attack["name"])
            if ran is None:
                why = found.get("why") or cell["failed"] or "it was not run"
                _told(case, "skipped", why)
            else:
                _properties(case, list(_measured(record, cell, attack)))
            yield case


def _measured(record: Record, cell: Record, attack: Record) -> Iterator[tuple[str, object]]:
    """Names and values of the numbers of an attack."""
    ran = attacked(cell, attack["name"]) or {}
    for side in ("found_at", "good_at"):
        for rate in record["rates"] if ran[side] else ():
            found = estimated(ran[side].get(key_of(rate)))
            for end, value in zip(("", " low", " high"), found, strict=True):
                yield f"{side} {key_of(rate)}{end}", value
    yield from ((key, ran[key]) for key in NUMBERS)
    yield f"test {price_of(record)}", accuracy(cell)[0]


def _case(cell: str, name: str, seconds: float) -> ET.Element:
    names = {"classname": _clean(f"{SUITE}.{cell}"), "name": _clean(name)}
    return ET.Element("testcase", names | {"time": f"{seconds:.3f}"})


def _properties(of: ET.Element, values: Sequence[tuple[str, object]]) -> None:
    """Values as properties, those that are not known left out."""
    properties = ET.SubElement(of, "properties")
    for name, value in values:
        if value is not None:
            ET.SubElement(properties, "property", {"name": name, "value": _clean(f"{value}")})


def _told(case: ET.Element, kind: str, message: str) -> None:
    ET.SubElement(case, kind, {"message": _clean(message)})


def _clean(text: str) -> str:
    """The text without letters that XML cannot hold."""
    return _NO_XML.sub("�", text)


def model_card(record: Record) -> str:
    """A section of Markdown for a model card: the verdict, the attacks, the defences, and what the
    numbers do not cover."""
    base = base_of(record)
    over = f"{record['n_victims']} networks" if record["n_victims"] > 1 else "the images"
    uncovered = (*record["does_not_cover"], *(f"Left out: {text}" for text in record["left_out"]))
    parts = [
        HEADING,
        _text(record["verdict"]["sentence"]),
        "**What each attack gets** of the training images, by rate of false positives: the "
        "share of decoys, images that the network never saw, that it takes for training images. "
        f"Brackets: 95 % intervals over {over}.",
        _attacks_markdown(record, base),
        "**What defences change**, at " + rate_text(record["rate"]) + " false positives. Leak: "
        "the share that the best reconstruction attack brings back well enough to recognise.",
        _defences_markdown(record),
        "**What this does not cover**",
        "\n".join(f"- {_text(text)}" for text in uncovered),
        _made(record),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _attacks_markdown(record: Record, base: Record) -> str:
    heads = ["Attack", "It has", "It gives", *(rate_text(rate) for rate in record["rates"])]
    rows = []
    for attack in record["attacks"]:
        ran = attacked(base, attack["name"])
        gives = "pictures" if attack["kind"] == "reconstruction" else "who is a member"
        about = [_text(attack["title"]), _text(attack["knows"]), gives]
        shares = (ran or {}).get(side_of(attack["kind"])) or {}
        rows.append([*about, *(_share(shares.get(key_of(rate))) for rate in record["rates"])])
    return _table(heads, rows, 3)


def _share(found: Record | None) -> str:
    return with_ends(share, estimated(found))


def _defences_markdown(record: Record) -> str:
    members = [attack for attack in record["attacks"] if attack["kind"] == "membership"]
    heads = ["Defence", "Leak", "Effect", *(_text(attack["title"]) for attack in members)]
    rows = []
    for cell in record["cells"]:
        priced = [with_ends(share, accuracy(cell)), with_ends(points, change(cell))]
        told = [with_ends(share, headline(record, cell, attack)) for attack in members]
        name = _text(cell["name"])
        if cell["failed"]:
            name += f" (no numbers: {_text(cell['failed'])})"
        effect = _text((cell["effect"] or {}).get("word", NOTHING))
        rows.append([name, _share(cell["leak"]), effect, *told, *priced])
    return _table([*heads, f"Test {price_of(record)}", "Change, points"], rows, 1)


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]], n_left: int) -> str:
    """A Markdown table whose first columns are to the left, the others to the right."""
    rules = [":--" if k < n_left else "--:" for k in range(len(heads))]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (heads, rules, *rows))


def _made(record: Record) -> str:
    facts = [
        f"{record['n_victims']} x {record['n_images']} training images",
        f"made with {_code(number(record['command']))}",
        f"fingerprint {_code(number(record['fingerprint']))}",
        _text(number(record["created"])),
    ]
    return f"Measured with Palimpsest: {'; '.join(fact for fact in facts if fact != NOTHING)}."


def _text(text: object) -> str:
    """Text in which nothing is Markdown or HTML, on one line."""
    return _MARKDOWN.sub(r"\\\1", " ".join(str(text).split())).replace("\\<", "&lt;")


def _code(text: str) -> str:
    """Text between as many backquotes as it needs."""
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence, line = "`" * (longest + 1), " ".join(text.split())
    return f"{fence} {line} {fence}" if longest else f"{fence}{line}{fence}"
