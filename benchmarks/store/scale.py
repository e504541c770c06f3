"""Sixty million pairs without their pictures: what opening, balancing and hashing them costs.

The receipts of 2,400 parts of 62 or 63 runs, 300 images and 400 confident pairs each are written as
`storage.pairs.receipts` writes them, with made-up hashes; the arrays they describe (hundreds of GB)
are not there. Opening is timed in a fresh process that imports `storage` and nothing else; its peak
memory is the kernel's and includes the interpreter and numpy, which are stated beside it. Receipts
were written a moment before and are in the page cache. Set TMPDIR to choose the device.

What the arrays would take on disk is extrapolated from a small store with everything in it; how
fast they are written, read and verified is measured by `benchmarks.store.soak`.
"""

from __future__ import annotations

import json
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.record import Measurement, main, measured
from benchmarks.store.sample import QUICK, Sizes, sample_store
from recon_core.balance import Curation, curated_repeats, occurrences, summarise
from storage.pairs.dataset import Dataset, create_or_open
from storage.pairs.layout import COLUMNS, ENCODINGS, TABLES, receipt_name, schema_name, shape_of
from storage.pairs.receipts import RECEIPTS_FOLDER, Receipt, pack_images
from storage.pairs.shards import shard_names

_line = partial(measured, "store_scale", reference="the goal: less than")
N_IMAGES = 43_000
"""Images that runs are made of; 60 million pairs are about 1,400 of each."""
RUN_IMAGES, RUN_PAIRS = 300, 400
PICTURE = (3, 32, 32)
OPEN = """
import json, sys, time
from storage.pairs.dataset import Dataset

def peak_mib():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmHWM")) / 1024
facts = {"imports_mib": peak_mib()}
start = time.perf_counter()
dataset = Dataset(sys.argv[1])
facts["n_pairs"] = dataset.n_pairs
ids, pairs = dataset.image_counts()
facts["open_s"] = time.perf_counter() - start
facts["open_mib"] = peak_mib()
facts["n_images"], facts["n_confident"] = len(ids), int(pairs.sum())
start = time.perf_counter()
facts["content_hash"] = dataset.content_hash
facts["hash_s"] = time.perf_counter() - start
print(json.dumps(facts))
"""
"""Peak memory by VmHWM and not getrusage, which starts from the peak of the parent."""

Columns = dict[str, npt.NDArray[Any]]


@dataclass(frozen=True, kw_only=True)
class Campaign:
    """`n_parts` parts; images are drawn unevenly, and some come back far more often than others."""

    n_parts: int = 2400
    n_images: int = N_IMAGES

    @property
    def n_pairs(self) -> int:
        return sum(RUN_PAIRS * self.n_runs(part) for part in range(self.n_parts))

    def n_runs(self, part: int) -> int:
        return 62 + part % 2

    def columns(self, part: int) -> Columns:
        """The small columns of a part, the same each time: what multiplicities depend on."""
        chance = np.random.default_rng(0)
        drawn = chance.gamma(4.0, size=self.n_images).cumsum()
        returns = chance.gamma(0.8, size=self.n_images)
        rng = np.random.default_rng((1, part))
        n_targets = self.n_runs(part) * RUN_IMAGES
        image_id = drawn.searchsorted(rng.random(n_targets) * drawn[-1]).astype(np.int32)
        edges = returns[image_id].cumsum()
        n_pairs = self.n_runs(part) * RUN_PAIRS
        target_row = edges.searchsorted(rng.random(n_pairs) * edges[-1]).astype(np.int32)
        return {
            "targets/image_id": image_id,
            "targets/run_row": np.repeat(np.arange(self.n_runs(part), dtype=np.int32), RUN_IMAGES),
            "pairs/target_row": target_row,
            "pairs/iteration": np.full(n_pairs, 50_000, np.int32),
            "pairs/confident": np.ones(n_pairs, np.bool_),
        }


def made_up_receipt(campaign: Campaign, part: int) -> Receipt:
    """Receipts as `write_part` would have published them, but for the hashes and sizes."""
    columns = campaign.columns(part)
    n_runs = campaign.n_runs(part)
    n_rows = {"runs": n_runs, "targets": n_runs * RUN_IMAGES, "pairs": n_runs * RUN_PAIRS}
    names = ["zarr.json", *(f"{table}/zarr.json" for table in TABLES)]
    for name in COLUMNS:
        shape = shape_of(name, n_rows[name.partition("/")[0]], PICTURE)
        names += [f"{name}/zarr.json", *(f"{name}/{shard}" for shard in shard_names(shape))]
    return Receipt(
        schema=schema_name(),
        part=part,
        group=f"part-{part:06d}-{secrets.token_hex(4)}.zarr",
        encoding="float16",
        picture=PICTURE,
        run_first=part * 62,
        n_runs=n_runs,
        n_targets=n_rows["targets"],
        n_pairs=n_rows["pairs"],
        fingerprint=secrets.token_hex(32),
        plan_hash=secrets.token_hex(32),
        source_hash=secrets.token_hex(32),
        code_version="1.0.0",
        torch_version="2.13.0",
        device="NVIDIA A100-SXM4-80GB",
        threads=8,
        seconds=4321.0,
        array_hashes={name: secrets.token_hex(32) for name in COLUMNS},
        files={name: (secrets.randbelow(1000), secrets.randbits(32)) for name in sorted(names)},
        outcomes={"ok": n_runs, "unfitted": 0, "nonfinite": 0, "stopped": 0},
        images=pack_images(columns),
    )


