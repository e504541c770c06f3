"""The loop of a training: update, look at it, keep it; and what is left at the end."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from recon_core.balance import Curation
from recon_core.restore import Fit, NonfiniteLossError, Restorer, Training
from recon_core.restore.examples import Examples
from storage.checkpoints import save_checkpoint
from storage.errors import StorageError
from storage.files import text_bytes, write_file
from storage.pairs.dataset import Dataset
from tasks.campaign.watch import log_notice
from tasks.dataset.pair_stream import Batch, PairExamples
from tasks.interruption import Interruption
from tasks.training.card import PAGE, device_name, model_page, versions
from tasks.training.log import TensorBoard, TrainingLog
from tasks.training.ranks import Group, OneProcess
from tasks.training.state import (
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
from tasks.training.validation import (
    HeldOut,
    Validation,
    for_validation,
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
        group: Group | None = None,
    ) -> None:
        self.group = group or OneProcess()
        if training.batch_size % self.group.size:
            raise ValueError(
                f"batch_size={training.batch_size} cannot be shared evenly by {self.group.size} "
                f"processes; use a multiple of {self.group.size}"
            )
        self.restorer, self.training, self.validation = restorer, training, validation
        self.dataset, self.curation, self.out = dataset, curation, out
        self.device, self.fingerprint = device, fingerprint
        self.held_out: HeldOut | None = None
        if validation.every:
            self.held_out = read_held_out(dataset, validation, curation)
        self.seen = dataset.without(self.held_out.parts) if self.held_out else dataset
        self.fit = Fit(restorer, training, device=device, ranks=self.group)
        self.feed = PairExamples(
            self.seen,
            batch_size=training.batch_size // self.group.size,
            rank=self.group.rank,
            world_size=self.group.size,
            seed=training.seed,
            curation=curation,
            images_for_noise=images_for_noise,
            endless=True,
        )
        self.record = Record.of(training.n_steps)
        # Other processes would wait for ever for one that saves while they do not.
        self.interruption = Interruption(holds=self.group.size == 1)
        self._resume()
        self.started = time.monotonic() - self.record.seconds

    def _resume(self) -> None:
        """Puts everything where the checkpoint in `out` was, if it is of this training."""
        found = load_latest(self.out, self.fingerprint)
        fingerprints = self.group.gather(self.fingerprint)  # nobody reads after it what is removed
        if len(set(fingerprints)) > 1:
            raise StorageError(
                f"the {self.group.size} processes found different pairs in {self.dataset.root}; "
                "start them again when nothing is written to it any more"
            )
        if found is None:
            if self.writes:
                remove(self.out, LATEST, BEST)
            return
        state, meta = found
        self.fit.load_state_dict(state)
        self.feed.load_state_dict(meta["feeds"][min(self.group.rank, len(meta["feeds"]) - 1)])
        self.record.load_state_dict(meta["record"])
        if self.writes:
            log_notice(
                f"{self.out.name} goes on after step {self.fit.step:,} of {self.training.n_steps:,}"
            )

    @property
    def writes(self) -> bool:
        """True if this process is the one that validates and writes."""
        return self.group.rank == 0

    def run(self, on_step: OnStep, checkpoint_seconds: float, tensorboard: TensorBoard) -> None:
        """Trains to the end, validating and saving on the way."""
        log = None
        if self.writes:
            log = TrainingLog(self.out, step=self.fit.step, tensorboard=tensorboard)
        try:
            self._steps(on_step, checkpoint_seconds, log)
        finally:
            if log is not None:
                log.close()

    def _steps(self, on_step: OnStep, checkpoint_seconds: float, log: TrainingLog | None) -> None:
        pace = _Pace()
        last_saved, saving = time.monotonic(), 0.0
        for waited, batch in _timed(self.feed):
            began = time.monotonic()
            lr = self.training.learning_rate(self.fit.step)
            loss = self.fit.update(Examples(**batch))
            pace.add(self.training.batch_size, waited, time.monotonic() - began)
            self.record.curve.add(self.fit.step, loss)
            if self.record.log.add(self.fit.step, loss) and log is not None:
                step, mean = self.record.log.points.pop()
                log.scalars(step, loss=mean, lr=lr, **pace.take())
            on_step(self.fit.step, self.training.n_steps, loss)
            improved = False
            if self.validation.due(self.fit.step, self.training.n_steps):
                self._require_finite(loss)
                if log is not None:
                    improved = self.validate(log)
            if self.fit.done:
                self._require_finite(loss)
                return
            now = time.monotonic()
            due = now - last_saved >= max(checkpoint_seconds, saving / CHECKPOINT_SHARE)
            # Steps that are repeated may round otherwise, and the best not be the best again.
            needed = improved and self.validation.keep == "best"
            if self.group.agree(due or needed or self.interruption.waits):
                self._require_finite(loss)
                self.save()
                last_saved = time.monotonic()
                saving = last_saved - now
            self.interruption.deliver()

    def validate(self, log: TrainingLog) -> bool:
        """Scores the averaged weights on the held-out pairs, and keeps them if they are best."""
        assert self.held_out is not None
        restorer = for_validation(self.restorer, self.validation)
        found = score(
            restorer,
            self.fit.ema,
            self.held_out,
            device=self.device,
            n_samples=self.validation.n_samples,
        )
        self.record.validations.append((self.fit.step, found.ssim))
        log.scalars(
            self.fit.step,
            validation_ssim=found.ssim,
            validation_ssim_inputs=self.held_out.ssim_inputs,
        )
        log.pictures(self.fit.step, self.held_out.inputs, found.restored, self.held_out.targets)
        improved = self.record.best == (self.fit.step, found.ssim)
        if improved:
            save_best(self.out, self.fingerprint, self.fit, found.ssim)
        return improved

    def save(self) -> None:
        """Replaces `latest` by where all processes are."""
        feeds = self.group.gather(self.feed.state_dict())
        self.record.seconds = time.monotonic() - self.started
        if self.writes:
            save_latest(self.out, self.fingerprint, self.fit, self.record, feeds)

    def finish(self) -> dict[str, Any]:
        """Writes the model and its card, and returns the card."""
        n_images = sum(self.group.gather(self.feed.n_given))
        card = {}
        if self.writes:
            card = self._write_model(n_images)
        found: dict[str, Any] = self.group.gather(card)[0]
        return found

    def _write_model(self, n_images: int) -> dict[str, Any]:
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
                "n_pairs_used": self.seen.n_pairs,
            },
            "step": step,
            "validation": self._validation_facts(),
            "n_parameters": sum(p.numel() for p in self.fit.net.parameters()),
            "n_images": n_images,
            "seconds": round(time.monotonic() - self.started, 3),
            "device": torch.device(self.device).type,
            "device_name": device_name(self.device),
            "threads": torch.get_num_threads(),
            "ranks": self.group.size,
            "torch": torch.__version__,
            "versions": versions(),
            "loss_curve": self.record.curve.points,
        }
        write_file(self.out / PAGE, text_bytes(model_page(card)))
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


@dataclass
class _Pace:
    """How fast the steps since the last `take` were, apart from validating and saving."""

    n_images: int = 0
    waited: float = 0.0
    worked: float = 0.0

    def add(self, n_images: int, waited: float, worked: float) -> None:
        self.n_images += n_images
        self.waited += waited
        self.worked += worked

    def take(self) -> dict[str, float]:
        seconds = max(self.waited + self.worked, 1e-9)
        values = {"images_per_s": self.n_images / seconds, "wait_share": self.waited / seconds}
        self.n_images, self.waited, self.worked = 0, 0.0, 0.0
        return values


def _timed(feed: PairExamples) -> Iterator[tuple[float, Batch]]:
    """Batches, and the seconds that each was waited for."""
    started = time.monotonic()
    for batch in feed:
        yield time.monotonic() - started, batch
        started = time.monotonic()
