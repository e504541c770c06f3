"""Sections of the results on one study, from its study.json (docs/studies.md) or, of a study of
recovery or of inversion, its recovery.json or inversion.json."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tasks.audit.page import AUDIT_PAGE
from tasks.audit.tables import points, share
from tasks.families.autoencoder.study.figure_specs import at_lowest
from tasks.families.autoencoder.study.page import RECOVERY_PAGE
from tasks.families.inversion.study.page import INVERSION_PAGE
from tasks.families.weights.study.page import STUDY_PAGE
from tasks.page.files import claim_counts
from tasks.page.study_page import StudyPage

DATA = "CIFAR-10 (JPEG copy)"
"""The name of the images that results are of (docs/images.md)."""
HEADER = (
    *("cell", "networks", "images each", "good", "good decoys", "mean SSIM", "decoys"),
    *("good, window of 3", "good decoys, window of 3"),
    *("accuracy on others", "images behind the weights"),
)
RECOVERY_HEADER = (
    *("network", "images", "train loss", "method", "accurate", "approximate", "mean PSNR in dB"),
    *("test images, accurate", "test images, approximate"),
)


def with_data(text: str) -> str:
    """`text`, which is ours and no paper's, with the copy of CIFAR-10 by its name."""
    return re.sub(r"folder cifar10(-jpeg)?\b|CIFAR-10(?! \(JPEG copy\))", DATA, text)


Found = tuple[list[str], Sequence[str], list[Sequence[str]]]
Reader = Callable[..., Found]
INVERSION_HEADER = (
    *("images", "cut", "defence", "chosen as", "networks", "accuracy", "mean distance"),
    *("SSIM by the paper's descent", "its rate tuned", "ours", "restored", "unrelated images"),
)


def study_table(text: str, *, name: str) -> Found:
    """(what stands above the table of a study of any kind, its header, its rows).

    Raises ValueError, naming the file, if it is no study of this version.
    """
    return KINDS[name.rpartition("/")[2].removesuffix(".json")](text, name=name)


def study_rows(text: str, *, name: str) -> Found:
    """The table of a study of attacks on weights; this and the others as `study_table`."""
    record = read_record(text, name, STUDY_PAGE)
    lines = _heading(record, name, "study.html", f"; {record['n_attacks']} attacks on each network")
    rows: list[Sequence[str]] = []
    for cell in record["cells"]:
        targets, decoys, victim = cell["targets"], cell["decoys"], cell["victim"]
        row = (
            cell["name"],
            str(len(cell["victims"])),
            str(cell["n_images"]),
            f"{targets['n_good']} of {targets['n']}",
            f"{decoys['n_good']} of {decoys['n']}",
            estimate(targets["mean_ssim"], targets["mean_ssim_interval"], ".3f"),
            f"{decoys['mean_ssim']:.3f}",
            f"{targets['n_good_ssim3']} of {targets['n']}",
            f"{decoys['n_good_ssim3']} of {decoys['n']}",
            _mean(victim["test_accuracy"], ".3f"),
            _mean(victim["n_effective"], ".1f"),
        )
        rows.append(row)
    return lines, HEADER, rows


def recovery_table(text: str, *, name: str) -> Found:
    """The table of a study of recovery: victims at their lowest loss, by method, over all masks."""
    record = read_record(text, name, RECOVERY_PAGE)
    found: list[Sequence[str]] = []
    for victim in record["victims"]:
        for method in record["methods"]:
            at = {"sigma": 0.0, "method": method["name"]}
            train, test = (at_lowest(record, victim, split=s, **at) for s in ("train", "test"))
            if train:
                n = sum(cell["n"] for cell in train)
                psnr = sum(cell["n"] * cell["psnr"][0] for cell in train) / n
                counts = (
                    f"{sum(c[which] for c in of)} of {sum(c['n'] for c in of)}" if of else ""
                    for of in (train, test)
                    for which in ("n_accurate", "n_approximate")
                )
                accurate, approximate, *others = counts
                row = (victim["title"], str(victim["n_images"]), f"{train[0]['loss']:.2g}",
                       method["title"], accurate, approximate, f"{psnr:.1f}", *others)  # fmt: skip
                found.append(row)
    return _heading(record, name, "recovery.html", ""), RECOVERY_HEADER, found


def inversion_table(text: str, *, name: str) -> Found:
    """The table of a study of inversion: the cells with a role, UniCon, and all other cuts."""
    record = read_record(text, name, INVERSION_PAGE)
    shown = [c for c in record["cells"] if c["seeds"] and (c["roles"] or not c["in_grid"])]
    lines = _heading(record, name, "inversion.html", "")
    titles = {source["name"]: source["title"] for source in record["sources"]}
    rows: list[Sequence[str]] = []
    for cell in shown:
        attacks = cell["attacks"]
        chance = attacks.get("strong", {}).get("chance")
        row = (
            titles[cell["source"]],
            str(cell["cut"]),
            cell["title"],
            ", ".join(cell["roles"]),
            str(len(cell["seeds"])),
            _estimate(cell["accuracy"], ".1%"),
            _estimate(cell["distance"], ".3f"),
            *(
                _estimate(attacks[attack]["ssim"], ".3f") if attack in attacks else ""
                for attack in ("paper", "tuned", "strong", "restored")
            ),
            "" if chance is None else f"{chance:.3f}",
        )
        rows.append(row)
    return lines, INVERSION_HEADER, rows


