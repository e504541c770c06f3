"""The union of experiments: every attack family, behind one contract.

An experiment is a frozen dataclass of settings, tagged by `family`, with one method

    run_batch(specs, images, *, device, progress, victims) -> list[RunResult]

that does R independent runs as a leading batch dimension, and check_sweep(attacks_per_victim),
which refuses several runs on one victim where that makes no sense (`victims` keeps those). Adding a
family is one file in `attacks` and one member here; what follows a run (storage, restoration,
evaluation) is written once.
"""

from __future__ import annotations

from recon_core.attacks.kkt import KKT
from recon_core.attacks.kkt_memory import bytes_per_run

__all__ = ["FAMILIES", "KKT", "Experiment", "bytes_per_run"]

Experiment = KKT
"""Any experiment; a union once there are several families."""

FAMILIES: dict[str, type[Experiment]] = {"kkt": KKT}
