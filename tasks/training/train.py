"""Train a restorer on a store of pairs: stream, examples, fit, and a folder with the result.

A training is identified by its fingerprint: its settings, the curation, the pairs, which of them
are held out, and the images that noise examples are made of. `out` holds, while it runs, the
checkpoint `latest` and, where validations are made, `best`; at the end `model.json`, the card,
which names the averaged weights, and `MODEL_CARD.md`. Interrupted trainings continue so that the
model is bit for bit what it would have been (on one device, with one number of CPU threads).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
import torch
from pydantic import Field, TypeAdapter, ValidationError
from torch import nn

from recon_core.balance import Curation
from recon_core.matching import CLIPPED
from recon_core.restore import NonfiniteLossError, Restorer, Training
from recon_core.restore.fit import Ranks
from storage.checkpoints import load_checkpoint
from storage.documents import understood
from storage.errors import StorageError
from storage.files import text_bytes, write_file
from storage.pairs.dataset import Dataset
from tasks.dataset.pair_stream import ORDER, PairExamples
from tasks.training.loop import (
    LATEST,
    MODEL,
    OnStep,
    Trainer,
    TrainingLog,
    ignore,
    load_latest,
)
from tasks.training.validation import Validation, held_out_parts, read_held_out

SCHEMA, VERSION = "palimpsest-restorer", 1
RESTORER: TypeAdapter[Restorer] = TypeAdapter(Annotated[Restorer, Field(discriminator="kind")])

PAGE = "MODEL_CARD.md"
TITLES = {"edm": "EDM diffusion restorer", "bf_dncnn": "BF-DnCNN", "unet": "U-Net regression"}
WHOLE_MODEL = "use the model as it was written, update the program, or train again"


def train_restorer(
    restorer: Restorer,
    training: Training,
    *,
    dataset: Dataset,
    curation: Curation,
    images_for_noise: npt.NDArray[np.uint8],
    out: Path,
    device: str,
    validation: Validation | None = None,
    group: Ranks | None = None,
    on_step: OnStep = ignore,
    checkpoint_seconds: float = 20.0,
) -> dict[str, Any]:
    """Train the model in `out` as far as it is not there yet, and return its card.

    `images_for_noise` are the training images of the source, uint8 (n, 3, h, w). A checkpoint is
    written every `checkpoint_seconds`, less often where writing takes long, and when SIGTERM or
    SIGINT comes, which then waits for the end of a step. A model or checkpoint of other settings in
    `out` is replaced. `group`: the processes that train together, each calling this with its own
    `device`.

    Raises StorageError if the dataset has no pair that `curation` admits or too few parts to hold
    any out, or the processes of `group` see different ones; NonfiniteLossError, which says what is
    kept, if the training diverged; StoreMismatchError if another number of processes has begun it;
    ValueError for a device without arithmetic of `training.precision`, or a `group` that cannot
    share the batch evenly.
    """
    validation = validation or Validation()
    fingerprint = training_fingerprint(
        restorer, training, dataset, curation, images_for_noise, validation=validation
    )
    finished = load_checkpoint(out, MODEL)
    if finished is not None and finished[1].get("fingerprint") == fingerprint:
        return finished[1]
    group = group or Ranks()
    if training.batch_size % group.size:
        raise ValueError(
            f"batch_size={training.batch_size} cannot be shared evenly by {group.size} "
            f"processes; use a multiple of {group.size}"
        )
    if len(set(group.gather(fingerprint))) > 1:
        raise StorageError(
            f"the {group.size} processes found different pairs in {dataset.root}; start them again "
            "when nothing is written to it any more"
        )
    held_out = read_held_out(dataset, validation, curation) if validation.every else None
    seen = dataset.without(held_out.parts) if held_out else dataset
    left_out = None
    if held_out and validation.strength == "fitted":
        left_out = np.unique(held_out.image_ids)
        within = left_out[left_out < len(images_for_noise)]
        images_for_noise = np.delete(images_for_noise, within, axis=0)
    feed = PairExamples(
        seen, batch_size=training.batch_size // group.size, seed=training.seed, curation=curation,
        images_for_noise=images_for_noise, left_out=left_out, rank=group.rank,
        world_size=group.size, endless=True,
    )  # fmt: skip
    trainer = Trainer(
        restorer, training, feed, out=out, device=device, fingerprint=fingerprint, group=group,
        validation=validation, held_out=held_out,
    )  # fmt: skip
    pairs = {
        "content_hash": dataset.content_hash,
        "n_pairs": dataset.n_pairs,
        "n_pairs_used": seen.n_pairs,
    }
    with trainer.interruption:
        log = TrainingLog(out, step=trainer.fit.step) if trainer.writes else None
        try:
            trainer.run(on_step, checkpoint_seconds, log)
        except NonfiniteLossError as error:
            found = load_latest(out, fingerprint)
            kept = f"no checkpoint had been written to {out} before"
            if found is not None:
                kept = (
                    f"{out / LATEST}.json is kept as it was before, after step "
                    f"{found[1]['step']}; with the same settings the training would come to the "
                    "same step again"
                )
            raise error.with_note(f"; {kept}") from None
        finally:
            if log is not None:
                log.close()
        return trainer.finish(
            {"schema": SCHEMA, "version": VERSION, "curation": asdict(curation), "dataset": pairs},
            lambda card: write_file(out / PAGE, text_bytes(model_page(card))),
        )


def load_restorer(path: Path, device: str) -> tuple[Restorer, nn.Module]:
    """Load a restorer and its network, ready to restore, from a folder of `train_restorer`, or
    the `model.json` in it. Raises StorageError if there is no finished model, one of a newer
    version, or one whose settings are not a restorer's or do not fit its weights."""
    folder = model_folder(path)
    found = load_checkpoint(folder, MODEL)
    if found is None:
        raise StorageError(f"{folder} has no finished restorer (model.json); train one into it")
    tensors, card = found
    if card.get("schema") != SCHEMA or card.get("version") != VERSION:
        raise StorageError(
            f"{folder}/model.json is {card.get('schema')} version {card.get('version')}, this "
            f"program reads {SCHEMA} version {VERSION}; train again or update the program"
        )
    with understood(f"{folder}/{MODEL}.json", WHOLE_MODEL):
        try:
            restorer = RESTORER.validate_python(card["restorer"])
            net = restorer.build(seed=0)
            net.load_state_dict({name: torch.from_numpy(a) for name, a in tensors.items()})
        except ValidationError as error:
            first = error.errors()[0]
            name = ".".join(map(str, first["loc"]))
            raise ValueError(f"{name}: {first['msg']}, not {first['input']!r}") from error
        except RuntimeError as error:  # other weights, or torch's own, of sizes beyond 64 bits
            raise ValueError(str(error)) from error
    return restorer, net.to(device).eval().requires_grad_(False)