def audit_table(text: str, *, name: str) -> Found:
    """The table of an audit: every cell, and what each attack gets at the headline's rate."""
    record = read_record(text, name, AUDIT_PAGE)
    folder, rate = name.rpartition("/")[0], f"{record['rate']:g}"
    attacks, price = record["attacks"], record["price"]
    header = (
        *("defence", "effect on the leak", "images each", f"test {price}", "its change, points"),
        *("epsilon", *(f"{attack['title']}, %" for attack in attacks)),
    )
    lines = [
        f"### {_audited_networks(record['settings']['recipe'])}, {record['settings']['data']}\n",
        f"{record['verdict']['sentence']}\n",
        f"Shares are of training images, at {100 * record['rate']:g} % false positives, with 95 % "
        f"intervals over {record['n_victims']} networks a row: those that come back well, or of "
        f"membership those that are told. The effect is that on the worst attack. Record: "
        f"[{folder}]({folder}).\n",
        f"`{record['command']}` leaves it and the page with all figures, `audit.html`; "
        f"{sum(record['seconds'].values()):.0f} s of work on {record['machine']}.\n",
    ]
    rows: list[Sequence[str]] = []
    for cell in record["cells"]:
        accuracy = cell["accuracy"] or {}
        test = accuracy.get("test")
        row = (
            cell["name"] + (" (another way to train)" if cell["kind"] == "variant" else ""),
            (cell["effect"] or {}).get("word", ""),
            str(cell["n_images"]),
            cell["failed"] or ("" if test is None else f"{test:.1%}"),
            "" if accuracy.get("change") is None else points(accuracy["change"]),
            "" if cell["epsilon"] is None else f"{cell['epsilon']:g}",
            *(_share(cell["attacks"].get(attack["name"]), rate) for attack in attacks),
        )
        rows.append(row)
    return lines, header, rows


def _audited_networks(recipe: Mapping[str, Any]) -> str:
    if recipe.get("autoencoder"):
        network = recipe["autoencoder"]["network"]
        shape = f"width {network['width']:,}" if network["kind"] == "fc" else network["kind"]
        return f"Autoencoders, {shape}"
    small = recipe["victim"]["init_std_first"]
    width = f"width {recipe['victim']['widths'][0]:,}"
    width += ", the standard start" if small is None else f", a small start ({small:g})"
    if recipe.get("cut"):
        return f"Features of hidden layer {recipe['cut']}, {width}"
    return width.capitalize()


def _share(found: Mapping[str, Any] | None, rate: str) -> str:
    """A share of images in percent and its interval; `-` of an attack that was not made."""
    if found is None or found["status"] != "ran":
        return "-"
    shares = found["good_at"] or found["found_at"]
    each = (share(x).removesuffix(" %") for x in shares[rate]["interval"])
    return f"{share(shares[rate]['mean']).removesuffix(' %')} [{', '.join(each)}]"


def estimate(value: float | None, interval: Sequence[float] | None, form: str = "+.3f") -> str:
    """A number with its interval; empty for None."""
    text = "" if value is None else f"{value:{form}}"
    return text if value is None or interval is None else f"{text} {bounds(interval, form)}"


def bounds(interval: Sequence[float], form: str = "+.3f") -> str:
    return f"[{interval[0]:{form}}, {interval[1]:{form}}]"


def _estimate(found: Mapping[str, Any], form: str) -> str:
    low, high = found["low"], found["high"]
    return estimate(found["mean"], None if low is None else (low, high), form)


def read_record(text: str, name: str, page: StudyPage) -> dict[str, Any]:
    """The record of a study; ValueError, naming the file, if it is none of this version."""
    try:
        record = dict(json.loads(text))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{name} is no study ({error})") from error
    found, expected = (record.get("schema"), record.get("version")), (page.schema, page.version)
    if found != expected:
        raise ValueError(f"{name} is {found}, expected {expected}; make the study again")
    return record


def _heading(record: Mapping[str, Any], name: str, page: str, more: str) -> list[str]:
    folder = name.rpartition("/")[0]
    sources = [record["source"]["name"]] if "source" in record else [
        source["title"] for source in record["sources"]
    ]  # fmt: skip
    counts = claim_counts(record)
    theirs = f"{counts['holds']} of {counts['n_claims']} claims of the paper hold"
    own = f"{counts['own_holds']} of {counts['n_own']} questions of ours do"
    kept = [*([theirs] if counts["n_claims"] else []), *([own] if counts["n_own"] else [])]
    return [
        f"### {record['title']}\n",
        f"{record['question']} ({record['paper']}; preset `{record['preset']}`; images: "
        f"{', '.join(sources)}.) {'; '.join(kept)}. Record: [{folder}]({folder}).\n",
        f"`{record['command']}` leaves it and the page with all figures, `{page}`; "
        f"{sum(record['seconds'].values()):.0f} s on {record['machine']}{more}.\n",
    ]


def _mean(values: Sequence[float | None], form: str) -> str:
    known = [value for value in values if value is not None]
    return f"{sum(known) / len(known):{form}}" if known else ""


KINDS: dict[str, Reader] = {
    "study": study_rows,
    "recovery": recovery_table,
    "inversion": inversion_table,
    "audit": audit_table,
}
"""How the record of each kind of study is read, by the name of its file."""