def write_receipts(root: Path, campaign: Campaign) -> int:
    """A store of receipts alone; returns how many bytes they have."""
    create_or_open(root, {"benchmark": "store_scale"})
    n_bytes = 0
    for part in range(campaign.n_parts):
        content = made_up_receipt(campaign, part).to_json()
        (root / RECEIPTS_FOLDER / receipt_name(part)).write_bytes(content)
        n_bytes += len(content)
    return n_bytes


def opening(root: Path, campaign: Campaign, n_bytes: int, repeats: int) -> Iterator[Measurement]:
    """Seconds and peak memory of `Dataset(root)`, its sums, `image_counts` and `content_hash`."""
    facts = []
    for _ in range(repeats):
        command = [sys.executable, "-c", OPEN, str(root)]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        facts.append(json.loads(done.stdout))
    for fact in facts:
        if not fact["n_pairs"] == fact["n_confident"] == campaign.n_pairs:
            raise ValueError(f"opening found {fact['n_pairs']} pairs, wrote {campaign.n_pairs}")
    store = (
        f"{campaign.n_parts} parts, {campaign.n_pairs} pairs, {facts[0]['n_images']} images, "
        f"receipts of {n_bytes / 2**20:.0f} MiB"
    )
    found = {
        key: statistics.median(fact[key] for fact in facts)
        for key in ("open_s", "open_mib", "imports_mib", "hash_s")
    }
    peak = "peak memory of the process that opened it, interpreter and imports included"
    for case, value, unit, goal in (
        (f"opening: Dataset(root), n_pairs and image_counts() of {store}", "open_s", "s", 3.0),
        (peak, "open_mib", "GiB", 1.5),
        ("of which interpreter and imports", "imports_mib", "GiB", None),
        ("content_hash of the opened store", "hash_s", "s", None),
    ):
        number = found[value] / (1024 if unit == "GiB" else 1)
        yield _line(case, number, unit, repeats=repeats, reference_value=goal)


def multiplicities(root: Path, campaign: Campaign) -> Iterator[Measurement]:
    """Seconds that `curated_repeats` takes for all pairs, one thread, part by part."""
    z = occurrences(*Dataset(root).image_counts())
    curation = Curation()
    balance = summarise(z, curation)
    seconds, n_examples, n_drawn = 0.0, 0, 0
    for part in range(campaign.n_parts):
        columns = campaign.columns(part)
        pairs = {
            "image_id": columns["targets/image_id"][columns["pairs/target_row"]],
            "iteration": columns["pairs/iteration"],
            "confident": columns["pairs/confident"],
        }
        start = time.perf_counter()
        times = curated_repeats(pairs, z, curation=curation, part=part, epoch=0)
        seconds += time.perf_counter() - start
        n_examples += int(times.sum())
        n_drawn += int(np.count_nonzero(times))
    expected = balance.expected_examples
    if abs(n_examples - expected) > 5 * expected**0.5:
        raise ValueError(f"{n_examples} examples were drawn, {expected:.0f} expected")
    seen = z[z > 0]
    yield _line(
        f"multiplicities of all {campaign.n_pairs} pairs: Binomial(140, min(1, 11/z)), z "
        f"{seen.mean():.0f} on average, {np.quantile(seen, 0.05):.0f} to "
        f"{np.quantile(seen, 0.95):.0f} for 90 % of the images, {seen.max()} at most",
        seconds,
        "s",
        repeats=1,
        reference_value=20.0,
    )
    yield _line("examples that an epoch has, without noise", n_examples, "examples", repeats=1)
    yield _line("pairs that an epoch uses", 100 * n_drawn / campaign.n_pairs, "%", repeats=1)


def extrapolated(folder: Path, sizes: Sizes, n_pairs: int) -> Iterator[Measurement]:
    """Bytes of `n_pairs` pairs on disk, from `sizes` of them."""
    for encoding in ENCODINGS:
        dataset = sample_store(folder / encoding, sizes, encoding=encoding)
        n_bytes = sum(n for receipt in dataset.receipts for n, _checksum in receipt.files.values())
        yield _line(
            f"extrapolated: {n_pairs} pairs on disk in {encoding}, their images included",
            n_bytes * n_pairs / dataset.n_pairs / 1e9,
            "GB",
            repeats=1,
        )


def measure(quick: bool) -> Iterator[Measurement]:
    """The cost of the metadata of 2,400 parts."""
    campaign = Campaign(n_parts=20, n_images=900) if quick else Campaign()
    with tempfile.TemporaryDirectory(prefix="palimpsest-scale-") as folder:
        root = Path(folder)
        n_bytes = write_receipts(root, campaign)
        yield from opening(root, campaign, n_bytes, repeats=2 if quick else 5)
        yield from multiplicities(root, campaign)
    with tempfile.TemporaryDirectory(prefix="palimpsest-scale-") as folder:
        yield from extrapolated(Path(folder), QUICK if quick else Sizes(), campaign.n_pairs)


if __name__ == "__main__":
    main(measure)
