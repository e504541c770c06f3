"""Card of a trained restorer: the facts of `model.json`, and a page for people."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from tasks.campaign.plan import code_version

PAGE = "MODEL_CARD.md"
TITLES = {"edm": "EDM diffusion restorer", "bf_dncnn": "BF-DnCNN", "unet": "U-Net regression"}


def versions() -> dict[str, str]:
    """Environment that a training's numbers may depend on besides its settings."""
    return {
        "palimpsest": code_version(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
    }


def device_name(device: str) -> str:
    """The GPU's or the processor's own name."""
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_name(device)
    return platform.processor() or platform.machine()


def model_page(card: Mapping[str, Any]) -> str:
    """The card as Markdown."""
    training, dataset = card["training"], card["dataset"]
    kind = TITLES.get(card["restorer"]["kind"], card["restorer"]["kind"])
    is_averaged = training["ema_halflife_images"] > 0 and training["ema_ramp"] > 0
    averaged = "averaged (EMA)" if is_averaged else "not averaged"
    lines = [
        f"# {kind}",
        "",
        "Turns the reconstruction of a training image, got from the weights of a network that was "
        "trained on it, into an estimate of that image. What it adds may be invented.",
        "",
        f"- **Weights:** {averaged}, after step {card['step']:,} of {training['n_steps']:,}; "
        f"{card['n_parameters']:,} parameters",
        f"- **Examples:** {card['n_images']:,}, from {dataset['n_pairs_used']:,} of the "
        f"{dataset['n_pairs']:,} pairs of the dataset `{dataset['content_hash']}`",
        f"- **Time:** {card['seconds']:,.0f} seconds on {card['ranks']} x {card['device']} "
        f"({card['device_name']}), {card['threads']} CPU threads",
        "- **Versions:** " + ", ".join(f"{name} {v}" for name, v in card["versions"].items()),
        f"- **Fingerprint:** `{card['fingerprint']}`",
        "",
        "## Validation",
        "",
        *_validation(card),
    ]
    for title, name in (
        ("Restorer", "restorer"),
        ("Training", "training"),
        ("Curation", "curation"),
    ):
        lines += ["", f"## {title}", "", "| setting | value |", "|---|---|"]
        lines += [f"| `{setting}` | {value} |" for setting, value in card[name].items()]
    lines += [
        "",
        "## Limits",
        "",
        "Made to measure and close leaks of training data, for models that one owns or may test. "
        "Restorers also raise false positives: read good counts beside those of decoys "
        "(`palimpsest evaluate`).",
        "",
    ]
    return "\n".join(lines)


def _validation(card: Mapping[str, Any]) -> list[str]:
    found = card["validation"]
    if found is None:
        return ["None: no pairs were held out (`validation.every` is 0)."]
    parts = ", ".join(str(part) for part in found["held_out_parts"])
    plain = "unaugmented" if found["unaugmented"] else "partly augmented"
    elsewhere = "" if found["strength_curve"] else "; other runs may hold the same images"
    shown = [
        f"Mean SSIM (Gaussian 11 x 11) of {found['n_pairs']} {plain} pairs of part {parts}, which "
        f"the training did not see{elsewhere}. Before restoration "
        f"{found['ssim_inputs']:.4f}; the best was {found['best']['ssim']:.4f} after step "
        f"{found['best']['step']:,}. The weights kept are the {found['keep']}.",
        "",
        "| step | SSIM |",
        "|---|---|",
    ]
    shown += [f"| {step:,} | {ssim:.4f} |" for step, ssim in found["ssim_curve"]]
    if curve := found["strength_curve"]:
        fitted = card["restorer"]["strength"]
        shown += [
            "",
            f"The strength is {fitted:g}: restorations go this share of the way from the picture "
            "to the network's answer. The images of these pairs were in no example of the "
            "training. " + ("" if fitted else "No strength helps them beyond chance."),
            "",
            "| strength | SSIM |",
            "|---|---|",
        ]
        shown += [f"| {strength:g} | {ssim:.4f} |" for strength, ssim in curve]
    return shown
