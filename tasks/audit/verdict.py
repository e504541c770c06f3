"""The words of an audit: a sentence that a person may quote, and what it does not cover."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tasks.audit.tables import points, rate_text, share

Record = Mapping[str, Any]
LITTLE = 0.05
"""Share of the images up to which a network leaks little."""
SIGNIFICANT = 0.05
_FROM = {
    "span": "the weights alone",
    "span_known": "the weights and those that training began with",
    "kkt": "the weights alone",
    "gradient": "its gradients and the weights",
    "features": "the features that clients send of them",
    "autoencoder": "the autoencoder and what is left of them where most pixels are erased",
}


def verdict_of(record: Record) -> dict[str, Any]:
    """Level and sentence, of the network as it is and of the defence that is worth its price."""
    base = record["cells"][0]
    leak = base["leak"]
    rate = rate_text(record["rate"])
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
    if attack["p_value"] > SIGNIFICANT and (n_victims == 1 or leak["interval"][0] == 0):
        level = "nothing found"
    title = next(a["title"] for a in record["attacks"] if a["name"] == leak["attack"])
    low, high = (share(end) for end in leak["interval"])
    head = (
        f"{share(leak['mean'])} of {record['n_images']} training images come back well "
        f"({low.removesuffix(' %')} to {high}; {rate} false positives) from {_FROM[leak['attack']]}"
    )
    if leak["attack"] == "gradient":
        head = head.replace("training images", "images of the batch")
    if level == "nothing found":
        head = (
            f"Of {record['n_images']} training images none could be told to come back: "
            f"{share(leak['mean'])}, at most {high}, at {rate} false positives"
        )
    over = f", over {n_victims} networks" if n_victims > 1 else ""
    sentence = f"{head}, by the attack {title}{over}."
    if level != "nothing found" and leak["mean"] == 0:
        sentence += f" They score above decoys all the same (p = {attack['p_value']:.3g})."
    if base["failed"]:
        sentence += f" But {base['failed']}."
    defence = best_defence(record)
    if defence is not None:
        sentence += " " + _said_of(defence, record["price"])
    return {
        "level": level,
        "sentence": sentence,
        "base_leak": leak["mean"],
        "defence": None if defence is None else defence["name"],
    }


def best_defence(record: Record) -> Mapping[str, Any] | None:
    """The defence on the front that leaves little at the least price, or, if none does, that takes
    off at least half of the leak; None where the network leaks nothing or no defence does that."""
    base = record["cells"][0]
    if base["leak"] is None or base["leak"]["mean"] <= 0:
        return None
    half = base["leak"]["mean"] / 2
    usable = [c for c in record["cells"][1:] if c["on_front"] and c["failed"] is None]
    for most in (min(LITTLE, half), half):
        worth = [cell for cell in usable if cell["leak"]["mean"] <= most]
        if worth:
            cheapest: Record = max(worth, key=lambda cell: float(cell["accuracy"]["test"]))
            return cheapest
    return None


def does(cell: Record) -> str:
    """Effect of the defence that is named."""
    little = cell["leak"]["mean"] <= LITTLE
    return f"leaves at most {rate_text(LITTLE)}" if little else "halves the leak"


def _said_of(cell: Record, price: str) -> str:
    change = cell["accuracy"]["change"]
    price = f"{price} changes by {points(change)} points"
    return (
        f"The cheapest defence that {does(cell)} is {cell['name']}: "
        f"{share(cell['leak']['mean'])} come back, and {price}."
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
