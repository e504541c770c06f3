"""Sentences on what encodings determine of the private images, and what they leave open."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

WHY = {
    "ambiguous": "either sign of an encoding has a solution, so that a pixel has several values; "
    "another encoding that ties the image to others decides",
    "free": "its encodings fix sums with other images, or it is in none, so that it can be "
    "anything; more encodings of it decide",
    "several graphs": "two assignments of images to encodings explain the same encodings, and no "
    "pixel decides between them; one more encoding does",
    "unsolved": "no signs were found that meet its equations: public images, pairs or weights are "
    "wrong, or the encodings are noisier than is said (--noise)",
    "estimated": "an approximation: too few of its encodings are explained to be sure of it, and "
    "public images and mistaken pairs may be in it",
}


def left_open(method: Mapping[str, Any], k_pub: int) -> list[str]:
    """Sentences on one method's record, from the equations to the images."""
    found, said = method["ambiguity"], []
    n, m = method["n_images"], method["n_encodings"]
    if not found["n_equations"]:
        said.append(
            f"None of {_n(m, 'encoding')} is explained, so nothing is proved: what is shown, if "
            "anything is, is an estimate."
        )
    else:
        said.append(
            f"{found['n_equations']:,} of {_n(m, 'encoding')} are explained: each is an equation "
            f"in its two images, and all together determine {found['n_determined']} of {n} images."
        )
        said += _parts(found)
        said += _signs(found, k_pub)
    if method["n_graphs"] > 1:
        said.append(
            f"{method['n_graphs']:,} graphs have these overlaps: a part that is a triangle, a star "
            "of three, K4, K4 without an edge, or a triangle with a tail, can be drawn in two ways."
        )
    if not method["exact_graph"]:
        said.append(
            "The graph is the most likely one, not the only one with these overlaps: they were "
            "measured with errors. Equations that are met speak for it, encoding by encoding."
        )
    return said


def _parts(found: Mapping[str, Any]) -> list[str]:
    said = []
    if found["n_parts"] > 1:
        sizes = [part["n_images"] for part in found["parts"]]
        shown = ", ".join(map(str, sizes[:8])) + (", ..." if found["n_parts"] > 8 else "")
        said.append(
            f"The graph has {found['n_parts']} parts, of {shown} images, that no encoding ties to "
            "each other; each is solved by itself."
        )
    if found["n_two_sided"] and found["equal_weights"]:
        are, their = ("parts have", "their") if found["n_two_sided"] > 1 else ("part has", "its")
        said.append(
            f"{found['n_two_sided']} {are} no cycle of an odd number of encodings: images on one "
            f"side can grow by what those on the other shrink, so all {their} images are free."
        )
    return said


def _signs(found: Mapping[str, Any], k_pub: int) -> list[str]:
    said = []
    bits, coloops = found["log2_solutions"], found["n_coloops"]
    if k_pub and coloops:
        are = "is in no circuit of equations (a coloop)"
        if coloops > 1:
            are = "are in no circuit of equations (coloops)"
        said.append(
            f"{_n(coloops, 'encoding')} {are}: nothing contradicts the other sign, and each "
            f"doubles the solutions of a pixel, {_power(bits)} for the signs."
        )
    elif k_pub:
        said.append(
            "Every encoding is in a circuit of equations, which a wrong sign contradicts: the "
            "signs of a pixel have one solution."
        )
    else:
        said.append(
            "Encodings have no public images, so an image and its negative look alike: the "
            f"equations fall into {_n(bits, 'group') if bits is not None else 'many groups'} whose "
            f"signs can be turned together, which gives {_power(bits)} at a pixel. What is "
            "determined is determined up to the sign of its group; its first image is shown "
            "positive."
        )
    if found["n_free"]:
        unseen = f", {found['n_unseen']} in no explained encoding" if found["n_unseen"] else ""
        said.append(
            f"{_n(found['n_free'], 'image')} free{unseen}: for each choice of signs a pixel of "
            f"{'it' if found['n_free'] == 1 else 'them'} has infinitely many values. "
            "Determined images are the same in all solutions."
        )
    return said


def _power(bits: int | None) -> str:
    if bits is None:
        return "more than 10^308 solutions"
    if bits == 0:
        return "1 solution"
    return f"2 to the {bits}, {2**bits:,} solutions" if bits <= 20 else f"2 to the {bits} solutions"


def _n(n: int, what: str) -> str:
    """`1 image is`, `3 images are`; of others `3 encodings`."""
    verb = {"image": (" is", " are")}.get(what, ("", ""))
    return f"{n:,} {what}{'' if n == 1 else 's'}{verb[n != 1]}"
