"""Settings out of range are refused where they are made, by name and value, with what is right."""

from __future__ import annotations

import math
from typing import Any

import pytest

from recon_core.attacks.autoencoder.many_starts import NoiseAware
from recon_core.attacks.autoencoder.run import AutoencoderRecovery
from recon_core.attacks.instahide.carlini import Descent
from recon_core.attacks.instahide.mixing import InstaHide, Mixing
from recon_core.attacks.instahide.run import InstaHideRecovery
from recon_core.attacks.inversion.feature_matching import GradientInversion
from recon_core.attacks.inversion.run import Inversion
from recon_core.attacks.inversion.strong_inversion import StrongInversion
from recon_core.attacks.kkt.objective import KKTAttack, Search
from recon_core.attacks.kkt.run import KKT
from recon_core.attacks.plug_and_play import KnownMask
from recon_core.optimisers import Optimiser
from recon_core.restore.edm import EDM
from recon_core.restore.fit import Training as Fitting
from recon_core.restore.inpaint import DDNM
from recon_core.sampling import Phase
from recon_core.victims.autoencoder import UNet
from recon_core.victims.autoencoder_training import AutoencoderTraining
from recon_core.victims.losses import Loss
from recon_core.victims.network import Network
from recon_core.victims.noisy_training import Noise
from recon_core.victims.separability import MixCon
from recon_core.victims.training import Training

