"""The colours of the methods can be told apart with any colour vision, on light and on dark."""

from __future__ import annotations

import re
from itertools import combinations

import numpy as np
import numpy.typing as npt
import pytest

from tasks.families.autoencoder.study.figure_specs import COLOURS
from tasks.page.files import TEMPLATES

Colour = npt.NDArray[np.float64]
VISIONS = {  # of linear RGB, for a missing kind of cone (Machado et al. 2009)
    "full": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "red-blind": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216),
                  (-0.003882, -0.048116, 1.051998)),
    "green-blind": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413),
                    (-0.011820, 0.042940, 0.968881)),
    "blue-blind": ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602),
                   (0.004733, 0.691367, 0.303900)),
}  # fmt: skip
TO_CONES = ((0.4122214708, 0.5363325363, 0.0514459929), (0.2119034982, 0.6806995451, 0.1073969566),
            (0.0883024619, 0.2817188376, 0.6299787005))  # fmt: skip
TO_OKLAB = ((0.2104542553, 0.7936177850, -0.0040720468),
            (1.9779984951, -2.4285922050, 0.4505937099),
            (0.0259040371, 0.7827717662, -0.8086757660))  # fmt: skip
LEAST_DIFFERENCE, LEAST_CONTRAST = 0.11, 2.9


def _blocks(sheet: str) -> list[dict[str, str]]:
    """The variables of each `:root { ... }`: light, dark, print."""
    roots = re.findall(r":root \{([^}]*)\}", sheet)
    return [dict(re.findall(r"--(\w+): (#\w{6})", root)) for root in roots]


def _linear(colour: str) -> Colour:
    c = np.array([int(colour[k : k + 2], 16) for k in (1, 3, 5)]) / 255
    return np.where(c <= 0.04045, c / 12.92, ((c + 0.055) / 1.055) ** 2.4)


def _oklab(linear: Colour) -> Colour:
    return np.array(TO_OKLAB) @ np.cbrt(np.array(TO_CONES) @ np.clip(linear, 0, 1))


@pytest.mark.parametrize("vision", VISIONS)
@pytest.mark.parametrize("scheme", ["light", "dark", "print"])
def test_methods_can_be_told_apart(scheme: str, vision: str) -> None:
    k = ("light", "dark", "print").index(scheme)
    colours = _blocks((TEMPLATES / "matrix.css").read_text())[k]
    assert set(colours) == {f"m{colour}" for colour in COLOURS.values()}
    seen = [_oklab(np.array(VISIONS[vision]) @ _linear(c)) for c in colours.values()]
    differences = [float(np.linalg.norm(a - b)) for a, b in combinations(seen, 2)]
    assert min(differences) >= LEAST_DIFFERENCE


@pytest.mark.parametrize("k", [0, 1, 2])
def test_methods_stand_out_from_the_paper(k: int) -> None:
    paper = _blocks((TEMPLATES / "report.css").read_text())[k].get("paper", "#ffffff")
    weights = np.array([0.2126, 0.7152, 0.0722])
    behind = float(weights @ _linear(paper))
    for colour in _blocks((TEMPLATES / "matrix.css").read_text())[k].values():
        dark, light = sorted([behind, float(weights @ _linear(colour))])
        assert (light + 0.05) / (dark + 0.05) >= LEAST_CONTRAST
