"""The report's words: names of methods and criteria, the first paragraph."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from recon_core.attacks.family_run import FamilyRun
from recon_core.experiments import FAMILIES
from tasks.evaluation.record import best_trained
from tasks.evaluation.settings import CONTROL, ORACLE, PROJECTED
from tasks.page.files import Record
from tasks.page.formats import percent, score

KNOWN_METHODS = {
    "plain": ("Attack alone", "Attack", "what the attack gives, scaled to the range of an image"),
    "plain_kkt": ("KKT attack", "KKT attack", "another attack on the same networks"),
    "plain_span": ("Span attack", "Span attack", "another attack on the same networks"),
    "plain_all": ("Attack alone, every saved step", "Attack, all", "the best over all saved steps"),
    "vote": (
        "Vote of candidates",
        "Vote",
        "the average of all reconstructions that are nearly as close to the image as the closest",
    ),
    CONTROL: (
        "Mean image alone",
        "Mean image",
        "a control, the average of the victim's training pictures for every one of them: what a "
        "picture scores that carries nothing of any single one",
    ),
    ORACLE: (
        "Oracle of the span",
        "Oracle",
        "the training pictures themselves, projected on the span of the first layer's weights: "
        "about the most that agrees with them",
    ),
}
LEARNED_NOTHING = "a classical denoiser that learned nothing"
RESTORERS = {
    "bf_dncnn": ("BF-DnCNN", "a convolutional denoiser, run once"),
    "edm": ("EDM", "a conditional diffusion model"),
    "unet": ("U-Net", "the diffusion model's network as a regression, run once"),
    "nlm": ("Non-local means", f"{LEARNED_NOTHING}: averages like surroundings"),
    "tv": ("Total variation", f"{LEARNED_NOTHING}: flattens what varies"),
    "wavelet": ("Wavelet shrinkage", f"{LEARNED_NOTHING}: shrinks wavelet coefficients"),
}
KIND_NOTES = {
    "attack": "pictures of the attack",
    "vote": "pictures that several attacks agree on",
    "classical": "a denoiser that learned nothing",
    "trained": "a trained restorer",
    "external": "a model brought by the user",
    "projected": "a restorer",
}
ATTACKS = {
    "kkt": ("KKT attack", "searches for pictures that explain all weights as the end of training"),
    "span": (
        "span attack",
        "separates the first layer's weights, which are mixtures of the training pictures, by what "
        "pictures have and mixtures have not",
    ),
}
CRITERIA = {
    "kkt_residual": "KKT residual",
    "residual_relu": "KKT residual with the exact ReLU",
    "attack_loss": "loss of the attack",
    "consistency": "consistency over iterations",
    "agreement": "agreement with other runs",
    "n_pictures": "number of pictures",
    "n_iterations": "iterations until the end",
    "lr": "step size of the pictures",
    "lam_lr": "step size of λ",
    "sigma": "σ of the start",
    "lam_min": "lower bound of λ",
    "alpha": "sharpness α of the softplus",
}


def method_title(name: str, kind: str = "trained") -> tuple[str, str, str]:
    """(long title, short title, what it is) of a method by its name in the record."""
    if name.endswith(PROJECTED):
        long, short, what = method_title(name.removesuffix(PROJECTED), kind)
        return (
            f"{long}, in the span",
            f"{short}, in span",
            f"{what}; each of its pictures then projected on the span of the first layer's "
            "weights, and between rounds if there are several",
        )
    if name in KNOWN_METHODS:
        return KNOWN_METHODS[name]
    stem, _x, count = name.rpartition("_x")
    if not (stem and count.isdigit()):
        stem, count = name, ""
    title, note = RESTORERS.get(stem, (stem, KIND_NOTES.get(kind, kind)))
    if not count:
        return title, title, note
    how = (
        "sampled once: sharp, and it may invent"
        if count == "1"
        else f"the average of {count} samples: what differs between samples blurs"
    )
    said = "one sample" if count == "1" else f"mean of {count}"
    return f"{title}, {said}", f"{title} ×{count}", f"{note}, {how}"


def strengths(restorers: Mapping[str, Any]) -> str:
    """Words for how far restorers go from a picture, where that was fitted; "" if nowhere was.
    `restorers` are cards by name."""
    said = []
    for name, card in restorers.items():
        if (card.get("validation") or {}).get("strength_curve"):
            strength = card["restorer"]["strength"]
            far = f"goes {strength:.0%} of the way" if strength else "leaves it as it is"
            said.append(f"{method_title(name)[0]} {far}")
    if not said:
        return ""
    return (
        "How far each goes from a picture to its own answer was fitted to pictures of images that "
        f"it had not seen, and none goes where that does not help beyond chance: {'; '.join(said)}."
    )


def headroom(record: Record) -> str:
    """Words for the most that the weights allow, and how much of the way there restorers go; "" for
    a record without the span."""
    if not record.get("span"):
        return ""
    summary = record["methods"][ORACLE]["targets"]["summary"]
    decoys = record["methods"][ORACLE]["decoys"]["summary"]
    plain = record["methods"]["plain"]["targets"]["summary"]
    said = (
        "Training pictures less their average lie in the span of the first layer's weights. Their "
        f"own projections there are about the most that agrees with the weights: "
        f"{summary['n_good']} of {summary['n']} good ({decoys['n_good']} decoys), mean SSIM "
        f"{score(summary['mean_ssim'])} to the attack's {score(plain['mean_ssim'])}."
    )
    closed, best = record["span"]["headroom_closed"], best_trained(record)
    if best is None or closed[best] is None:
        return said
    rounds = record["settings"]["rounds"]
    how = "is projected, too" if rounds == 1 else f"is projected and restored, {rounds} rounds"
    return (
        f"{said} Of the way there {method_title(best)[0]} goes {percent(closed[best])}, and "
        f"{percent(closed[best + PROJECTED])} where what it gives {how}; projection alone goes "
        f"{percent(closed['plain' + PROJECTED])}."
    )


def attack_rows(record: Record) -> list[dict[str, Any]]:
    """Facts of each attack on the same victims, further ones first; [] if there is one.

    `title`, and `name` in a sentence; `good`, `identified` and those of decoys, of `n`; `ssim`,
    `ssim_decoys` as texts; `found` at 0, 1 and 5 % false positives (shares, None without decoys);
    `seconds` of work per victim, None if it is not known; `guesses`: pictures per victim.
    """
    rows = []
    for attack in record["attacks"]:
        method = record["methods"][attack["method"]]
        targets, decoys = method["targets"]["summary"], method["decoys"]["summary"]
        found, seconds = method["detection"]["found_at"] or {}, attack["seconds"]
        n_victims = record["dataset"]["n_victims"]
        rows.append(
            {
                "method": attack["method"],
                "title": attack_title(record, attack["method"]),
                "name": ATTACKS[attack["kind"]][0],
                "n": targets["n"],
                "good": targets["n_good"],
                "good_decoys": decoys["n_good"],
                "identified": targets["n_identified"],
                "identified_decoys": decoys["n_identified"],
                "ssim": score(targets["mean_ssim"]),
                "ssim_decoys": score(decoys["mean_ssim"]),
                "found": [found.get(rate) for rate in ("0", "0.01", "0.05")],
                "seconds": None if seconds is None else seconds / n_victims,
                "guesses": round(attack["n_candidates"] / n_victims),
            }
        )
    return rows[1:] + rows[:1]


def attack_title(record: Record, name: str) -> str:
    """A row of the pictures that show attacks side by side; of a restorer, what it restored."""
    kinds = {attack["method"]: attack["kind"] for attack in record["attacks"]}
    title = KNOWN_METHODS[f"plain_{kinds.get(name, kinds['plain'])}"][1]
    if name in kinds:
        return title
    return f"{title.removesuffix(' attack')}, then {method_title(name)[1]}"


def picture_title(name: str) -> str:
    """The title of a row of pictures: of a method, or of one of the special rows."""
    if name == "closest":
        return "Closest training picture"
    if name.startswith("disagreement_"):
        stem = name.removeprefix("disagreement_")
        return f"Where samples of {RESTORERS.get(stem, (stem,))[0]} disagree"
    return method_title(name)[0]


def criterion_title(name: str) -> str:
    """A criterion of the ranking, in words."""
    return CRITERIA.get(name, name.replace("_", " "))


def attacker(record: Record) -> str:
    """What the attack of this family, or kind, is given; of several, what each does with it."""
    own, *further = record["attacks"] or [None]
    if own is None:
        experiment = _experiment(record)
        settings = experiment.get("attack", {})
        if settings.get("kind") != "span":
            family = FAMILIES.get(experiment.get("family", ""))
            return (FamilyRun if family is None else family.experiment).attacker_knows
        own = {"kind": "span", "settings": settings}
    only = "" if further or own["settings"].get("start") == "known" else ", nothing else"
    texts = [
        f"{'Each' if further else 'The'} attack is given a network (its architecture and weights) "
        f"and the average of its training pictures{only}"
    ]
    for made in (*further, own):
        known = made["settings"].get("start") == "known"
        more = ", and is given the weights that training started from as well" if known else ""
        texts.append(f"The {' '.join(ATTACKS[made['kind']])}{more}")
    return ". ".join(texts) + "."


def victims(record: Record) -> str:
    """A sentence on the networks' size, ending in a space; empty if the manifest does not say."""
    widths = _experiment(record).get("victim", {}).get("widths")
    if not widths:
        return ""
    layers = " and ".join(str(width) for width in widths)
    hidden = "hidden layers" if len(widths) > 1 else "a hidden layer"
    return f"The networks are fully connected classifiers with {hidden} of {layers} units. "


def _experiment(record: Record) -> dict[str, Any]:
    """The settings of the campaign's experiment, from the manifest of the store."""
    return dict(record["dataset"]["manifest"]["campaign"]["experiment"])
