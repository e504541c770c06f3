"""The README of a Hugging Face dataset folder: what it is, how it was made, how to load it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from storage.export.parquet import Written
from storage.export.rows import NUMBERS, Selection
from storage.pairs.layout import mixed

_SIZES = [(10**3, "n<1K"), (10**4, "1K<n<10K"), (10**5, "10K<n<100K"), (10**6, "100K<n<1M"),
          (10**7, "1M<n<10M"), (10**8, "10M<n<100M"), (10**9, "100M<n<1B")]  # fmt: skip
_PICTURE_COLUMNS = {
    "original": "the image that the victim was trained on, augmentation included (PNG)",
    "picture": "its reconstruction, scaled and shifted by the run's mean image to fit [0, 1] (PNG)",
    "reconstruction": "the raw reconstruction in C order, divided by `scale`",
}


@dataclass(frozen=True, kw_only=True)
class CardFacts:
    """Facts of the card about a store and the selection that was exported from it; `attacks`: how
    many of its parts each kind made."""

    manifest: dict[str, Any]
    attacks: dict[str, int]
    content_hash: str
    n_runs: int
    n_store_pairs: int
    n_images: int
    shape: tuple[int, ...]
    n_file_bytes: int
    selection: Selection
    written: Written


def dataset_card(facts: CardFacts) -> str:
    return "\n".join([*_header(facts), *_body(facts), ""])


def size_category(n: int) -> str:
    return next((name for limit, name in _SIZES if n < limit), "n>1B")


def _header(facts: CardFacts) -> list[str]:
    written = facts.written
    features = []
    for name, dtype in written.dtypes.items():
        features.append(f"  - name: {name}")
        if name in written.lengths:
            features += [f"    sequence: {dtype}", f"    length: {written.lengths[name]}"]
        else:
            features.append(f"    dtype: {dtype}")
    return [
        "---",
        "license: other  # yours to decide: what the licence of the original images allows",
        "pretty_name: Reconstructions of training images",
        "task_categories:",
        "- image-to-image",
        "tags:",
        "- training-data-reconstruction",
        "- privacy",
        "- palimpsest",
        "size_categories:",
        f"- {size_category(written.n_pairs)}",
        "configs:",
        "- config_name: default",
        "  data_files:",
        "  - split: train",
        "    path: data/train-*",
        "dataset_info:",
        "  features:",
        *features,
        "  splits:",
        "  - name: train",
        f"    num_bytes: {written.n_table_bytes}",
        f"    num_examples: {written.n_pairs}",
        f"  download_size: {facts.n_file_bytes}",
        f"  dataset_size: {written.n_table_bytes}",
        "---",
    ]


def _body(facts: CardFacts) -> list[str]:
    n_pairs, shape = facts.written.n_pairs, ", ".join(map(str, facts.shape))
    columns = _PICTURE_COLUMNS | {name: meaning for name, (_type, meaning) in NUMBERS.items()}
    return [
        "",
        "# Reconstructions of training images",
        "",
        f"{n_pairs:,} pairs of an image that a small network was trained on and what an attack on "
        f"the network's weights reconstructed of it; {facts.n_images:,} different images. They are "
        "examples to learn from how such reconstructions are degraded, and how to undo it.",
        "",
        "| | |",
        "|---|---|",
        f"| pairs here | {n_pairs:,} |",
        f"| different images here | {facts.n_images:,} |",
        f"| selected | {_selected(facts.selection)} |",
        f"| pairs in the store | {facts.n_store_pairs:,}, of {facts.n_runs:,} runs |",
        *_attacks(facts),
        f"| image shape | {shape} |",
        f"| hash of the store | `{facts.content_hash}` |",
        "",
        "## Loading",
        "",
        "```python",
        "import numpy as np",
        "from datasets import load_dataset",
        "",
        'pairs = load_dataset("path/to/this/folder", split="train")  # or its name on the Hub',
        'original, picture = pairs[0]["original"], pairs[0]["picture"]  # PIL images',
        f'raw = np.array(pairs[0]["reconstruction"], "f4").reshape({shape}) * pairs[0]["scale"]',
        "```",
        "",
        "`raw` is in the victim's input space: image in [0, 1] minus the mean image of its run, at "
        "an arbitrary scale.",
        "",
        "An image occurs in many pairs, and in some far more often than in others: balance by "
        "`image_id` before training, and split by `image_id`, never by row.",
        "",
        "## Columns",
        "",
        "| column | type | meaning |",
        "|---|---|---|",
        *(
            f"| `{name}` | {_type(facts.written, name)} | {meaning} |"
            for name, meaning in columns.items()
        ),
        "",
        "## How it was made",
        "",
        "Each run trained a network, the victim, on a few of the images; an attack then looked for "
        "images from which the weights could have come, starting from noise. Each of its "
        "candidates was paired with the most similar training image of the run. Confident pairs "
        "are those whose candidate, at some saved iteration of the attack, had an SSIM above 0.4 "
        "with that image and at least 0.05 more than with any other. The settings, in full:",
        "",
        "<details><summary>manifest of the store</summary>",
        "",
        "```json",
        json.dumps(facts.manifest, indent=1, ensure_ascii=False),
        "```",
        "",
        "</details>",
        "",
        "The same settings give the same store, with the hash above. Written by "
        "`palimpsest dataset export`.",
        "",
        "## Responsible use",
        "",
        "The originals are real images of the source data set, and the reconstructions show what "
        "they show: the licence and the privacy of the source apply to both. Do not publish pairs "
        "of pictures of people who have not agreed to it. Use them to measure and to close leaks "
        "of models that you own or are allowed to test.",
    ]


def _attacks(facts: CardFacts) -> list[str]:
    if not facts.attacks:
        return []
    several = mixed(facts.manifest)
    made = ", ".join(f"{name} ({n:,} parts)" for name, n in facts.attacks.items())
    if len(several) > 1:
        made += f"; `part` modulo {len(several)} counts the experiments of `mixture` below"
    return [f"| attacks | {made} |"]


def _selected(selection: Selection) -> str:
    said = "confident pairs" if selection.confident_only else "all pairs"
    if selection.min_iteration:
        said += f" saved at iteration {selection.min_iteration:,} or later"
    if selection.limit is not None:
        said += f", the first {selection.limit:,}"
    return said


def _type(written: Written, name: str) -> str:
    dtype = written.dtypes[name]
    return f"{dtype} x {written.lengths[name]}" if name in written.lengths else dtype