def model_folder(path: Path) -> Path:
    """The folder of the restorer that `path` names: itself, or where it is the `model.json` in.
    Raises StorageError for any other file."""
    if not path.is_file():
        return path
    if path.name != f"{MODEL}.json":
        raise StorageError(
            f"{path} is not the {MODEL}.json of a finished restorer; give the folder that "
            "`palimpsest train` wrote, or that file in it"
        )
    return path.parent


def training_fingerprint(
    restorer: Restorer,
    training: Training,
    dataset: Dataset,
    curation: Curation,
    images_for_noise: npt.NDArray[np.uint8],
    *,
    validation: Validation,
) -> str:
    """SHA-256 over everything the model's weights depend on, but for device and versions.

    Raises StorageError if `validation` would hold all of the dataset out.
    """
    images = hashlib.sha256(repr(images_for_noise.shape).encode())
    images.update(np.ascontiguousarray(images_for_noise).data)
    body: dict[str, Any] = {
        "version": VERSION,
        "restorer": asdict(restorer),
        "training": asdict(training),
        "curation": asdict(curation),
        "dataset": dataset.content_hash,
        "images_for_noise": images.hexdigest(),
        "order": ORDER,
        "clipped": CLIPPED,
    }
    if validation.every:
        body["held_out"] = held_out_parts(dataset, validation.n_parts)
    if validation.keep == "best" or validation.strength == "fitted":
        body["validation"] = asdict(validation)
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def model_page(card: Mapping[str, Any]) -> str:
    """Write the card as Markdown."""
    training, dataset, found = card["training"], card["dataset"], card["validation"]
    kind = TITLES.get(card["restorer"]["kind"], card["restorer"]["kind"])
    is_averaged = training["ema_halflife_images"] > 0 and training["ema_ramp"] > 0
    lines = [
        f"# {kind}",
        "",
        "Turns the reconstruction of a training image, got from the weights of a network that was "
        "trained on it, into an estimate of that image. What it adds may be invented.",
        "",
        f"- **Weights:** {'' if is_averaged else 'not '}averaged{' (EMA)' * is_averaged}, after "
        f"step {card['step']:,} of {training['n_steps']:,}; {card['n_parameters']:,} parameters",
        f"- **Examples:** {card['n_images']:,}, from {dataset['n_pairs_used']:,} of the "
        f"{dataset['n_pairs']:,} pairs of the dataset `{dataset['content_hash']}`",
        f"- **Time:** {card['seconds']:,.0f} seconds on {card['ranks']} x {card['device']} "
        f"({card['device_name']}), {card['threads']} CPU threads",
        "- **Versions:** " + ", ".join(f"{name} {v}" for name, v in card["versions"].items()),
        f"- **Fingerprint:** `{card['fingerprint']}`",
        "",
        "## Validation",
        "",
    ]
    if found is None:
        lines.append("None: no pairs were held out (`validation.every` is 0).")
    else:
        parts = ", ".join(str(part) for part in found["held_out_parts"])
        plain = "unaugmented" if found["unaugmented"] else "partly augmented"
        elsewhere = "" if found["strength_curve"] else "; other runs may hold the same images"
        lines += [
            f"Mean SSIM (Gaussian 11 x 11) of {found['n_pairs']} {plain} pairs of part {parts}, "
            f"which the training did not see{elsewhere}. Before restoration "
            f"{found['ssim_inputs']:.4f}; the best was {found['best']['ssim']:.4f} after step "
            f"{found['best']['step']:,}. The weights kept are the {found['keep']}.",
            "",
            *_table(("step", "SSIM"), [(f"{n:,}", f"{x:.4f}") for n, x in found["ssim_curve"]]),
        ]
        if curve := found["strength_curve"]:
            fitted = card["restorer"]["strength"]
            lines += [
                "",
                f"The strength is {fitted:g}: restorations go this share of the way from the "
                "picture to the network's answer. The images of these pairs were in no example of "
                "the training." + (" No strength helps them beyond chance." if not fitted else ""),
                "",
                *_table(("strength", "SSIM"), [(f"{s:g}", f"{x:.4f}") for s, x in curve]),
            ]
    for name in ("restorer", "training", "curation"):
        values = [(f"`{setting}`", str(value)) for setting, value in card[name].items()]
        lines += ["", f"## {name.capitalize()}", "", *_table(("setting", "value"), values)]
    lines += [
        "",
        "## Limits",
        "",
        "Made to measure and close leaks of training data, for models that one owns or may test. "
        "Restorers also raise false positives: read good counts beside those of decoys "
        "(`palimpsest evaluate`).",
        "",
    ]
    return "\n".join(lines)


def _table(heads: tuple[str, str], rows: Sequence[tuple[str, str]]) -> list[str]:
    return [f"| {a} | {b} |" for a, b in (heads, ("---", "---"), *rows)]
