"""The core alone runs where only torch, numpy, scipy, scikit-image and networkx are installed."""

from __future__ import annotations

import ast
import json
import pkgutil
import subprocess
import sys
from pathlib import Path

import recon_core

FORBIDDEN = ("prefect", "dask", "distributed", "zarr", "typer", "rich", "pydantic")
MODULES = sorted(m.name for m in pkgutil.walk_packages(recon_core.__path__, prefix="recon_core."))
ROOT = Path(recon_core.__file__).parent.parent

IMPORT_ALL = """
import importlib, json, sys
for name in json.loads(sys.argv[1]):
    importlib.import_module(name)
print(json.dumps(sorted({name.partition(".")[0] for name in sys.modules})))
"""


def test_no_module_of_the_core_brings_orchestration_or_storage_along() -> None:
    assert {"recon_core.attacks.kkt.run", "recon_core.metrics", "recon_core.types"} <= set(MODULES)
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", IMPORT_ALL, json.dumps(MODULES)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stderr
    loaded = set(json.loads(run.stdout))
    assert "torch" in loaded
    assert not loaded & set(FORBIDDEN)


def test_the_core_neither_prints_nor_opens_files_nor_seeds_globally() -> None:
    """Numbers that come with the package are code; `pkgutil.get_data` reads nothing else."""
    forbidden = {"print", "open", "write_text", "read_text", "write_bytes", "read_bytes"}
    forbidden |= {"torch.manual_seed", "np.random.seed", "random.seed"}
    for path in Path(recon_core.__file__).parent.rglob("*.py"):
        calls = {
            ast.unparse(node.func)
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Call)
        }
        names = calls | {call.rpartition(".")[2] for call in calls}
        assert not names & forbidden, f"{path.name} calls {sorted(names & forbidden)}"
