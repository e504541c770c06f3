"""Memory that a run of the family `kkt` takes, to tell how many a GPU holds at once.

An upper estimate from counting live tensors, library workspaces left out. With P parameters, x
numbers of all candidates and u activations of all images and candidates (behind a convolution its
patches, too): 6 P + 18 x + 6.5 u, and 5.5 s x for s saved iterations; a defence 5 float64 for each
feature of its layer; a separation of k directions with T features 7 k T + 40 k^2 and 5 first layers
in float64.
"""

from __future__ import annotations

import math

from recon_core.attacks.family_run import DTYPES
from recon_core.attacks.kkt.attacks import ROWS_AT_ONCE, features_of
from recon_core.attacks.kkt.run import KKT
from recon_core.attacks.kkt.settings import kkt_of, most_candidates, most_directions, span_of
from recon_core.victims.feature_defence import hidden_layer
from recon_core.victims.network import Architecture, Shape

PER_PARAMETER, PER_CANDIDATE, PER_ACTIVATION, PER_SAVED = 6.0, 18.0, 6.5, 5.5
PER_FEATURE, PER_PAIR_OF_DIRECTIONS = 7.0, 40.0
BYTES_PER_DEFENDED = 5 * 8
BYTES_PER_FIRST_WEIGHT = 5 * 8


def bytes_per_run(experiment: KKT, n_images: int, shape: Shape) -> int:
    """Bytes of device memory that each run of a stack takes at most; `shape` is (c, h, w)."""
    architecture = experiment.victim.on(shape, experiment.n_outputs)
    n_candidates = most_candidates(experiment)
    at_once = min(experiment.n_attacks, max(1, ROWS_AT_ONCE // n_candidates))
    candidates = n_candidates * math.prod(shape)
    (fan_in, fan_out), *dense = architecture.layer_sizes
    units = fan_out * architecture.n_positions + sum(width for _, width in dense)
    if experiment.victim.conv is not None:
        units += fan_in * architecture.n_positions  # the patches that its kernels see
    working = (
        PER_PARAMETER * architecture.n_parameters
        + PER_CANDIDATE * candidates * (kkt_of(experiment.attack) is not None)
        + PER_ACTIVATION * units * (n_candidates + n_images)
        + _separation(experiment, shape)
    )
    saved = PER_SAVED * len(experiment.saved_iterations) * candidates * experiment.n_attacks
    extra = BYTES_PER_DEFENDED * n_images * _n_features(experiment, architecture)
    kkt = kkt_of(experiment.attack)
    if span_of(experiment.attack) is not None or (kkt and kkt.coordinates == "span"):
        extra += BYTES_PER_FIRST_WEIGHT * fan_in * fan_out
    return int(DTYPES[experiment.dtype].itemsize * (at_once * working + saved) + extra)


def _separation(experiment: KKT, shape: Shape) -> float:
    span = span_of(experiment.attack)
    if span is None:
        return 0.0
    k = most_directions(experiment, span)
    return PER_FEATURE * k * features_of(span, shape) + PER_PAIR_OF_DIRECTIONS * k**2


def _n_features(experiment: KKT, architecture: Architecture) -> int:
    if experiment.defence is None:
        return 0
    layer = hidden_layer(experiment.victim, experiment.defence_layer)
    return architecture.layer_sizes[layer + 1][0]
