"""The loop of a training: update, look at it, keep it; and what is left at the end.

`log.jsonl` has JSON lines (docs/training.md). `validation.png` shows the last validation: held-out
pairs in columns, what came back over what was restored over what it should be. The checkpoint
`latest` has all that a resumed training needs to end with the record that it would have had: lines
of the log after it are removed. Several processes, one per device, can train together: `torchrun`
starts them, `accelerate` (optional) joins them, DistributedDataParallel averages gradients. Each
takes `batch_size / ranks` of its own share of the pairs a step; rank 0 validates and writes.
"""

from __future__ import annotations

import json
import math
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn, Protocol

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Float32
from pydantic import TypeAdapter
from torch import Tensor, nn

from recon_core.restore import EDM, Fit, NonfiniteLossError, Restorer, Training
from recon_core.restore.examples import Examples
from recon_core.restore.fit import Ranks
from storage.checkpoints import load_checkpoint, save_checkpoint
from storage.errors import CorruptPartError
from storage.files import write_file
from tasks.campaign.plan import code_version
from tasks.campaign.state import log_notice
from tasks.devices import cpu_name
from tasks.interruption import Interruption
from tasks.page.pictures import eight_bits, png_bytes
from tasks.training.validation import HeldOut, Validation, fitted_strength, score

LATEST, BEST, MODEL = "latest", "best", "model"
LOG, PICTURE = "log.jsonl", "validation.png"
CHECKPOINT_SHARE = 0.05  # at most this part of the time is spent on writing checkpoints
CURVE_POINTS = 200
LONGEST_WINDOW = 100
N_SHOWN, GAP, SCALE = 16, 2, 2

Arrays = dict[str, npt.NDArray[Any]]
OnStep = Callable[[int, int, float], None]
"""Called after each step with (steps done, steps in all, loss)."""


def ignore(_done: int, _n_steps: int, _loss: float) -> None:
    """An `OnStep` that nobody listens to."""


class Feed(Protocol):
    """Endless batches, fields of `Examples` by name, from a position that it can be put back to;
    `n_given` is the card's number of images."""

    @property
    def n_given(self) -> int: ...

    def __iter__(self) -> Iterator[Mapping[str, Tensor]]: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@dataclass
class Record:
    """Mean losses of windows as (steps done, loss), losses of the window that is not full yet,
    validations as (steps done, SSIM), and seconds."""

    losses: list[tuple[int, float]] = field(default_factory=list)
    waiting: list[float] = field(default_factory=list)
    validations: list[tuple[int, float]] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def best(self) -> tuple[int, float] | None:
        """The validation with the highest SSIM, the first of equals."""
        return max(self.validations, key=lambda found: found[1], default=None)


