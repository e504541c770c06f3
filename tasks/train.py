"""Train a restorer on a store of pairs: stream, examples, fit, and a folder with the result.

A training is identified by its fingerprint: the restorer's and the training's settings, the
curation, the pairs and the images that noise examples are made of. The folder `out` holds, while
it runs, a checkpoint `training`, and at the end the model: `model.json`, its card, which names the
safetensors file with the averaged weights. Finished trainings are not repeated, and interrupted
ones continue so that the model is bit for bit what it would have been (on one device, with one
number of CPU threads).
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from recon_core.balance import Curation
from recon_core.restore import RESTORERS, Fit, Restorer, Training
from recon_core.restore.examples import Examples
from storage.checkpoints import load_checkpoint, save_checkpoint
from storage.dataset import Dataset
from storage.errors import StorageError
from tasks.pair_stream import ORDER, PairExamples

SCHEMA = "palimpsest-restorer"
VERSION = 1
CURVE_POINTS = 200
CHECKPOINT_SHARE = 0.05  # at most this part of the time is spent on writing checkpoints

OnStep = Callable[[int, int, float], None]
"""Called after each step with (steps done, steps in all, loss)."""


def ignore_step(_done: int, _n_steps: int, _loss: float) -> None:
    """An `OnStep` that nobody listens to."""


def train_restorer(
    restorer: Restorer,
    training: Training,
    *,
    dataset: Dataset,
    curation: Curation,
    images_for_noise: npt.NDArray[np.uint8],
    out: Path,
    device: str,
    on_step: OnStep = ignore_step,
    checkpoint_seconds: float = 20.0,
) -> dict[str, Any]:
    """The card of the model that is then in `out`; trains it only as far as it is not there yet.

    `images_for_noise` are the training images of the source, uint8 (n, 3, h, w). A checkpoint is
    written every `checkpoint_seconds`, less often where writing takes long. A model or checkpoint
    of other settings in `out` is replaced.

    Raises:
        StorageError: the dataset has no pair that `curation` admits.
        NonfiniteLossError: the training diverged; says in which step.
    """
    fingerprint = training_fingerprint(restorer, training, dataset, curation, images_for_noise)
    finished = load_checkpoint(out, "model")
    if finished is not None and finished[1].get("fingerprint") == fingerprint:
        return finished[1]
    fit = Fit(restorer, training, device=device)
    feed = PairExamples(
        dataset,
        batch_size=training.batch_size,
        seed=training.seed,
        curation=curation,
        images_for_noise=images_for_noise,
        endless=True,
    )
    curve = _Curve(max(1, training.n_steps // CURVE_POINTS))
    seconds_before = _resume(out, fingerprint, fit, feed, curve)

    started = last_saved = time.monotonic()
    saving = 0.0
    for batch in feed:
        loss = fit.update(Examples(**batch))
        curve.add(fit.step, loss)
        on_step(fit.step, training.n_steps, loss)
        if fit.done:
            break
        now = time.monotonic()
        if now - last_saved >= max(checkpoint_seconds, saving / CHECKPOINT_SHARE):
            meta = {
                "fingerprint": fingerprint,
                "feed": feed.state_dict(),
                "curve": asdict(curve),
                "seconds": seconds_before + now - started,
            }
            save_checkpoint(out, "training", _arrays(fit.state_dict()), meta)
            last_saved = time.monotonic()
            saving = last_saved - now
    card = {
        "schema": SCHEMA,
        "version": VERSION,
        "fingerprint": fingerprint,
        "restorer": asdict(restorer),
        "training": asdict(training),
        "curation": asdict(curation),
        "dataset": {"content_hash": dataset.content_hash, "n_pairs": dataset.n_pairs},
        "n_parameters": sum(p.numel() for p in fit.net.parameters()),
        "n_images": feed.n_given,
        "seconds": round(seconds_before + time.monotonic() - started, 3),
        "device": device,
        "torch": torch.__version__,
        "loss_curve": curve.points,
    }
    save_checkpoint(out, "model", _arrays(fit.ema.state_dict()), card)
    for leftover in out.glob("training*"):
        leftover.unlink()
    return card


def load_restorer(path: Path, *, device: str) -> tuple[Restorer, nn.Module]:
    """The restorer and its network, ready to restore, from a folder `train_restorer` wrote to.

    `path` may also be the `model.json` in it.

    Raises:
        StorageError: there is no finished model, or one of a newer version.
    """
    folder = path.parent if path.suffix == ".json" else path
    found = load_checkpoint(folder, "model")
    if found is None:
        raise StorageError(f"{folder} has no finished restorer (model.json); train one into it")
    tensors, card = found
    if card.get("schema") != SCHEMA or card.get("version") != VERSION:
        raise StorageError(
            f"{folder}/model.json is {card.get('schema')} version {card.get('version')}, this "
            f"program reads {SCHEMA} version {VERSION}; train again or update the program"
        )
    settings = dict(card["restorer"])
    if settings.get("kind") not in RESTORERS:
        raise StorageError(
            f"{folder}/model.json has kind={settings.get('kind')!r}; known are {list(RESTORERS)}"
        )
    restorer = RESTORERS[settings["kind"]](**settings)
    net = restorer.build(seed=0)
    net.load_state_dict({name: torch.from_numpy(array) for name, array in tensors.items()})
    return restorer, net.to(device).eval().requires_grad_(False)


def training_fingerprint(
    restorer: Restorer,
    training: Training,
    dataset: Dataset,
    curation: Curation,
    images_for_noise: npt.NDArray[np.uint8],
) -> str:
    """SHA-256 over everything the model's weights depend on, but for device and versions."""
    images = hashlib.sha256(repr(images_for_noise.shape).encode())
    images.update(np.ascontiguousarray(images_for_noise).data)
    body = {
        "version": VERSION,
        "restorer": asdict(restorer),
        "training": asdict(training),
        "curation": asdict(curation),
        "dataset": dataset.content_hash,
        "images_for_noise": images.hexdigest(),
        "order": ORDER,
    }
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


@dataclass
class _Curve:
    """The loss, averaged over every `window` steps, as [steps done, mean loss]."""

    window: int
    points: list[tuple[int, float]] = field(default_factory=list)
    waiting: list[float] = field(default_factory=list)

    def add(self, step: int, loss: float) -> None:
        self.waiting.append(loss)
        if len(self.waiting) == self.window:
            self.points.append((step, sum(self.waiting) / self.window))
            self.waiting = []


def _resume(out: Path, fingerprint: str, fit: Fit, feed: PairExamples, curve: _Curve) -> float:
    """Puts all three where the checkpoint in `out` was, if it is of this training.

    Returns the seconds that were spent until then.
    """
    found = load_checkpoint(out, "training")
    if found is None or found[1].get("fingerprint") != fingerprint:
        return 0.0
    tensors, meta = found
    fit.load_state_dict({name: torch.from_numpy(array) for name, array in tensors.items()})
    feed.load_state_dict(meta["feed"])
    curve.points = [(int(step), float(loss)) for step, loss in meta["curve"]["points"]]
    curve.waiting = [float(loss) for loss in meta["curve"]["waiting"]]
    return float(meta["seconds"])


def _arrays(state: dict[str, Tensor]) -> dict[str, npt.NDArray[Any]]:
    return {name: value.detach().cpu().numpy() for name, value in state.items()}
