"""The words of an audit: a sentence that a person may quote, and what it does not cover."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tasks.audit.effect import LITTLE, is_told
from tasks.audit.tables import attacked, key_of, points, rate_text, share, within

Record = Mapping[str, Any]
_FROM = {
    "span": "the weights alone",
    "span_known": "the weights and those that training began with",
    "span_state": "the weights and the optimiser's state",
    "kkt": "the weights alone",
    "gradient": "its gradients and the weights",
    "features": "the features that clients send of them",
    "autoencoder": "the autoencoder and what is left of them where most pixels are erased",
}


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
    if not is_told(attack, leak, n_victims):
        level = "nothing found"
    parts = [_nothing(record, leak) if level == "nothing found" else _back(record, leak)]
    parts.append(_alike(record, attack))
    if level != "nothing found" and leak["mean"] == 0:
        parts.append(f"They score above decoys all the same (p = {attack['p_value']:.3g}).")
    parts += [_alone(record), _variants(record)] if level != "nothing found" else []
    if base["failed"]:
        parts.append(f"But {base['failed']}.")
    defence = best_defence(record)
    if defence is not None:
        parts.append(_said_of(defence, record))
    return {
        "level": level,
        "sentence": " ".join(part for part in parts if part),
        "base_leak": leak["mean"],
        "defence": None if defence is None else defence["name"],
    }


def _by(record: Record, leak: Record) -> str:
    title = next(a["title"] for a in record["attacks"] if a["name"] == leak["attack"])
    over = f", over {record['n_victims']} networks" if record["n_victims"] > 1 else ""
    return f", by the attack {title}{over}."


def _images(record: Record, leak: Record) -> str:
    what = "images of the batch" if leak["attack"] == "gradient" else "training images"
    return f"{record['n_images']} {what}"


def _back(record: Record, leak: Record) -> str:
    """Number of images that come back, beside those that a picture tells from all others."""
    attack, rate = record["cells"][0]["attacks"][leak["attack"]], rate_text(record["rate"])
    own = attack.get("identified")
    told = ""
    if own is not None:
        decoys = share(attack["identified_decoys"]["mean"])
        told = f"; {share(own['mean'])} are identified, of decoys {decoys},"
    return (
        f"{share(leak['mean'])} of {_images(record, leak)} come back well "
        f"({within(leak['interval'])}; {rate} false positives){told} "
        f"from {_FROM[leak['attack']]}{_by(record, leak)}"
    )


def _nothing(record: Record, leak: Record) -> str:
    rate = rate_text(record["rate"])
    high = share(leak["interval"][1])
    return (
        f"Of {_images(record, leak)} none could be told to come back: "
        f"{share(leak['mean'])}, at most {high}, at {rate} false positives{_by(record, leak)}"
    )


def _alike(record: Record, attack: Record) -> str:
    """Warning of pictures that resemble decoys about as often as training images."""
    n_decoys = attack.get("n_decoys") or attack["n"]
    if attack["n_good_decoys"] / n_decoys <= attack["n_good"] / attack["n"] / 2:
        return ""
    return (
        f"Decoys score like them: SSIM is above {record['good_threshold']:g} for "
        f"{attack['n_good']} of {attack['n']}, and for {attack['n_good_decoys']} of {n_decoys} "
        "decoys."
    )


def _alone(record: Record) -> str:
    """Result of attacks that do not know the start, where one that does is the worst, and advice
    where it is the optimiser's state that shows the images."""
    base = record["cells"][0]
    said = _start_unknown(record, base)
    alone = f"From the weights alone, with the start unknown: {said}." if said else ""
    if base["leak"]["attack"] == "span_state":
        alone += " Publish weights alone, without the optimiser's state."
    return alone.strip()


