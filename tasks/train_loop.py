"""The loop of a training: update, look at it, keep it; and what is left at the end."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from recon_core.balance import Curation
from recon_core.restore import Fit, NonfiniteLossError, Restorer, Training
from recon_core.restore.examples import Examples
from storage.checkpoints import save_checkpoint
from storage.dataset import Dataset
from tasks.pair_stream import Batch, PairExamples
from tasks.train_state import (
    BEST,
    LATEST,
    MODEL,
    Record,
    arrays,
    load_best,
    load_latest,
    remove,
    save_best,
    save_latest,
)
from tasks.train_validation import (
    HeldOut,
    Validation,
    for_validation,
    only,
    read_held_out,
    score,
)

SCHEMA = "palimpsest-restorer"
VERSION = 1
CHECKPOINT_SHARE = 0.05  # at most this part of the time is spent on writing checkpoints

OnStep = Callable[[int, int, float], None]
"""Called after each step with (steps done, steps in all, loss)."""


def ignore_step(_done: int, _n_steps: int, _loss: float) -> None:
    """An `OnStep` that nobody listens to."""


class Trainer:
    """One training from where `out` has it to its end."""

    def __init__(
        self,
        *,
        restorer: Restorer,
        training: Training,
        validation: Validation,
        dataset: Dataset,
        curation: Curation,
        images_for_noise: npt.NDArray[np.uint8],
        out: Path,
        device: str,
        fingerprint: str,
    ) -> None:
        self.restorer, self.training, self.validation = restorer, training, validation
        self.dataset, self.curation, self.out = dataset, curation, out
        self.device, self.fingerprint = device, fingerprint
        self.held_out: HeldOut | None = None
        if validation.every:
            self.held_out = read_held_out(dataset, validation, curation)
        self.seen = only(dataset, but=self.held_out.parts) if self.held_out else dataset
        self.fit = Fit(restorer, training, device=device)
        self.feed = PairExamples(
            self.seen,
            batch_size=training.batch_size,
            seed=training.seed,
            curation=curation,
            images_for_noise=images_for_noise,
            endless=True,
        )
        self.record = Record.of(training.n_steps)
        self._resume()
        self.started = time.monotonic() - self.record.seconds

    def _resume(self) -> None:
        """Puts everything where the checkpoint in `out` was, if it is of this training."""
        found = load_latest(self.out, self.fingerprint)
        if found is None:
            remove(self.out, LATEST, BEST)
            return
        state, meta = found
        self.fit.load_state_dict(state)
        self.feed.load_state_dict(meta["feeds"][0])
        self.record.load_state_dict(meta["record"])

    def run(self, on_step: OnStep, checkpoint_seconds: float) -> None:
        """Trains to the end, validating and saving on the way."""
        last_saved, saving = time.monotonic(), 0.0
        for _waited, batch in _timed(self.feed):
            loss = self.fit.update(Examples(**batch))
            self.record.curve.add(self.fit.step, loss)
            self.record.log.add(self.fit.step, loss)
            on_step(self.fit.step, self.training.n_steps, loss)
            if self.validation.due(self.fit.step, self.training.n_steps):
                self._require_finite(loss)
                self.validate()
            if self.fit.done:
                self._require_finite(loss)
                return
            now = time.monotonic()
            if now - last_saved >= max(checkpoint_seconds, saving / CHECKPOINT_SHARE):
                self._require_finite(loss)
                self.save()
                last_saved = time.monotonic()
                saving = last_saved - now

    def validate(self) -> None:
        """Scores the averaged weights on the held-out pairs, and keeps them if they are best."""
        assert self.held_out is not None
        restorer = for_validation(self.restorer, self.validation)
        found = score(restorer, self.fit.ema, self.held_out, device=self.device)
        self.record.validations.append((self.fit.step, found.ssim))
        if self.record.best == (self.fit.step, found.ssim):
            save_best(self.out, self.fingerprint, self.fit, found.ssim)

    def save(self) -> None:
        self.record.seconds = time.monotonic() - self.started
        save_latest(self.out, self.fingerprint, self.fit, self.record, [self.feed.state_dict()])

    def finish(self) -> dict[str, Any]:
        """Writes the model and its card, and returns the card."""
        weights, step = arrays(self.fit.ema.state_dict()), self.fit.step
        best = self.record.best
        if self.validation.keep == "best" and best is not None and best[0] != step:
            step = best[0]
            weights = load_best(self.out, self.fingerprint, step)
        card = {
            "schema": SCHEMA,
            "version": VERSION,
            "fingerprint": self.fingerprint,
            "restorer": asdict(self.restorer),
            "training": asdict(self.training),
            "curation": asdict(self.curation),
            "dataset": {
                "content_hash": self.dataset.content_hash,
                "n_pairs": self.dataset.n_pairs,
            },
            "step": step,
            "validation": self._validation_facts(),
            "n_parameters": sum(p.numel() for p in self.fit.net.parameters()),
            "n_images": self.feed.n_given,
            "seconds": round(time.monotonic() - self.started, 3),
            "device": self.device,
            "torch": torch.__version__,
            "loss_curve": self.record.curve.points,
        }
        save_checkpoint(self.out, MODEL, weights, card)
        remove(self.out, LATEST)
        return card

    def _validation_facts(self) -> dict[str, Any] | None:
        if self.held_out is None:
            return None
        best = self.record.best
        return {
            **asdict(self.validation),
            **self.held_out.facts(),
            "ssim_curve": self.record.validations,
            "best": None if best is None else {"step": best[0], "ssim": best[1]},
        }

    def _require_finite(self, loss: float) -> None:
        """A loss can be finite and the step after it not: such weights are not kept."""
        if not self.fit.finite:
            step = self.fit.step - 1
            raise NonfiniteLossError(
                step, loss, self.training.learning_rate(step), what="weights that are not finite"
            )


def _timed(feed: PairExamples) -> Iterator[tuple[float, Batch]]:
    """Batches, and the seconds that each was waited for."""
    started = time.monotonic()
    for batch in feed:
        yield time.monotonic() - started, batch
        started = time.monotonic()
