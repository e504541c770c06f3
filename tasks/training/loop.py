"""The loop of a training: update, look at it, keep it; and what is left at the end."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy.typing as npt
import torch
from torch import Tensor

from recon_core.restore import Fit, NonfiniteLossError, Restorer, Training
from recon_core.restore.examples import Examples
from storage.checkpoints import save_checkpoint
from storage.files import text_bytes, write_file
from tasks.campaign.watch import log_notice
from tasks.interruption import Interruption
from tasks.training.card import PAGE, device_name, model_page, versions
from tasks.training.log import TrainingLog
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
    fitted_strength,
    for_validation,
    score,
)

CHECKPOINT_SHARE = 0.05  # at most this part of the time is spent on writing checkpoints

Arrays = dict[str, npt.NDArray[Any]]
OnStep = Callable[[int, int, float], None]
"""Called after each step with (steps done, steps in all, loss)."""


OnWork = Callable[[int, float, str], None]
"""Called with the steps done, the share of all work (validations too) in [0, 1], and a note."""
FORWARD_PER_STEP = 3
"""Evaluations of the network that an update takes as long as: forward once, backward twice."""


def ignore_work(_done: int, _share: float, _note: str) -> None:
    """An `OnWork` that nobody listens to."""


def ignore_step(_done: int, _n_steps: int, _loss: float) -> None:
    """An `OnStep` that nobody listens to."""


class Feed(Protocol):
    """Endless batches, fields of `Examples` by name, from a position that it can be put back to;
    `n_given` is the card's number of images."""

    @property
    def n_given(self) -> int: ...

    def __iter__(self) -> Iterator[Mapping[str, Tensor]]: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Trainer:
    """One training from where `out` has it to its end."""

    def __init__(
        self,
        restorer: Restorer,
        training: Training,
        feed: Feed,
        *,
        out: Path,
        device: str,
        fingerprint: str,
        group: Group | None = None,
        validation: Validation | None = None,
        held_out: HeldOut | None = None,
    ) -> None:
        self.restorer, self.training, self.feed = restorer, training, feed
        self.out, self.device, self.fingerprint = out, device, fingerprint
        self.group, self.held_out = group or OneProcess(), held_out
        self.validation = validation or Validation()
        self.fit = Fit(restorer, training, device=device, ranks=self.group)
        self.record = Record.of(training.n_steps)
        # Other processes would wait for ever for one that saves while they do not.
        self.interruption = Interruption(holds=self.group.size == 1)
        self.on_work: OnWork = ignore_work
        self._restored: tuple[int, Tensor] | None = None
        self._resume()
        self.started = time.monotonic() - self.record.seconds

    def _resume(self) -> None:
        """Puts everything where the checkpoint in `out` was, if it is of this training."""
        found = load_latest(self.out, self.fingerprint)
        self.group.gather(None)  # nobody reads after it what is removed
        if found is None:
            if self.writes:
                remove(self.out, LATEST, BEST)
            return
        state, meta = found
        self.fit.load_state_dict(state)
        feeds = meta["feeds"]
        self.feed.load_state_dict(feeds[min(self.group.rank, len(feeds) - 1)])
        self.record.load_state_dict(meta["record"])
        if self.writes:
            log_notice(
                f"{self.out.name} goes on after step {self.fit.step:,} of {self.training.n_steps:,}"
            )

    @property
    def writes(self) -> bool:
        """True if this process is the one that validates and writes."""
        return self.group.rank == 0

    def run(
        self, on_step: OnStep, checkpoint_seconds: float, log: TrainingLog | None = None
    ) -> None:
        """Trains to the end, validating and saving on the way; rank 0 has a log, if any has."""
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
            self._tell(self.fit.step - 1)
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
        ssim, restored = score(
            for_validation(self.restorer, self.validation), self.fit.ema, self.held_out,
            device=self.device, n_samples=self.validation.n_samples,
            progress=lambda fraction: self._tell(self.fit.step - 1, fraction, "validation"),
        )  # fmt: skip
        step, before = self.fit.step, self.held_out.ssim_inputs
        self._restored = (step, restored)
        self.record.validations.append((step, ssim))
        log.scalars(step, validation_ssim=ssim, validation_ssim_inputs=before)
        log.pictures(self.held_out.inputs, restored, self.held_out.targets)
        improved = self.record.best == (step, ssim)
        if improved:
            save_best(self.out, self.fingerprint, self.fit, ssim)
        return improved

    def save(self) -> None:
        """Replaces `latest` by where all processes are."""
        feeds = self.group.gather(self.feed.state_dict())
        self.record.seconds = time.monotonic() - self.started
        if self.writes:
            save_latest(self.out, self.fingerprint, self.fit, self.record, feeds)

    def finish(self, facts: Mapping[str, Any]) -> dict[str, Any]:
        """Writes the model and its card, `facts` and what all trainings say, and returns the
        card."""
        n_images = sum(self.group.gather(self.feed.n_given))
        card = self._write_model({**facts, "n_images": n_images}) if self.writes else {}
        found: dict[str, Any] = self.group.gather(card)[0]
        return found

    def _write_model(self, facts: Mapping[str, Any]) -> dict[str, Any]:
        weights, step = arrays(self.fit.ema.state_dict()), self.fit.step
        best = self.record.best
        if self.validation.keep == "best" and best is not None and best[0] != step:
            step = best[0]
            weights = load_best(self.out, self.fingerprint, step)
        restorer, curve = self._fitted(weights, step)
        card = {
            **facts,
            "fingerprint": self.fingerprint,
            "restorer": asdict(restorer),
            "training": asdict(self.training),
            "step": step,
            "validation": self._validation_facts(curve),
            "n_parameters": sum(p.numel() for p in self.fit.net.parameters()),
            "seconds": round(time.monotonic() - self.started, 3),
            "device": torch.device(self.device).type,
            "device_name": device_name(self.device),
            "threads": torch.get_num_threads(),
            "ranks": self.group.size,
            "torch": torch.__version__,
            "versions": versions(),
            "loss_curve": self.record.curve.points,
        }
        if "dataset" in card:
            write_file(self.out / PAGE, text_bytes(model_page(card)))
        save_checkpoint(self.out, MODEL, weights, card)
        remove(self.out, LATEST)
        return card

    def _fitted(self, weights: Arrays, step: int) -> tuple[Restorer, list[tuple[float, float]]]:
        """The restorer with the strength that its validation asks for, and what was compared:
        what the last validation restored, if it was of these weights and of the whole strength."""
        if self.held_out is None or self.validation.strength == "full":
            return self.restorer, []
        if self._restored is not None and self._restored[0] == step and self.restorer.strength == 1:
            restored = self._restored[1]
        else:
            net = self.restorer.build(seed=0)
            net.load_state_dict({name: torch.from_numpy(array) for name, array in weights.items()})
            _ssim, restored = score(
                replace(for_validation(self.restorer, self.validation), strength=1.0),
                net.to(self.device), self.held_out,
                device=self.device, n_samples=self.validation.n_samples,
                progress=lambda fraction: self._tell(self.fit.step, fraction, "strength"),
            )  # fmt: skip
        strength, curve = fitted_strength(restored, self.held_out)
        return replace(self.restorer, strength=strength), curve

    def _tell(self, validated_to: int, fraction: float = 0.0, note: str = "") -> None:
        """Tells how far the training is, in evaluations of the network: those of the steps, of the
        validations due up to step `validated_to`, and of this fraction of another."""
        n_steps, of_step = self.training.n_steps, FORWARD_PER_STEP * self.training.batch_size
        done, total = float(self.fit.step * of_step), n_steps * of_step
        if self.held_out is not None:
            one = self.validation.evaluations(self.restorer, len(self.held_out.inputs))
            done += (self.validation.n_due(validated_to, n_steps) + fraction) * one
            total += self.validation.n_due(n_steps, n_steps) * one
        self.on_work(self.fit.step, min(1.0, done / total), note)

    def _validation_facts(self, strengths: list[tuple[float, float]]) -> dict[str, Any] | None:
        if self.held_out is None:
            return None
        best = self.record.best
        return {
            **asdict(self.validation),
            **self.held_out.facts(),
            "strength_curve": strengths,
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


def _timed(feed: Feed) -> Iterator[tuple[float, Mapping[str, Tensor]]]:
    """Batches, and the seconds that each was waited for."""
    started = time.monotonic()
    for batch in feed:
        yield time.monotonic() - started, batch
        started = time.monotonic()
