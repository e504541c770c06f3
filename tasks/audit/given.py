"""Plan of an audit of one network that is given as a file: no training, and releases of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from recon_core.attacks.span.inputs import InputOrder
from recon_core.attacks.span.rows import Source
from recon_core.attacks.span.search import SpanAttack
from recon_core.victims.losses import Loss
from storage.sources.load import ImageSet, Split
from tasks.attack_file.pictures import Named
from tasks.audit.plan import ALONE, AuditImages, AuditPlan
from tasks.audit.recipe import VictimRecipe
from tasks.audit.settings import AttackName, Audit, Cell
from tasks.audit.victims import Given, Pictures, VictimsJob, named
from tasks.families.weights.inputs import binary_signs, read_victim
from tasks.families.weights.preflight import read_known

SHADOWS = "it needs other networks of the same kind; audit a recipe, which trains them"
NO_LABELS = "what the network should answer is not known: the folders are not its classes"
NO_START = "the weights before training are not given: --initial"


class GivenPlan(AuditPlan):
    """Attacks on one network, whose training images are known, beside decoys."""

    def __init__(self, study: Audit, root: Path, *, device: str) -> None:
        assert study.weights is not None
        weights = study.weights
        self.victim = read_victim(
            Path(weights.file), arch=weights.arch, shape=weights.shape, leak=weights.leak,
            activation=weights.activation, pictures=study.data,
            initial=None if weights.initial is None else Path(weights.initial),
            gradients=[Path(path) for path in weights.gradients],
            order=InputOrder(weights.pixel_order or "chw", weights.channel_order or "rgb"),
        )  # fmt: skip
        known = read_known(
            self.victim, data=study.data, decoys=weights.decoys, mean=weights.mean,
            std=weights.std, attack=SpanAttack(), skip_corrupt=study.skip_corrupt,
            order_given=weights.pixel_order is not None or weights.channel_order is not None,
        )  # fmt: skip
        assert known.truth is not None
        assert known.decoys is not None
        assert known.mean.shown is not None
        self.truth, self.decoys = known.truth, known.decoys
        self.mean, self.mean_known = known.mean.shown, known.mean.finding.level == "ok"
        channels = self.victim.architecture.shape[0]
        self.std = torch.ones(channels, 1, 1) if known.std is None else known.std
        self.has_labels, self.labels = self._labels()
        self.gives_gradients = bool(weights.gradients)
        if self.gives_gradients or study.recipe.cut is not None:
            what = "gradients" if self.gives_gradients else "features"  # published, not weights

            def changed(text: str) -> str:
                return text.replace("weights", what).replace("Weights", what.capitalize())

            words = (replace(d, name=changed(d.name), about=changed(d.about))
                     for d in study.defences)  # fmt: skip
            study = replace(study, defences=tuple(words))
        if self.gives_gradients:
            study = replace(study, attacks=("gradient",))
        images = AuditImages(_image_set(self.truth, "train"), _image_set(self.decoys, "heldout"))
        n_outputs = self.victim.architecture.n_outputs
        loss = Loss(kind="ce" if n_outputs > 1 else "bce")
        recipe = replace(
            study.recipe,
            victim=self.victim.architecture.network,
            n_classes=max(2, n_outputs),
            training=replace(study.recipe.training, loss=loss),
            n_images=len(self.truth),
        )
        self.subject = "gradients" if self.gives_gradients else "weights"
        super().__init__(replace(study, recipe=recipe), images, root, device=device)
        self.task, self.sides = self.victim.layers.architecture, ("training images", "decoys")

    def why_not(self, cell: Cell, name: AttackName) -> str | None:
        if name == "likelihood_ratio":
            return SHADOWS
        if name == "loss" and not self.has_labels:
            return NO_LABELS
        if name == "span_known" and self.victim.start is None:
            return NO_START
        return super().why_not(cell, name)

    def check_state(self, recipe: VictimRecipe) -> None:
        if not recipe.gives_state:
            raise ValueError(ALONE)
        if not self.victim.states:
            why = f": {self.victim.unused_state}" if self.victim.unused_state else ""
            raise ValueError(f"the file holds no optimiser's state of use{why}")

    def _job(self, cell: Cell) -> VictimsJob:
        pool, others = (
            Pictures(images.images, np.array(labels, np.int64), np.arange(len(images)))
            for images, labels in zip(
                (self.images.pool, self.images.others), self.labels, strict=True
            )
        )
        everyone = Pictures(
            *(np.concatenate([getattr(some, name) for some in (pool, others)])
              for name in ("images", "labels", "rows"))
        )  # fmt: skip
        arrays = named("weights", self.victim.parameters.tensors()) | {"mean": self.mean[None]}
        if self.victim.start is not None:
            arrays |= named("start", self.victim.start.parameters.tensors())
        source: Source = "gradients" if self.gives_gradients else "state"
        if (taken := self.victim.sources.get(source)) is not None:
            parts = (taken.rows, taken.start)
            arrays |= named("rows", [part[None] for part in parts if part is not None])
        is_asked = self.has_labels and not self.gives_gradients
        return VictimsJob(
            root=self.root,
            device=self.device,
            recipe=cell.recipe,
            pool=everyone,
            members=(np.arange(len(everyone)) < len(pool))[None],
            tests=others if is_asked else others.some(np.zeros(0, np.int64)),
            public=None,
            noise_multiplier=0.0,
            seed=self.study.seed,
            given=Given(
                arrays={name: tensor.numpy() for name, tensor in arrays.items()},
                std=self.std.numpy(),
                mean_known=self.mean_known,
                gives_gradients=self.gives_gradients,
            ),
        )

    def _labels(self) -> tuple[bool, tuple[list[int], list[int]]]:
        """Whether the network's labels of its images and the decoys are known, and these labels;
        zeros if the folders are not its classes."""
        nothing = ([0] * len(self.truth), [0] * len(self.decoys))
        same = self.truth.class_names == self.decoys.class_names
        if not same or self.truth.labels is None or self.decoys.labels is None:
            return False, nothing
        if (n := self.victim.architecture.n_outputs) > 1:
            known = len(self.truth.class_names) == n
            return known, (list(self.truth.labels), list(self.decoys.labels)) if known else nothing
        x = ((self.truth.images - self.mean) / self.std).flatten(1)[None]
        output = self.victim.architecture.forward(self.victim.parameters, x).output[0, :, 0]
        signs, _said = binary_signs(self.truth, output)
        if signs is None:
            return False, nothing
        positive = dict(zip(self.truth.labels, (signs > 0).tolist(), strict=True))
        own = [int(positive[label]) for label in self.truth.labels]
        return True, (own, [int(positive[label]) for label in self.decoys.labels])


def _image_set(some: Named, split: Split) -> ImageSet:
    pixels = (some.images * 255).round().to(torch.uint8).numpy()
    return ImageSet(
        name=some.source,
        split=split,
        images=pixels,
        labels=np.array(some.labels or [0] * len(some), np.int64),
        class_names=some.class_names or ("one class",),
        reading=some.reading,
    )
