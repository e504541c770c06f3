"""The attack families: a line each, behind one contract (`recon_core.attacks.family_run`).

Adding a family is a room in `attacks` and one line here, or a package of its own that publishes it
(`recon_core.attacks.family`). What follows a run (storage, restoration, evaluation, report, study)
is written once.
"""

from __future__ import annotations

from typing import Annotated

from recon_core.attacks.autoencoder import memory as autoencoder_memory
from recon_core.attacks.autoencoder.run import AutoencoderRecovery
from recon_core.attacks.family import Family, registered
from recon_core.attacks.family_run import FamilyRun
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

FAMILIES = registered(
    Family(KKT, kkt_memory.bytes_per_run),
    Family(AutoencoderRecovery, autoencoder_memory.bytes_per_run),
    Family(Inversion, inversion_memory.bytes_per_run),
    Family(InstaHideRecovery, instahide_memory.bytes_per_run),
)

Experiment = Annotated[
    FamilyRun, Tagged("family", {name: family.experiment for name, family in FAMILIES.items()})
]
"""Any experiment."""


def bytes_per_run(experiment: Experiment, n_images: int, shape: tuple[int, int, int]) -> int:
    """Bytes of device memory that each run of a stack takes at most; `shape` is (c, h, w)."""
    return FAMILIES[experiment.family].bytes_per_run(experiment, n_images, shape)
