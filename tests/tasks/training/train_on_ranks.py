"""What each process of the test of several ranks does: `torchrun train_on_ranks.py STORE OUT`."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch

from recon_core.balance import Curation
from recon_core.restore import EDM, Training
from recon_core.restore.fit import Ranks
from storage.pairs.dataset import Dataset
from tasks.training.loop import Accelerated, leave
from tasks.training.train import train_restorer
from tasks.training.validation import Validation

SIDE = 16
RESTORER = EDM(size="tiny", resolution=SIDE)
CURATION = Curation(n_subsets=3, share=1, noise_fraction=0.2)
TRAINING = Training(
    n_steps=10, batch_size=8, lr=1e-3, warmup_images=0, ema_halflife_images=50, accumulate=2
)
VALIDATION = Validation(every=5, n_pairs=4, n_sampler_steps=2)
STOP_AT = 6


class Interrupted(Exception):
    """Stands for a kill of all processes."""


def images() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (20, 3, SIDE, SIDE), dtype=np.uint8)


def train(store: Path, out: Path, group: Ranks, *, interrupt: bool) -> dict[str, object]:
    def on_step(done: int, _n_steps: int, _loss: float) -> None:
        assert interrupt or done > 1, "it started over"
        if interrupt and done == STOP_AT:
            raise Interrupted

    return train_restorer(
        RESTORER,
        TRAINING,
        dataset=Dataset(store),
        curation=CURATION,
        images_for_noise=images(),
        out=out,
        device="cpu",
        validation=VALIDATION,
        group=group,
        on_step=on_step,
        checkpoint_seconds=0.0,
    )


def main(store: Path, out: Path) -> None:
    torch.set_num_threads(1)
    group = Accelerated(cpu=True)
    assert group.size == 2
    try:
        train(store, out, group, interrupt=True)
    except Interrupted:
        pass
    else:
        raise AssertionError("the training was not interrupted")
    card = train(store, out, group, interrupt=False)
    assert card["ranks"] == 2
    group.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
    leave()
