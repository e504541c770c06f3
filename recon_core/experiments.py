"""The union of experiments: every attack family, behind one contract.

An experiment is a frozen dataclass of settings, tagged by `family`, with one method

    run_batch(specs, images, *, device, progress, victims) -> list[RunResult]

that does R independent runs as a leading batch dimension, check_sweep(attacks_per_victim), which
refuses several runs on one victim where that makes no sense (`victims` keeps those), and n_labels,
of how many labels a run has equally many images (None: of none). Adding a family is one file in
`attacks` and one member here; what follows a run (storage, restoration, evaluation) is written
once.
"""

from __future__ import annotations

from typing import Annotated

from recon_core.attacks.autoencoder import memory as autoencoder_memory
from recon_core.attacks.autoencoder.run import AutoencoderRecovery
from recon_core.attacks.instahide import memory as instahide_memory
from recon_core.attacks.instahide.run import InstaHideRecovery
from recon_core.attacks.inversion import memory as inversion_memory
from recon_core.attacks.inversion.run import Inversion
from recon_core.attacks.kkt import memory as kkt_memory
from recon_core.attacks.kkt.run import KKT
from recon_core.tagged import Tagged

__all__ = [
    "FAMILIES",
    "KKT",
    "AutoencoderRecovery",
    "Experiment",
    "InstaHideRecovery",
    "Inversion",
    "bytes_per_run",
]

Experiment = Annotated[KKT | AutoencoderRecovery | Inversion | InstaHideRecovery, Tagged("family")]
"""Any experiment."""

FAMILIES: dict[
    str, type[KKT] | type[AutoencoderRecovery] | type[Inversion] | type[InstaHideRecovery]
] = {
    "kkt": KKT,
    "autoencoder": AutoencoderRecovery,
    "inversion": Inversion,
    "instahide": InstaHideRecovery,
}


def bytes_per_run(experiment: Experiment, n_images: int, shape: tuple[int, int, int]) -> int:
    """Bytes of device memory that each run of a stack takes at most; `shape` is (c, h, w)."""
    if isinstance(experiment, AutoencoderRecovery):
        return autoencoder_memory.bytes_per_run(experiment, n_images, shape)
    if isinstance(experiment, Inversion):
        return inversion_memory.bytes_per_run(experiment, n_images, shape)
    if isinstance(experiment, InstaHideRecovery):
        return instahide_memory.bytes_per_run(experiment, n_images, shape)
    return kkt_memory.bytes_per_run(experiment, n_images, shape)
