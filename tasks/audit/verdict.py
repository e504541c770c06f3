"""The words of an audit: a sentence that a person may quote, what it does not cover, and what a
defence does to the leak, all decided by intervals; as JUnit XML for continuous integration and as a
section of a model card, too."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any
from xml.etree import ElementTree as ET

from recon_core.leakage import paired_difference
from tasks.audit.tables import (
    accuracy,
    attacked,
    attacks_table,
    change,
    estimated,
    headline,
    key_of,
    points,
    rate_text,
    share,
    side_of,
    within,
)
from tasks.page.formats import NOTHING, number, with_interval

Record = Mapping[str, Any]
LITTLE = 0.05
"""Share of the images up to which a network leaks little."""
SIGNIFICANT = 0.05
SUITE = "palimpsest audit"
HEADING = "## Privacy: what this model leaks of its training images"


def is_significant(attack: Mapping[str, Any], found: Record, n_victims: int) -> bool:
    """Whether members score above decoys beyond chance: by the p-value, or, of several networks,
    by an interval of the share that lies above 0."""
    above: bool = attack["p_value"] <= SIGNIFICANT or (n_victims > 1 and found["interval"][0] > 0)
    return above


def effect_of(leak: Record, before: Record) -> dict[str, Any]:
    """The change of the leak against the network as it is, its interval of 95 %, and a word.

    The interval is over networks that share their images; of one network, that of the worst case
    of both shares' own. Words: "none found" where no image came back, with the most that the
    interval allows; "leaves at most 5 %" where the interval ends below; "raises it" and "at least
    halves it" where the whole interval does; "reduces it" where the interval lies below 0 and
    reaches half of the leak; "reduces it little" where it does not reach that; else "no effect
    measured".
    """
    change = leak["mean"] - before["mean"]
    low, high = (leak["interval"][k] - before["interval"][1 - k] for k in (0, 1))
    if len(leak["each"]) == len(before["each"]) > 1:
        change, (low, high) = paired_difference(leak["each"], before["each"])
    most, half = leak["interval"][1], before["mean"] / 2
    word = "reduces it" if -low >= half else "reduces it little"
    if leak["mean"] == 0:
        word = f"none found, at most {share(most)}"
    elif low > 0:
        word = "raises it"
    elif most <= LITTLE and high < 0:
        word = f"leaves at most {rate_text(LITTLE)}"
    elif high >= 0:
        word = "no effect measured"
    elif -high >= half:
        word = "at least halves it"
    return {"word": word, "change": change, "interval": [low, high]}


def verdict_of(record: Record) -> dict[str, Any]:
    """Level and sentence, of the network as it is and of the defence that is worth its price."""
    base = record["cells"][0]
    leak = base["leak"]
    if leak is None:
        return {
            "level": "nothing found",
            "sentence": "No attack that gives images back could be made on this network"
            + (f": {base['failed']}." if base["failed"] else "."),
            "base_leak": None,
            "defence": None,
        }
    attack, n_victims = base["attacks"][leak["attack"]], record["n_victims"]
    level = "leaks" if leak["mean"] > LITTLE else "leaks little"
    if not is_significant(attack, leak, n_victims):
        level = "nothing found"
    what = "images of the batch" if leak["attack"] == "gradient" else "training images"
    images, rate = f"{record['n_images']} {what}", rate_text(record["rate"])
    how = next(a for a in record["attacks"] if a["name"] == leak["attack"])
    over = f", over {n_victims} networks" if n_victims > 1 else ""
    by = f", by the attack {how['title']}{over}."
    told = ""
    if attack.get("identified") is not None:
        decoys = share(attack["identified_decoys"]["mean"])
        told = f"; {share(attack['identified']['mean'])} are identified, of decoys {decoys},"
    parts = [
        f"Of {images} none could be told to come back: {share(leak['mean'])}, at most "
        f"{share(leak['interval'][1])}, at {rate} false positives{by}"
        if level == "nothing found"
        else f"{share(leak['mean'])} of {images} come back well ({within(leak['interval'])}; "
        f"{rate} false positives){told} from {how['knows']}{by}"
    ]
    n_decoys = attack.get("n_decoys") or attack["n"]
    if attack["n_good_decoys"] / n_decoys > attack["n_good"] / attack["n"] / 2:
        parts.append(
            f"Decoys score like them: SSIM is above {record['good_threshold']:g} for "
            f"{attack['n_good']} of {attack['n']}, and for {attack['n_good_decoys']} of {n_decoys} "
            "decoys."
        )
    if level != "nothing found":
        if leak["mean"] == 0:
            parts.append(f"They score above decoys all the same (p = {attack['p_value']:.3g}).")
        if alone := _start_unknown(record, base):
            parts.append(f"From the weights alone, with the start unknown: {alone}.")
        if leak["attack"] == "span_state":
            parts.append("Publish weights alone, without the optimiser's state.")
        parts.append(_variants(record))
    if base["failed"]:
        parts.append(f"But {base['failed']}.")
    defence = best_defence(record)
    if defence is not None:
        left = f"{share(defence['leak']['mean'])} come back ({within(defence['leak']['interval'])})"
        if defence["leak"]["mean"] == 0:
            left = defence["effect"]["word"]
        parts.append(
            f"The defence that leaves least is {defence['name']}: {left}. Its price in "
            f"{record['price']} is {record['no_price']}."
            if record["no_price"]
            else f"The cheapest defence that {does(defence)} is {defence['name']}: {left}, and "
            f"{record['price']} changes by {points(defence['accuracy']['change'])} points."
        )
    return {
        "level": level,
        "sentence": " ".join(part for part in parts if part),
        "base_leak": leak["mean"],
        "defence": None if defence is None else defence["name"],
    }


def _start_unknown(record: Record, cell: Record) -> str:
    """The largest share of the attacks that do not know the start; empty if the worst attack is one
    of them, or none was made."""
    attacks = {a["name"]: a for a in record["attacks"]}
    rate = key_of(record["rate"])
    if attacks[cell["leak"]["attack"]].get("start") not in ("known", "state"):
        return ""
    ran = [cell["attacks"][name]["good_at"][rate] for name, a in attacks.items()
           if a.get("start") == "unknown" and attacked(cell, name)]  # fmt: skip
    if not ran:
        return ""
    best = max(ran, key=lambda found: float(found["mean"]))
    if best["mean"] == 0:
        return f"none found, at most {share(best['interval'][1])}"
    return f"{share(best['mean'])} ({within(best['interval'])})"


def _variants(record: Record) -> str:
    """Shares of the other ways to train."""
    others = []
    for cell in record["cells"][1:]:
        if cell["kind"] == "variant" and cell["leak"] and not cell["failed"]:
            alone = _start_unknown(record, cell)
            alone = f", with the start unknown {alone}" if alone else ""
            if cell["leak"]["attack"] == "span_state":
                alone = f" by the optimiser's state{alone}"
            others.append(f"{cell['name']}: {share(cell['leak']['mean'])}{alone}")
    return f"Trained in other ways: {'; '.join(others)}." if others else ""


def best_defence(record: Record) -> Record | None:
    """The cheapest defence on the front whose interval leaves little, or else at least halves the
    leak; if prices are not measured, the one that leaves least. None if the network leaks nothing,
    or no defence achieves that."""
    base, priced = record["cells"][0], not record["no_price"]
    if base["leak"] is None or base["leak"]["mean"] <= 0:
        return None
    usable: list[Record] = [
        c
        for c in record["cells"][1:]
        if c["kind"] != "variant" and c["failed"] is None and c["leak"] and c["effect"]
        if c["on_front"] or not priced
    ]
    halved = [c for c in usable if -c["effect"]["interval"][1] >= base["leak"]["mean"] / 2]
    worth = [c for c in usable if _leaves_little(c)] or halved
    if priced:
        return max(worth, key=lambda cell: float(cell["accuracy"]["test"]), default=None)
    return min(worth, key=lambda cell: float(cell["leak"]["interval"][1]), default=None)


def _leaves_little(cell: Record) -> bool:
    little: bool = cell["leak"]["interval"][1] <= LITTLE and cell["effect"]["interval"][1] < 0
    return little


def does(cell: Record) -> str:
    """Words for the effect of the best defence."""
    return (
        f"leaves at most {rate_text(LITTLE)}"
        if _leaves_little(cell)
        else "at least halves the leak"
    )


def does_not_cover(record: Record) -> list[str]:
    """Limits of what an audit says, for people who quote it."""
    names = {attack["name"] for attack in record["attacks"]}
    ran = {name for name in names if attacked(record["cells"][0], name)}
    rows: dict[str, Any] = {
        "Stronger attacks than these: what does not come back here is not safe, it is not found.":
            True,
        "One network in particular: victims were trained by the recipe, on halves of the images, "
        "and stand for the next one that is.": record["subject"] == "recipe",
        "Networks of other sizes, other images, and longer or shorter training than this.": True,
        "The start known is the worst case: it holds for a public checkpoint or a fixed seed.":
            "span_known" in ran,
        "Releases without the optimiser's state, which checkpoints of training hold: where weights "
        "are published alone that attack cannot be made.": "span_state" in ran,
        f"The price of defences in {record['price']}: {record['no_price']}.": record["no_price"],
        "Features of other images: these are of training images, which the network knows best.":
            "features" in ran,
        "Pictures that are damaged otherwise, or of which less is left.": "autoencoder" in ran,
        "Membership beyond the loss: no networks were trained as shadows.":
            "likelihood_ratio" not in names,
        "What epsilon promises beyond these attacks: it bounds every attack on one image at a "
        "time, and is the accountant's number, not a measured one.":
            any(cell["epsilon"] for cell in record["cells"]),
    }  # fmt: skip
    return [text for text, holds in rows.items() if holds]


def junit(record: Record) -> bytes:
    """JUnit XML: a test case per limit that was set; without any, one that passes per defence and
    attack. Cases that could not be decided, or were not run, are skipped."""
    root = ET.Element("testsuites")
    suite = ET.SubElement(root, "testsuite", {"name": SUITE, "errors": "0"})

    def put(of: ET.Element, values: Mapping[str, Any]) -> None:
        properties = ET.SubElement(of, "properties")
        for name, value in values.items():
            if value is not None:
                ET.SubElement(properties, "property", {"name": name, "value": _xml(f"{value}")})

    def case(
        cell: str, name: str, values: Record, ends: Mapping[str, str], seconds: float = 0.0
    ) -> None:
        about = {"classname": _xml(f"{SUITE}.{cell}"), "name": _xml(name), "time": f"{seconds:.3f}"}
        made = ET.SubElement(suite, "testcase", about)
        if values:
            put(made, values)
        for kind, message in ends.items():
            ET.SubElement(made, kind, {"message": _xml(message)})

    facts = {key: record[key] for key in ("title", "command", "fingerprint")}
    put(suite, facts | {"verdict": record["verdict"]["sentence"]})
    for check in record["checks"]:
        values = {key: check[key] for key in ("value", "limit", "outcome")}
        about = f"{check['attack']} on {check['cell']}: {share(check['value'])}, the limit is "
        about += share(check["limit"])
        ends: dict[str, str] = {}
        if check["outcome"] == "fails":
            ends["failure"] = f"{check['condition']} fails: {about}"
        elif check["outcome"] != "passes":
            ends["skipped"] = f"{check['outcome']}: {about}, which its interval reaches"
        case(check["cell"], f"{check['condition']} ({check['attack']})", values, ends)
    titles = {attack["name"]: attack["title"] for attack in record["attacks"]}
    for row in () if record["checks"] else attacks_table(record).rows():
        values, ends = {}, {"skipped": row["why"] or "it was not run"}
        if row["status"] == "ran":
            priced = accuracy(record["cells"][row["cell"]])[0]
            values, ends = {**row, f"test {record['price']}": priced}, {}
        case(row["name"], titles[row["attack"]], values, ends, row["seconds"] or 0.0)
    for name, path in (("tests", "testcase"), ("failures", "*/failure"), ("skipped", "*/skipped")):
        suite.set(name, f"{len(suite.findall(path))}")
    suite.set("time", f"{sum(record['seconds'].values()):.3f}")
    ET.indent(root)
    return bytes(ET.tostring(root, encoding="utf-8", xml_declaration=True)) + b"\n"


def _xml(text: str) -> str:
    """The text without letters that XML cannot hold."""
    return re.sub(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", "\ufffd", text)


def model_card(record: Record) -> str:
    """A section of Markdown for a model card: the verdict, the attacks, the defences, and what the
    numbers do not cover."""
    base, rates = record["cells"][0], record["rates"]
    over = f"{record['n_victims']} networks" if record["n_victims"] > 1 else "the images"
    attacks = [["Attack", "It has", "It gives", *map(rate_text, rates)]]
    for a in record["attacks"]:
        gives = "pictures" if a["kind"] == "reconstruction" else "who is a member"
        shares = (attacked(base, a["name"]) or {}).get(side_of(a["kind"])) or {}
        ends = (with_interval(share, estimated(shares.get(key_of(rate)))) for rate in rates)
        attacks.append([_text(a["title"]), _text(a["knows"]), gives, *ends])
    members = [a for a in record["attacks"] if a["kind"] == "membership"]
    titles = (_text(a["title"]) for a in members)
    defences = [["Defence", "Leak", "Effect", *titles, f"Test {record['price']}", "Change, points"]]
    for cell in record["cells"]:
        lost = f" (no numbers: {_text(cell['failed'])})" if cell["failed"] else ""
        effect = _text((cell["effect"] or {}).get("word", NOTHING))
        told = (headline(record, cell, a) for a in members)
        leak, *found = (
            with_interval(share, one) for one in (estimated(cell["leak"]), *told, accuracy(cell))
        )
        row = [f"{_text(cell['name'])}{lost}", leak, effect, *found]
        defences.append([*row, with_interval(points, change(cell))])
    uncovered = (*record["does_not_cover"], *(f"Left out: {text}" for text in record["left_out"]))
    made = [
        f"{record['n_victims']} x {record['n_images']} training images",
        f"made with {_code(number(record['command']))}",
        f"fingerprint {_code(number(record['fingerprint']))}",
        _text(number(record["created"])),
    ]
    parts = [
        HEADING,
        _text(record["verdict"]["sentence"]),
        "**What each attack gets** of the training images, by rate of false positives: the "
        "share of decoys, images that the network never saw, that it takes for training images. "
        f"Brackets: 95 % intervals over {over}.",
        _table(attacks, 3),
        f"**What defences change**, at {rate_text(record['rate'])} false positives. Leak: the "
        "share that the best reconstruction attack brings back well enough to recognise.",
        _table(defences, 1),
        "**What this does not cover**",
        "\n".join(f"- {_text(text)}" for text in uncovered),
        f"Measured with Palimpsest: {'; '.join(fact for fact in made if fact != NOTHING)}.",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _table(rows: Sequence[Sequence[str]], n_left: int) -> str:
    """A Markdown table with a head, whose first columns are to the left, the others to the
    right."""
    rules = [":--" if k < n_left else "--:" for k in range(len(rows[0]))]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (rows[0], rules, *rows[1:]))


def _text(text: object) -> str:
    """Text in which nothing is Markdown or HTML, on one line."""
    return re.sub(r"([\\`*_\[\]<>|])", r"\\\1", " ".join(str(text).split())).replace("\\<", "&lt;")


def _code(text: str) -> str:
    """Text between as many backquotes as it needs."""
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence, line = "`" * (longest + 1), " ".join(text.split())
    return f"{fence} {line} {fence}" if longest else f"{fence}{line}{fence}"
