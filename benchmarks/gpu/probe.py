"""Looks at the machine: its packages and device, and the pace of a part of runs on it.

    python -m benchmarks.gpu.probe environment DEVICE
    python -m benchmarks.gpu.probe pace DEVICE paper|small DATA

Prints one JSON object. A package that cannot be imported is an answer, not an error.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import subprocess
import sys
import time
from dataclasses import asdict, replace
from typing import Any

MODULES = (
    *("flows.chain", "torch", "torchvision", "numpy", "scipy", "skimage", "matplotlib", "PIL"),
    *("cryptography", "dask", "distributed", "google_crc32c", "jaxtyping", "jinja2", "networkx"),
    *("msgpack", "numcodecs", "piq", "prefect", "psutil", "pydantic", "pygments", "rich"),
    *("safetensors", "threadpoolctl", "typer", "yaml", "zarr"),
)
FEW, MANY = 100, 600
"""Epochs and iterations of the short runs; the difference leaves out what comes once."""


def environment(device: str) -> dict[str, Any]:
    """Packages found and missing; hardware; versions of torch, CUDA and the driver."""
    missing = {}
    for name in MODULES:
        try:
            if name in ("torchvision", "piq"):  # as the chain does
                from recon_core import torchvision_compat

                getattr(torchvision_compat, f"import_{name}")()
            else:
                importlib.import_module(name)
        except Exception as error:  # noqa: BLE001 - any failure of a package is what is asked for
            missing[name] = f"{type(error).__name__}: {error}"
    owners = importlib.metadata.packages_distributions()
    found = {name: owner for name in MODULES for owner in owners.get(name, [])[:1]}
    facts: dict[str, Any] = {
        "python": sys.version.split()[0],
        "packages": {name: importlib.metadata.version(owner) for name, owner in found.items()},
        "missing": missing,
    }
    if "torch" in missing:
        return facts
    import torch

    facts["cuda"] = torch.version.cuda
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, check=True)
        facts["driver"] = answer.stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        facts["driver"] = None  # without nvidia-smi
    facts["device found"] = device != "cuda" or torch.cuda.is_available()
    if "pydantic" not in missing:
        from benchmarks.record import hardware

        facts["hardware"] = hardware()
    return facts


def pace(device: str, size_name: str, data: str) -> dict[str, float]:
    """Seconds of an epoch and of an iteration of a part, from three short parts."""
    import torch

    from benchmarks.gpu.settings import PAPER, SMALL, Pace, Schedule, recipe_of
    from recon_core.attacks.kkt.objective import KKTAttack
    from recon_core.experiments import KKT
    from recon_core.victims.training import Training
    from tasks.campaign.plan import Plan

    size = {"paper": PAPER, "small": SMALL}[size_name]
    recipe = recipe_of(size, Schedule(n_parts=1, share=1.0), data)
    images = recipe.images("train")
    specs = Plan(recipe.campaign("train"), images).part(0).specs
    batch = torch.stack([torch.from_numpy(images.images[list(s.image_ids)]) for s in specs])
    experiment = recipe.experiment
    assert isinstance(experiment, KKT)
    attack = experiment.attack
    assert isinstance(attack, KKTAttack)

    def seconds(epochs: int, iterations: int) -> float:
        brief = replace(
            experiment,
            training=Training(epochs=epochs),
            attack=replace(attack, save_at=(iterations,)),
        )
        started = time.perf_counter()
        brief.run_batch(specs, batch, device=torch.device(device))  # its results are on the CPU
        return time.perf_counter() - started

    seconds(FEW, FEW)
    start = seconds(FEW, FEW)
    epoch_s = max(0.0, seconds(MANY, FEW) - start) / (MANY - FEW)
    iteration_s = max(0.0, seconds(FEW, MANY) - start) / (MANY - FEW)
    return asdict(Pace(epoch_s=max(epoch_s, 1e-6), iteration_s=max(iteration_s, 1e-6)))


if __name__ == "__main__":
    what, *words = sys.argv[1:]
    print(json.dumps(environment(*words) if what == "environment" else pace(*words)))