class TrainingLog:
    """The log of a training in `out`, continued after `step` steps."""

    def __init__(self, out: Path, *, step: int) -> None:
        out.mkdir(parents=True, exist_ok=True)
        lines = (out / LOG).read_bytes().splitlines(keepends=True) if (out / LOG).is_file() else []
        # the log is not synced: a kill leaves half a line at its end, a power failure maybe zeros
        kept = [line for line in lines if line.endswith(b"\n") and _step_of(line) <= step]
        write_file(out / LOG, b"".join(kept) if step else b"")
        self._file = (out / LOG).open("ab")
        if not step:
            (out / PICTURE).unlink(missing_ok=True)

    def scalars(self, step: int, **values: float) -> None:
        """Write values after `step` steps; those of a validation begin with "validation_"."""
        line = json.dumps({"step": step, **values}, allow_nan=False)
        self._file.write(line.encode() + b"\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def grid(pictures: Float32[Tensor, "rows n c h w"]) -> npt.NDArray[np.uint8]:
    """The pictures in rows and columns on white, (c, height, width), each pixel a square."""
    values = eight_bits(pictures).repeat(SCALE, axis=3).repeat(SCALE, axis=4)
    edges = ((0, 0), (0, 0), (0, 0), (GAP, GAP), (GAP, GAP))
    tiles = np.pad(values, edges, constant_values=255)
    n_rows, n_columns, n_channels, height, width = tiles.shape
    return tiles.transpose(2, 0, 3, 1, 4).reshape(n_channels, n_rows * height, n_columns * width)


def _step_of(line: bytes) -> float:
    """The step of a line; infinite for what is no line of the log."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return math.inf


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
        group: Ranks | None = None,
        validation: Validation | None = None,
        held_out: HeldOut | None = None,
    ) -> None:
        self.restorer, self.training, self.feed = restorer, training, feed
        self.out, self.device, self.fingerprint = out, device, fingerprint
        self.group, self.held_out = group or Ranks(), held_out
        self.validation = validation or Validation()
        self.fit = Fit(restorer, training, device=device, ranks=self.group)
        self.record = Record()
        # Other processes would wait for ever for one that saves while they do not.
        self.interruption = Interruption(holds=self.group.size == 1)
        self._restored: tuple[int, Tensor] | None = None
        self._resume()
        self.started = time.monotonic() - self.record.seconds

    def _resume(self) -> None:
        """Restore the checkpoint in `out`, if it is of this training."""
        found = load_latest(self.out, self.fingerprint)
        self.group.gather(None)  # nobody reads after it what is removed
        if found is None:
            if self.writes:
                remove(self.out, LATEST, BEST)
            return
        state, meta = found
        self.fit.load_state_dict({name: torch.from_numpy(array) for name, array in state.items()})
        feeds = meta["feeds"]
        self.feed.load_state_dict(feeds[min(self.group.rank, len(feeds) - 1)])
        self.record = TypeAdapter(Record).validate_python(meta["record"])
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
        """Train to the end, validating and saving on the way; rank 0 has a log, if any has."""
        window = max(1, min(self.training.n_steps // CURVE_POINTS, LONGEST_WINDOW))
        n_images, waited, worked = 0, 0.0, 0.0  # since the last line of the log
        last_saved, saving = time.monotonic(), 0.0
        batches = iter(self.feed)
        while True:
            asked = time.monotonic()
            batch = next(batches)
            began = time.monotonic()
            lr = self.training.learning_rate(self.fit.step)
            loss = self.fit.update(Examples(**batch))
            n_images += self.training.batch_size
            waited, worked = waited + began - asked, worked + time.monotonic() - began
            self.record.waiting.append(loss)
            if len(self.record.waiting) == window:
                mean, self.record.waiting = sum(self.record.waiting) / window, []
                self.record.losses.append((self.fit.step, mean))
                if log is not None:
                    took = max(waited + worked, 1e-9)
                    pace = {"images_per_s": n_images / took, "wait_share": waited / took}
                    log.scalars(self.fit.step, loss=mean, lr=lr, **pace)
                n_images, waited, worked = 0, 0.0, 0.0
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
        """Score the averaged weights on the held-out pairs; True if they are best, and kept."""
        assert self.held_out is not None
        ssim, restored = self._scored(self.fit.ema, self.restorer)
        step, before = self.fit.step, self.held_out.ssim_inputs
        self._restored = (step, restored)
        self.record.validations.append((step, ssim))
        log.scalars(step, validation_ssim=ssim, validation_ssim_inputs=before)
        shown = [x[:N_SHOWN] for x in (self.held_out.inputs, restored, self.held_out.targets)]
        write_file(self.out / PICTURE, png_bytes(grid(torch.stack(shown))))
        improved = self.record.best == (step, ssim)
        if improved:
            meta = {"fingerprint": self.fingerprint, "step": step, "ssim": ssim}
            save_checkpoint(self.out, BEST, arrays(self.fit.ema.state_dict()), meta)
        return improved

    def save(self) -> None:
        """Replace `latest` by the present state of all processes."""
        feeds = self.group.gather(self.feed.state_dict())
        self.record.seconds = time.monotonic() - self.started
        if self.writes:
            meta = {
                "fingerprint": self.fingerprint,
                "step": self.fit.step,
                "feeds": feeds,
                "record": asdict(self.record),
            }
            save_checkpoint(self.out, LATEST, arrays(self.fit.state_dict()), meta)

    def finish(
        self, facts: Mapping[str, Any], page: Callable[[Mapping[str, Any]], None] | None = None
    ) -> dict[str, Any]:
        """Write the model and its card, which has `facts` and the training's, and return the card.
        `page` is given the card before the model is there."""
        n_images = sum(self.group.gather(self.feed.n_given))
        if not self.writes:
            return dict(self.group.gather({})[0])
        weights, step = arrays(self.fit.ema.state_dict()), self.fit.step
        best = self.record.best
        if self.validation.keep == "best" and best is not None and best[0] != step:
            step = best[0]
            found = load_checkpoint(self.out, BEST)
            wanted = {"fingerprint": self.fingerprint, "step": step}
            if found is None or not wanted.items() <= found[1].items():
                raise CorruptPartError(
                    f"{self.out} has no best.json of step {step}, where the validation was best; "
                    f"remove {self.out / 'latest.json'} to train from the start"
                )
            weights = found[0]
        restorer, curve = self._fitted(weights, step)
        validation = None
        if self.held_out is not None:
            validation = {
                **asdict(self.validation),
                "held_out_parts": list(self.held_out.parts),
                "n_pairs": len(self.held_out.targets),
                "unaugmented": self.held_out.unaugmented,
                "ssim_inputs": self.held_out.ssim_inputs,
                "strength_curve": curve,
                "ssim_curve": self.record.validations,
                "best": None if best is None else {"step": best[0], "ssim": best[1]},
            }
        device = torch.device(self.device)
        card = {
            **facts,
            "n_images": n_images,
            "fingerprint": self.fingerprint,
            "restorer": asdict(restorer),
            "training": asdict(self.training),
            "step": step,
            "validation": validation,
            "n_parameters": sum(p.numel() for p in self.fit.net.parameters()),
            "seconds": round(time.monotonic() - self.started, 3),
            "device": device.type,
            "device_name": torch.cuda.get_device_name(device)
            if device.type == "cuda"
            else cpu_name(),
            "threads": torch.get_num_threads(),
            "ranks": self.group.size,
            "torch": torch.__version__,
            "versions": {
                "palimpsest": code_version(),
                "python": platform.python_version(),
                "torch": torch.__version__,
                "numpy": np.__version__,
            },
            "loss_curve": self.record.losses,
        }
        if page is not None:
            page(card)
        save_checkpoint(self.out, MODEL, weights, card)
        remove(self.out, LATEST)
        return dict(self.group.gather(card)[0])

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
            whole = replace(self.restorer, strength=1.0)
            _ssim, restored = self._scored(net.to(self.device), whole)
        strength, curve = fitted_strength(restored, self.held_out)
        return replace(self.restorer, strength=strength), curve

    def _scored(self, net: nn.Module, restorer: Restorer) -> tuple[float, Tensor]:
        """SSIM and restorations of the held-out pairs, with the validation's sampler steps."""
        assert self.held_out is not None
        n_steps = self.validation.n_sampler_steps
        if isinstance(restorer, EDM) and n_steps is not None:
            restorer = replace(restorer, n_steps=n_steps)
        n_samples = self.validation.n_samples
        return score(restorer, net, self.held_out, device=self.device, n_samples=n_samples)

    def _require_finite(self, loss: float) -> None:
        """Raise NonfiniteLossError for weights that are not finite, whatever the loss."""
        if not self.fit.finite:
            step = self.fit.step - 1
            raise NonfiniteLossError(
                step, loss, self.training.learning_rate(step), what="weights that are not finite"
            )


def load_latest(out: Path, fingerprint: str) -> tuple[Arrays, dict[str, Any]] | None:
    """State and meta of the checkpoint in `out`, if it was of this training; else None. Raises
    CorruptPartError if the files are not as they were written."""
    found = load_checkpoint(out, LATEST)
    return found if found is not None and found[1].get("fingerprint") == fingerprint else None


def remove(out: Path, *names: str) -> None:
    """Remove checkpoints, first the file that names the weights."""
    for name in names:
        for file in (out / f"{name}.json", *out.glob(f"{name}-*.safetensors")):
            file.unlink(missing_ok=True)


def arrays(state: Mapping[str, Tensor]) -> Arrays:
    return {name: value.detach().cpu().numpy() for name, value in state.items()}


class Accelerated(Ranks):
    """The processes that torchrun has started, `device` being each one's own.

    Raises ValueError if `accelerate` is not installed.
    """

    def __init__(self, *, cpu: bool = False) -> None:
        try:
            from accelerate import Accelerator
        except ImportError as error:
            raise ValueError(
                f"several processes need accelerate, which cannot be imported ({error}); "
                "pip install '.[multigpu]', or start one process"
            ) from error
        self._accelerator: Any = Accelerator(cpu=cpu, mixed_precision="no")
        self.rank: int = self._accelerator.process_index
        self.size: int = self._accelerator.num_processes

    @property
    def device(self) -> str:
        return str(self._accelerator.device)

    def wrap(self, net: nn.Module) -> nn.Module:
        wrapped: nn.Module = self._accelerator.prepare_model(net)
        return wrapped

    def place(self, n: int) -> tuple[int, int]:
        counts = self.gather(n)
        return sum(counts[: self.rank]), sum(counts)

    def sum(self, value: float) -> float:
        held = torch.tensor(value, dtype=torch.float64, device=self._accelerator.device)
        return float(self._accelerator.reduce(held, reduction="sum"))

    def unsynchronised(self, wrapped: nn.Module) -> AbstractContextManager[None]:
        context: AbstractContextManager[None] = self._accelerator.no_sync(wrapped)
        return context

    def gather(self, value: Any) -> list[Any]:
        from accelerate.utils import gather_object

        return list(gather_object([value]))

    def agree(self, flag: bool) -> bool:
        return self.sum(float(flag and self.rank == 0)) > 0

    def close(self) -> None:
        """End the connections; a process that leaves them open may end with an error."""
        self.gather(None)  # nobody leaves while another waits for it
        self._accelerator.end_training()


def leave() -> NoReturn:
    """End this process at once, all of its work being done and written.

    With torch 2.13 a rank sometimes aborts in the destructors of its libraries ("terminate called
    without an active exception"), and torchrun would call a finished training failed.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
