"""The public images of every encoding by a semidefinite program: InstaHide paper, section 3.2.

With M the spike of an encoding (`public_images.spike`): max <M, Z> over Z psd with tr Z = 1 and sum
|Z| <= k_pub; the largest k_pub entries of Z's leading eigenvector are its public images. Z has p^2
entries for p public images, so this takes them by the dozen.
"""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor

from recon_core.attacks.instahide.mixing import Mixing, Scheme
from recon_core.attacks.instahide.public_images import spike
from recon_core.types import Progress, no_progress

MAX_PUBLIC = 40
"""Public images up to which the program is solved in a second or so for each encoding; of 60 some
take minutes."""


def check_pool(n_public: int, mixing: Scheme) -> None:
    """ValueError for more public images than the program takes, or fewer than encodings have."""
    if n_public > MAX_PUBLIC:
        raise ValueError(
            f"{n_public:,} public images are too many for the semidefinite program, which has "
            f"{n_public**2:,} unknowns for each encoding; give at most {MAX_PUBLIC}, or use the "
            "method exact, which takes thousands"
        )
    if n_public < mixing.k_pub:
        raise ValueError(
            f"{n_public} public images are too few: every encoding has {mixing.k_pub} of them"
        )


def by_sdp(
    y: Float[Tensor, "m d"],
    public: Float[Tensor, "p d"],
    mixing: Mixing,
    *,
    progress: Progress = no_progress,
) -> Int64[Tensor, "m k"]:
    """The k_pub public images of every encoding, in ascending order. Raises ValueError as
    `check_pool`, or if the solver gives nothing for an encoding."""
    check_pool(len(public), mixing)
    k = mixing.k_pub
    found = np.zeros((len(y), k), np.int64)
    solve = _program(len(public), k) if k else None
    for row in range(len(y) if solve else 0):
        block = spike(y[row : row + 1].double(), public[None].double(), mixing)[0]
        z = solve(np.asarray(block.cpu())) if solve else None
        if z is None:
            raise ValueError(
                f"the semidefinite program of encoding {row} has no solution to this accuracy; use "
                "the method exact"
            )
        leading = np.linalg.eigh(z)[1][:, -1]
        found[row] = np.sort(np.argsort(-np.abs(leading), kind="stable")[:k])
        progress((row + 1) / len(y))
    return torch.from_numpy(found).to(y.device)


def _program(p: int, k: int) -> Any:
    """A function from M (p, p) to the program's Z, None if the solver fails; compiled once."""
    cvxpy: Any = importlib.import_module("cvxpy")  # its names are made at run time
    m, z = cvxpy.Parameter((p, p), symmetric=True), cvxpy.Variable((p, p), PSD=True)
    within = [cvxpy.trace(z) == 1, cvxpy.sum(cvxpy.abs(z)) <= k]
    problem = cvxpy.Problem(cvxpy.Maximize(cvxpy.sum(cvxpy.multiply(m, z))), within)

    def solve(spiked: Float64[np.ndarray, "p p"]) -> Float64[np.ndarray, "p p"] | None:
        m.value = (spiked + spiked.T) / 2
        problem.solve(solver=cvxpy.SCS, warm_start=False)
        if problem.status not in (cvxpy.OPTIMAL, cvxpy.OPTIMAL_INACCURATE):
            return None
        return np.asarray(z.value)

    return solve
