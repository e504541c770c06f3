"""Memory that a run of the family `inversion` takes, to tell how many a GPU holds at once.

An upper estimate from counting live tensors, library workspaces left out, the largest of four. With
P parameters, d numbers of an image and u of its activations, poolings' inputs counted, m at the
cut: training 7 P and, for each image of a batch, 3 d, 3.5 u and, with a defence, 12 m; evaluation 4
times the widest activations of the images it takes at once; the attack 12 d, 3.5 u up to the cut
and 6 m for each start of each image at once, 6 m for each image; the scores 14 d for each image.
Beside each of these P and 3 d for each image of the run.
"""

from __future__ import annotations

import math
from itertools import chain

from recon_core.attacks.family_run import DTYPES
from recon_core.attacks.inversion.run import INVERTED_AT_ONCE, Inversion
from recon_core.attacks.inversion.strong_inversion import StrongInversion
from recon_core.victims.autoencoder import Shape
from recon_core.victims.split import KERNEL, LeNet5, SplitModel
from recon_core.victims.split_evaluation import IMAGES_AT_ONCE

PER_PARAMETER, PER_PIXEL, PER_ACTIVATION, PER_WIDEST = 7.0, 3.0, 3.5, 4.0
PER_DEFENDED_FEATURE, PER_FEATURE, PER_ATTACKED_PIXEL, PER_SCORED = 12.0, 6.0, 12.0, 14.0


def bytes_per_run(experiment: Inversion, n_images: int, shape: Shape) -> int:
    """Bytes of device memory that each run of a stack takes at most; `shape` is (c, h, w)."""
    model = experiment.victim.on(shape, experiment.n_classes)
    before, after = activations(experiment, model)
    d, m = math.prod(shape), model.n_features
    n_batch = min(n_images, experiment.training.per_class * experiment.n_classes)
    n_attacked = experiment.held_out * experiment.n_classes or n_images
    attack = experiment.attack
    n_starts = len(attack.starts) if isinstance(attack, StrongInversion) else 1
    rows = n_starts * min(n_attacked, INVERTED_AT_ONCE)
    kept = sum(map(math.prod, model.tensor_shapes.values()))
    defended = 0.0 if experiment.defence is None else PER_DEFENDED_FEATURE * m
    training = PER_PARAMETER * kept + n_batch * (
        PER_ACTIVATION * sum(before + after) + defended + PER_PIXEL * d
    )
    evaluation = PER_WIDEST * max(before + after) * min(n_images, IMAGES_AT_ONCE)
    inversion = rows * (PER_ATTACKED_PIXEL * d + PER_ACTIVATION * sum(before) + PER_FEATURE * m)
    most = max(
        training,
        evaluation,
        inversion + PER_FEATURE * n_attacked * m,
        PER_SCORED * n_images * d,
    )
    return int(DTYPES[experiment.dtype].itemsize * (most + kept + PER_PIXEL * n_images * d))


def activations(experiment: Inversion, model: SplitModel) -> tuple[list[int], list[int]]:
    """Numbers that each layer up to the cut gives for one image, and those that each one after it
    does; of a convolution before and after its pooling."""
    victim = experiment.victim
    if not isinstance(victim, LeNet5):
        widths = [*victim.widths, experiment.n_classes]
        return widths[: victim.cut], widths[victim.cut :]
    layers = []
    sides = [side + (4 if model.shape[1:] == (28, 28) else 0) for side in model.shape[1:]]
    for channels in (6, 16):
        sides = [side - KERNEL + 1 for side in sides]
        pooled = [side // 2 for side in sides]
        layers.append([channels * math.prod(sides), channels * math.prod(pooled)])
        sides = pooled
    layers += [[120], [84], [experiment.n_classes]]
    return list(chain(*layers[: victim.cut])), list(chain(*layers[victim.cut :]))