INF, NAN = math.inf, math.nan
REFUSED: list[tuple[type[Any], dict[str, Any], str]] = [
    (Noise, {"noise_multiplier": 1.0}, "noise_multiplier=1.0 with clip=None"),
    (AutoencoderRecovery, {"level": 0.123}, r"level=0.123 is not one of training.levels=\("),
    (
        AutoencoderRecovery,
        {"masks": ("half", "holes")},
        "masks='half,holes' must be different ones",
    ),
    (AutoencoderRecovery, {"masks": ("half", "half")}, "masks='half,half'"),
    (AutoencoderRecovery, {"masks": ()}, "at least one"),
    (AutoencoderRecovery, {"sigma": 0.1, "attack": KnownMask()}, "set attack.noisy to true"),
    (AutoencoderTraining, {"lr": INF}, "lr=inf"),
    (AutoencoderTraining, {"lr": 1e-3, "lr_end": 1e-2}, "lr_end=0.01 above 0 and at most lr"),
    (AutoencoderTraining, {"lr_end": 0.0}, "lr_end=0.0 above 0"),
    (AutoencoderTraining, {"levels": ()}, r"levels=\(\)"),
    (AutoencoderTraining, {"levels": (1e-4, 1e-3)}, "each below the one before"),
    (AutoencoderTraining, {"levels": (1e-4, NAN)}, "must be positive"),
    (DDNM, {"n_steps": 1}, "n_steps=1"),
    (Descent, {"total_variation": 1.0}, "n_smooth=0"),
    (EDM, {"sigma_min": 0.0}, "sigma_min=0.0 must be above 0"),
    (Fitting, {"accumulate": 5, "batch_size": 4}, "accumulate=5 is more than batch_size=4"),
    (GradientInversion, {"value_range": (1.0, 0.0)}, "is empty"),
    (GradientInversion, {"value_range": (0.0, INF)}, "two finite numbers"),
    (GradientInversion, {"value_range": None}, "start='grey'"),
    (InstaHide, {"k_pub": 4, "largest": 0.1}, "largest=0.1 must be above 1/6"),
    (InstaHideRecovery, {"n_public": 0, "scheme": InstaHide(k_pub=0)}, "n_public=0"),
    (InstaHideRecovery, {"n_public": 3, "scheme": InstaHide(k_pub=4)}, "scheme.k_pub=4"),
    (InstaHideRecovery, {"scheme": Mixing.as_a_whole(2)}, "n_encodings=0: a theory scheme needs"),
    (InstaHideRecovery, {"n_encodings": 7}, "n_encodings=7"),
    (
        Inversion,
        {"attack": GradientInversion(value_range=(-1.0, 1.0))},
        r"attack.value_range=\(-1.0, 1.0\), but images of a run are in \[0, 1\]; leave it",
    ),
    (KKT, {"clipped": 1.0}, r"clipped=1\.0 is a share of a picture's values: from 0, below 1"),
    (KKT, {"n_classes": 3}, "n_classes=3 with training.loss.kind='bce'"),
    (KKT, {"n_classes": 1}, "n_classes=1 with"),
    (KKT, {"training": Training(loss=Loss(kind="ce"))}, "kind='ce' with attack.condition='binary'"),
    (
        KKT,
        {"attack": KKTAttack(condition="multiclass")},
        "'bce' with attack.condition='multiclass'",
    ),
    (KKTAttack, {"n_candidates": 7}, "n_candidates=7 must be even and at least 2"),
    (KKTAttack, {"n_candidates": 0}, "n_candidates=0 must be even and at least 2"),
    (
        KKTAttack,
        {"n_candidates": 1, "condition": "multiclass"},
        "n_candidates=1 must be at least 2$",
    ),
    (KKTAttack, {"save_at": ()}, r"save_at=\(\) must be increasing"),
    (KKTAttack, {"save_at": (5, 5)}, r"save_at=\(5, 5\) must be increasing"),
    (MixCon, {"beta": -1e-4}, "beta=.* must be 0, or its balance"),
    (MixCon, {"beta": 1e-17}, "beta=.* must be 0, or its balance"),
    (MixCon, {"beta": INF}, "beta=.* must be 0, or its balance"),
    (Network, {"widths": ()}, r"widths=\(\)"),
    (Network, {"widths": (5, 0)}, r"widths=\(5, 0\)"),
    (NoiseAware, {"fills": (), "gammas": ()}, "both empty"),
    (NoiseAware, {"fills": (INF,)}, "fills="),
    (Optimiser, {"rule": "gd", "momentum": 1.0}, "momentum=1.0 is outside"),
    (Optimiser, {"momentum": 0.9}, "momentum=0.9 has no meaning for adadelta"),
    (Optimiser, {"rule": "adam", "momentum": 0.9}, "momentum=0.9 has no meaning for adam"),
    (Optimiser, {"betas": (0.9, 1.0)}, r"betas=\(0.9, 1.0\) are not"),
    (Phase, {"prior_back": 0.0}, "prior_back=0.0 must be above 0 and below prior_runs=10.0"),
    (Phase, {"prior_back": 10.0}, "prior_back=10.0 must be above 0 and below"),
    (Phase, {"prior_runs": INF}, "prior_runs=inf"),
    (Phase, {"prior_back": NAN}, "prior_back=nan"),
    (Search, {"lr": (0.0, 1.0)}, r"search\.lr=\(0.0, 1.0\) is not"),
    (Search, {"lam_lr": (2.0, 1.0)}, r"search\.lam_lr=\(2.0, 1.0\) is not"),
    (Search, {"sigma": (0.1, INF)}, r"search\.sigma=\(0.1, inf\) is not"),
    (Search, {"lam_min": (NAN, 1.0)}, r"search\.lam_min=\(nan, 1.0\) is not"),
    (Search, {"alpha": (2.0, 1.0)}, r"search\.alpha=\(2.0, 1.0\) is not"),
    (StrongInversion, {"starts": ()}, "starts is empty"),
    (StrongInversion, {"value_range": None}, "start='grey'"),
    (Training, {"span": True}, "span=True with optimiser.rule='adadelta'"),
    (UNet, {"channels": ()}, r"channels=\(\) must name"),
    (UNet, {"channels": (4, 0)}, r"channels=\(4, 0\)"),
]


@pytest.mark.parametrize(
    ("kind", "settings", "message"), REFUSED, ids=lambda v: getattr(v, "__name__", None)
)
def test_a_setting_out_of_range_is_refused(
    kind: type[Any], settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        kind(**settings)