def _start_unknown(record: Record, cell: Record) -> str:
    """The most that an attack gets from a cell which does not know the start; empty where the worst
    attack is such a one, or none was made."""
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
    found = []
    for cell in record["cells"][1:]:
        if cell["kind"] != "variant" or not cell["leak"] or cell["failed"]:
            continue
        alone = _start_unknown(record, cell)
        alone = f", with the start unknown {alone}" if alone else ""
        if cell["leak"]["attack"] == "span_state":
            alone = f" by the optimiser's state{alone}"
        found.append(f"{cell['name']}: {share(cell['leak']['mean'])}{alone}")
    return f"Trained in other ways: {'; '.join(found)}." if found else ""


def best_defence(record: Record) -> Mapping[str, Any] | None:
    """The defence that is named: the cheapest on the front whose interval leaves little, or, if
    there is none, at least halves the leak. Where prices are not measured it is the one that leaves
    least. None where the network leaks nothing or no defence does that."""
    base = record["cells"][0]
    if base["leak"] is None or base["leak"]["mean"] <= 0:
        return None
    usable = [
        c
        for c in record["cells"][1:]
        if c["kind"] != "variant" and c["failed"] is None and c["leak"] and c["effect"]
    ]
    priced = not record["no_price"]
    if priced:
        usable = [c for c in usable if c["on_front"]]
    for worth in (
        [c for c in usable if _leaves_little(c)],
        [c for c in usable if -c["effect"]["interval"][1] >= base["leak"]["mean"] / 2],
    ):
        if worth and priced:
            cheapest: Record = max(worth, key=lambda cell: float(cell["accuracy"]["test"]))
            return cheapest
        if worth:
            least: Record = min(worth, key=lambda cell: float(cell["leak"]["interval"][1]))
            return least
    return None


def _leaves_little(cell: Record) -> bool:
    little: bool = cell["leak"]["interval"][1] <= LITTLE and cell["effect"]["interval"][1] < 0
    return little


def does(cell: Record) -> str:
    """Effect of the defence that is named."""
    return (
        f"leaves at most {rate_text(LITTLE)}"
        if _leaves_little(cell)
        else "at least halves the leak"
    )


def _said_of(cell: Record, record: Record) -> str:
    left = f"{share(cell['leak']['mean'])} come back ({within(cell['leak']['interval'])})"
    if cell["leak"]["mean"] == 0:
        left = cell["effect"]["word"]
    if record["no_price"]:
        return (
            f"The defence that leaves least is {cell['name']}: {left}. Its price in "
            f"{record['price']} is {record['no_price']}."
        )
    change = points(cell["accuracy"]["change"])
    return (
        f"The cheapest defence that {does(cell)} is {cell['name']}: {left}, and "
        f"{record['price']} changes by {change} points."
    )


def does_not_cover(record: Record) -> list[str]:
    """Limits of what an audit says, for people who quote it."""
    names = {attack["name"] for attack in record["attacks"]}
    ran = {
        name
        for cell in record["cells"][:1]
        for name, found in cell["attacks"].items()
        if found["status"] == "ran"
    }
    words = [
        "Stronger attacks than these: what does not come back here is not safe, it is not found.",
        "Networks of other sizes, other images, and longer or shorter training than this.",
    ]
    if record["subject"] == "recipe":
        words.insert(
            1,
            "One network in particular: victims were trained by the recipe, on halves of the "
            "images, and stand for the next one that is.",
        )
    if "span_known" in ran:
        words.append(
            "The start known is the worst case: it holds for a public checkpoint or a fixed seed."
        )
    if "span_state" in ran:
        words.append(
            "Releases without the optimiser's state, which checkpoints of training hold: where "
            "weights are published alone that attack cannot be made."
        )
    if record["no_price"]:
        words.append(f"The price of defences in {record['price']}: {record['no_price']}.")
    if "features" in ran:
        words.append(
            "Features of other images: these are of training images, which the network knows best."
        )
    if "autoencoder" in ran:
        words.append("Pictures that are damaged otherwise, or of which less is left.")
    if "likelihood_ratio" not in names:
        words.append("Membership beyond the loss: no networks were trained as shadows.")
    if any(cell["epsilon"] for cell in record["cells"]):
        words.append(
            "What epsilon promises beyond these attacks: it bounds every attack on one image at a "
            "time, and is the accountant's number, not a measured one."
        )
    return words
