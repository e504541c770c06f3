"""Small InstaHide challenges in folders, and attacks on them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from recon_core.attacks.instahide.mixing import Mixing, mixture, random_signs
from storage.challenge import Challenge, write_challenge
from tasks.families.instahide.attack import (
    Attacked,
    InstaHideJob,
    PreparedChallenge,
    attack_all,
    prepare_challenge,
)
from tasks.families.instahide.results import scored


def normal_challenge(
    folder: Path, edges: npt.ArrayLike, *, k_pub: int = 2, side: int = 24, seed: int = 0
) -> Path:
    """A challenge whose encodings mix these pairs of standard normal images."""
    drawn = torch.Generator().manual_seed(seed)
    pairs = torch.as_tensor(np.asarray(edges))
    n, m, shape = int(pairs.max()) + 1, len(pairs), (3, side, side)
    scheme = Mixing.by_parts(k_pub)
    private = torch.randn(n, *shape, generator=drawn)
    public = torch.randn(20, *shape, generator=drawn)
    ids = torch.stack([torch.randperm(20, generator=drawn)[:k_pub] for _ in range(m)])
    mixed = mixture(private.flatten(1), pairs, torch.full((m, 2), scheme.wa))
    mixed += mixture(public.flatten(1), ids, torch.full((m, k_pub), scheme.wb))
    y = mixed.abs() * random_signs(mixed.shape, drawn)
    write_challenge(
        folder,
        Challenge(
            encodings=y.reshape(m, *shape).numpy(),
            public=public.numpy() if k_pub else None,
            facts={
                "scheme": {"kind": "theory", "k_pub": k_pub, "wa": scheme.wa, "wb": scheme.wb},
                "pixels": {"kind": "normal"},
                "n_private": n,
            },
            secret={"private": private.numpy(), "edges": pairs.numpy()},
        ),
        {},
    )
    return folder


def attacked(
    path: Path, **settings: object
) -> tuple[InstaHideJob, PreparedChallenge, list[Attacked]]:
    job = InstaHideJob(path=path, out=path.parent / "out", **settings)  # type: ignore[arg-type]
    prepared = prepare_challenge(job)
    return job, prepared, [scored(one, prepared) for one in attack_all(job, prepared, device="cpu")]


RING = [[0, 1], [1, 2], [0, 2], [2, 3], [3, 4], [0, 4], [1, 3], [0, 3], [1, 4]]
"""Five images, nine encodings, one graph."""
TAIL = [*RING, [4, 5], [5, 6]]
"""And two images that hang on them: ambiguous with public images."""
