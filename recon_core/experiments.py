"""The attack families: a line each, behind one contract (`recon_core.attacks.family_run`), or a
package of its own that publishes one (`recon_core.attacks.family`)."""

from __future__ import annotations

from typing import Annotated

from recon_core.attacks.autoencoder.run import AutoencoderRecovery, autoencoder_bytes
from recon_core.attacks.family_run import Family, FamilyRun, registered
from recon_core.attacks.instahide.run import InstaHideRecovery, instahide_bytes
from recon_core.attacks.inversion.run import Inversion, inversion_bytes
from recon_core.attacks.kkt.run import KKT, kkt_bytes
from recon_core.strict import Tagged

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
    Family(KKT, kkt_bytes),
    Family(AutoencoderRecovery, autoencoder_bytes),
    Family(Inversion, inversion_bytes),
    Family(InstaHideRecovery, instahide_bytes),
)

Experiment = Annotated[
    FamilyRun, Tagged("family", {name: family.experiment for name, family in FAMILIES.items()})
]


def bytes_per_run(experiment: Experiment, n_images: int, shape: tuple[int, int, int]) -> int:
    """Bytes of device memory that each run of a stack takes at most; `shape` is (c, h, w)."""
    return FAMILIES[experiment.family].bytes_per_run(experiment, n_images, shape)
