"""The folder of wheels that a GPU machine without network lacks, for its Python, and its size.

    python -m benchmarks.gpu.wheels [--out .wheels] [--python 3.12] [--limit-mib 64]

Run it where Palimpsest is installed. Versions are those of constraints.txt; what each package needs
is read from the packages installed here. Left out are `THERE`, which the machine has, and `UNUSED`,
which only Prefect's server imports. Exit code 1 if the tree and the wheels exceed the limit.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

TREE = Path(__file__).parents[2]
NEEDED = (
    *("cryptography", "dask", "distributed", "google-crc32c", "jaxtyping", "jinja2", "numcodecs"),
    *("piq", "prefect", "pydantic", "rich", "starlette", "typer", "zarr"),
)
"""What the chain imports and the machine may lack or have in another version; the needs of these
follow. PyWavelets is not among them: the chain scores no classical denoisers."""
THERE = frozenset(
    {
        *("torch", "torchvision", "numpy", "scipy", "scikit-image", "matplotlib", "pillow"),
        *("networkx", "psutil", "pyyaml", "safetensors", "threadpoolctl", "pygments", "msgpack"),
    }
)
"""What every machine of this kind has beside torch."""
UNUSED = frozenset(
    {
        *("aiosqlite", "alembic", "apprise", "asyncpg", "burner-redis", "cyclopts", "dateparser"),
        *("docker", "fastapi", "pydocket", "redis", "ruamel-yaml", "ruamel-yaml-clib"),
        *("sqlalchemy", "uvicorn"),
    }
)
"""What Prefect names and only its server, its notifications or its schedules import."""


def main(argv: list[str] | None = None) -> int:
    """Build the folder, check it, print its size; the exit code."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--out", type=Path, default=Path(".wheels"))
    parser.add_argument("--python", default="3.12", help="the machine's Python, as 3.12")
    parser.add_argument("--limit-mib", type=float, default=64.0, help="of the tree with the wheels")
    options = parser.parse_args(argv)
    shutil.rmtree(options.out, ignore_errors=True)
    pins = closure(NEEDED, constraints(), python=options.python)
    download(pins, options.out, python=options.python)
    wheels = sorted(options.out.glob("*.whl"))
    n_bytes = sum(wheel.stat().st_size for wheel in wheels)
    listed = subprocess.run(  # what git tracks, or does not ignore
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=TREE, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    files = (TREE / name for name in listed.split("\0") if name)
    tree = sum(file.stat().st_size for file in files if file.is_file())
    mib = (n_bytes + tree) / 2**20
    print(
        f"{len(wheels)} wheels in {options.out}: {n_bytes / 2**20:.1f} MiB; with the tree's "
        f"{tree / 2**20:.1f} MiB {mib:.1f} of {options.limit_mib:g} MiB"
    )
    return int(mib > options.limit_mib)


def closure(names: Iterable[str], versions: Mapping[str, str], *, python: str) -> dict[str, str]:
    """The packages with all that they need on that Python, less `THERE` and `UNUSED`, and the
    version of each. Raises ValueError for one without a version."""
    pins: dict[str, str] = {}
    taken: dict[str, set[str]] = {}
    todo = [Requirement(name) for name in names]
    while todo:
        wanted = todo.pop()
        name = canonicalize_name(wanted.name)
        if name in THERE | UNUSED or (name in pins and wanted.extras <= taken[name]):
            continue
        if name not in versions:
            raise ValueError(f"{name} has no version in constraints.txt; add the installed one")
        pins[name] = versions[name]
        taken.setdefault(name, set()).update(wanted.extras)
        needs = importlib.metadata.requires(name) or []
        todo += applicable(needs, taken[name], python=python)
    return dict(sorted(pins.items()))


def applicable(lines: Iterable[str], extras: Iterable[str], *, python: str) -> list[Requirement]:
    """The requirements that hold on Linux with that Python, for some extras of the package."""
    place = {
        "python_version": python,
        "python_full_version": f"{python}.0",
        "sys_platform": "linux",
        "platform_system": "Linux",
        "platform_machine": "x86_64",
        "os_name": "posix",
        "implementation_name": "cpython",
        "platform_python_implementation": "CPython",
    }
    needs = map(Requirement, lines)
    return [
        need
        for need in needs
        if need.marker is None
        or any(need.marker.evaluate({**place, "extra": extra}) for extra in ("", *extras))
    ]


def constraints() -> dict[str, str]:
    """The version of every package in constraints.txt."""
    lines = (TREE / "constraints.txt").read_text().splitlines()
    pins = (line.split("==") for line in lines if "==" in line and not line.startswith("#"))
    return {canonicalize_name(name): version.strip() for name, version in pins}


def download(pins: Mapping[str, str], folder: Path, *, python: str) -> None:
    """The wheels of exactly these versions for that Python, of CPython on Linux; pip refuses a
    package that has none."""
    platforms = ["manylinux1", "manylinux2010", "manylinux2014"]
    platforms += [f"manylinux_2_{n}" for n in range(5, 40)]
    words = ["download", "--quiet", "--no-deps", "--dest", str(folder), "--only-binary=:all:"]
    words += ["--implementation", "cp", "--python-version", python]
    words += [word for name in platforms for word in ("--platform", f"{name}_x86_64")]
    words += [f"{name}=={version}" for name, version in pins.items()]
    subprocess.run([sys.executable, "-m", "pip", "--disable-pip-version-check", *words], check=True)


if __name__ == "__main__":
    sys.exit(main())
