"""The page of an audit: audit.json and its pictures as one HTML file (docs/pages.md).

The answer stands first: the verdict, the numbers that it rests on, and the images that leak most
beside the decoys that came nearest.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tasks.audit.figures import KINDS
from tasks.audit.tables import (
    EXPOSED,
    NUMBERS,
    SIDES,
    Estimated,
    accuracy,
    attacked,
    base_of,
    change,
    estimated,
    headline,
    key_of,
    membership,
    own_tables,
    points,
    price_of,
    rate_text,
    share,
    side_of,
)
from tasks.audit.verdict import does
from tasks.page.charts import letter
from tasks.page.files import Arrays, Record
from tasks.page.formats import brackets, fixed, plural
from tasks.page.pictures import data_uri
from tasks.page.study_page import StudyPage, Tables

N_FIRST, N_NEAR = 8, 4
"""Most exposed images, and nearest decoys, on the first screen."""
N_LISTED = 8
"""Most exposed images whose reasons are not folded away."""

IDENTIFIED = ("identified", "identified_decoys")

Pair = dict[str, Any]


def words(record: Record, pictures: Arrays, _tables: Tables) -> dict[str, Any]:
    """Values that only this page shows."""
    exposed, decoys = _exposed(record, pictures), _decoys(record, pictures)
    grid, reasons = _grid(record)
    stats = (_leak(record), _told(record), _defence(record))
    return {
        "stats": [stat | {"what": stat["what"].replace(" %", "\u00a0%")} for stat in stats if stat],
        "n_failing": sum(check["outcome"] == "fails" for check in record["checks"]),
        "rate": rate_text(record["rate"]),
        "threshold": f"{record['good_threshold']:g}",
        "several": record["n_victims"] > 1,
        "first": exposed[:N_FIRST],
        "near": decoys[:N_NEAR],
        "exposed": {"shown": exposed[:N_LISTED], "folded": exposed[N_LISTED:]},
        "groups": _groups(record),
        "has_accuracy": any(accuracy(cell)[0] is not None for cell in record["cells"]),
        "has_change": any(change(cell)[0] is not None for cell in record["cells"]),
        "grid": grid,
        "reasons": reasons,
        "numbers": _numbers(record),
        "titles": {attack["name"]: attack["title"] for attack in record["attacks"]},
        "run": [("networks per defence", record["n_victims"]),
                ("training images of each", record["n_images"]),
                (f"images that {price_of(record)} is measured on", record["n_tests"])],
        "price": price_of(record),
    }  # fmt: skip


def shown(found: Estimated) -> dict[str, str]:
    """A share as text, and its interval in brackets."""
    value, low, high = found
    return {"value": share(value), "ends": brackets(share, low, high)}


def changed(found: Estimated) -> dict[str, str]:
    """A change of accuracy in points, and its interval in brackets."""
    value, low, high = found
    return {"value": points(value), "ends": brackets(points, low, high)}


def _leak(record: Record) -> dict[str, str] | None:
    leak = base_of(record)["leak"]
    if leak is None:
        return None
    attack = next(a for a in record["attacks"] if a["name"] == leak["attack"])
    at = rate_text(record["rate"])
    what = "of the training images come back well enough to recognise, from nothing but "
    return {
        **shown(estimated(leak)),
        "kind": "leak",
        "what": f"{what}{attack['knows']}, at {at} false positives ({attack['title']})",
    }


def _told(record: Record) -> dict[str, str] | None:
    title, found = membership(record, base_of(record))
    if found[0] is None:
        return None
    at = rate_text(record["rate"])
    what = f"are told from images that the network never saw, at {at} false positives"
    return {**shown(found), "kind": "membership", "what": f"{what}; guessing gets {at} ({title})"}


def _defence(record: Record) -> dict[str, str] | None:
    """The defence that the verdict names, or that there is none."""
    base, name = base_of(record), record["verdict"].get("defence")
    others = [
        c for c in record["cells"] if c["kind"] == "defence" and c["leak"] and not c["failed"]
    ]
    if base["leak"] is None or not base["leak"]["mean"] or not others:
        return None
    for cell in others:
        if cell["name"] == name:
            what = f"are left with {name}, the cheapest defence that {does(cell)}: "
            if record["no_price"]:
                what = f"are left with {name}, the defence that leaves least: "
            return _left(cell, what + price(record, cell))
    least = min(others, key=lambda cell: float(cell["leak"]["mean"]))
    among = plural(len(others), "defence", "defences")
    what = f"are left with {least['name']}, which leaks least of {among}; "
    return _left(least, what + price(record, least))


def _left(cell: Record, what: str) -> dict[str, str]:
    return {**shown(estimated(cell["leak"])), "kind": "defence", "what": what}


def price(record: Record, cell: Record) -> str:
    """The change of accuracy, or of what else is paid with, that a defence comes with."""
    found, of = changed(change(cell)), price_of(record)
    if change(cell)[0] is None:
        return f"its price in {of} is {record['no_price'] or 'not known'}"
    return f"{of} {found['value']} points {found['ends']}".rstrip()


def _exposed(record: Record, pictures: Arrays) -> list[Pair]:
    """The most exposed images with what came back of each."""
    rows, good = record["exposed"], record["good_threshold"]
    pairs = _pairs(pictures, "exposed", len(rows), [f"{entry['image_id']}" for entry in rows])
    return [
        pair
        | {key: entry.get(key) for key in EXPOSED}
        | {"score": fixed(entry["mean_ssim"], 2), "good": (entry["mean_ssim"] or 0.0) > good}
        for pair, entry in zip(pairs, rows, strict=True)
    ]


def _decoys(record: Record, pictures: Arrays) -> list[Pair]:
    """The decoys that came nearest, with the picture that is nearest to each."""
    rows, good = record["decoys_shown"], record["good_threshold"]
    pairs = _pairs(pictures, "decoys", len(rows), [f"{entry['image_id']}" for entry in rows])
    return [
        pair | {"score": fixed(entry["ssim"], 2), "good": (entry["ssim"] or 0.0) > good}
        for pair, entry in zip(pairs, rows, strict=True)
    ]


def _pairs(pictures: Arrays, side: str, n: int, names: Sequence[str]) -> list[Pair]:
    """Originals and what came back as URLs, "" for a black picture, which is none.

    Raises ValueError if there are not as many as the record says.
    """
    both = [pictures.get(f"{side}/{kind}", ()) for kind in ("original", "reconstruction")]
    if not len(both[0]) == len(both[1]) == n:
        raise ValueError(
            f"the record shows {n} images of {side}, but the pictures hold {len(both[0])} "
            f"originals and {len(both[1])} reconstructions; make the record again"
        )
    return [
        {
            "original": data_uri(original),
            "uri": data_uri(found) if found.any() else "",
            "alt": f"{'Training image' if side == 'exposed' else 'Decoy'} {name}",
        }
        for original, found, name in zip(*both, names, strict=True)
    ]


def _groups(record: Record) -> list[dict[str, Any]]:
    """Attacks by what they give, those that give pictures first."""
    titles = {
        "reconstruction": "Come back as pictures",
        "membership": "Told from images it never saw",
    }
    found = [
        {"title": title, "attacks": [a for a in record["attacks"] if a["kind"] == kind]}
        for kind, title in titles.items()
    ]
    return [group for group in found if group["attacks"]]


def _grid(record: Record) -> tuple[list[dict[str, Any]], list[str]]:
    """Rows of the table of defences and attacks, and the reasons why numbers are missing."""
    reasons: dict[str, int] = {}
    attacks = [attack for group in _groups(record) for attack in group["attacks"]]
    rows = []
    for cell in record["cells"]:
        ran = any(attacked(cell, attack["name"]) for attack in attacks)
        rows.append(
            {
                "cell": cell,
                "letter": letter(cell["number"]),
                "accuracy": shown(accuracy(cell)),
                "change": changed(change(cell)),
                "squares": [_square(record, cell, attack, reasons) for attack in attacks],
                "empty": bool(cell["failed"]) and not ran,
            }
        )
    return rows, list(reasons)


def _square(
    record: Record, cell: Record, attack: Record, reasons: dict[str, int]
) -> dict[str, Any]:
    found = headline(record, cell, attack)
    if found[0] is not None:
        return {**shown(found), "share": f"{min(1.0, max(0.0, found[0])):.4f}"}
    why = (cell["attacks"].get(attack["name"]) or {}).get("why") or "it was not run"
    if cell["failed"]:
        return {"share": None, "reason": None}
    return {"share": None, "reason": reasons.setdefault(str(why), len(reasons) + 1)}


def _numbers(record: Record) -> list[dict[str, Any]]:
    """Every number of every attack that ran, at all false positive rates."""
    rows = []
    for cell in record["cells"]:
        for attack in record["attacks"]:
            ran = attacked(cell, attack["name"])
            if ran is None:
                continue
            shares = {
                side: [
                    shown(estimated((ran[key] or {}).get(key_of(rate)))) for rate in record["rates"]
                ]
                for side, key in SIDES
            }
            counts = {key: ran[key] for key in (*NUMBERS, "seconds")}
            counts |= {key: shown(estimated(ran[key])) for key in IDENTIFIED}
            rows.append({"cell": cell, "attack": attack, **shares, **counts})
    return rows


AUDIT_PAGE = StudyPage(
    name="audit",
    version=1,
    command="palimpsest audit",
    kinds=KINDS,
    tables=own_tables,
    words=words,
    stages={
        "train": "to train the networks",
        "attack": "to attack them",
        "score": "to score what came back",
    },
    filters={"share": share, "rate": rate_text, "points": points, "side": side_of},
)
