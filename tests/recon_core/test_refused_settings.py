"""Settings out of range are refused where they are made, by name and value, with what is right."""

from __future__ import annotations

import math
from typing import Any

import pytest

from recon_core.attacks.autoencoder.many_starts import NoiseAware
from recon_core.attacks.autoencoder.run import AutoencoderRecovery
from recon_core.attacks.instahide.carlini import Carlini
from recon_core.attacks.instahide.descent import Descent
from recon_core.attacks.instahide.groups import Components, Growth
from recon_core.attacks.instahide.mixing import InstaHide, Mixing
from recon_core.attacks.instahide.run import InstaHideRecovery
from recon_core.attacks.inversion.feature_matching import GradientInversion
from recon_core.attacks.inversion.run import Inversion
from recon_core.attacks.inversion.strong_inversion import StrongInversion
from recon_core.attacks.kkt.objective import KKTAttack, Search
from recon_core.attacks.kkt.run import KKT
from recon_core.attacks.plug_and_play import Iteration, KnownMask, UnknownMask
from recon_core.attacks.span.attack import SpanAttack
from recon_core.balance import Curation
from recon_core.optimisers import Optimiser
from recon_core.restore.bf_dncnn import BFDnCNN
from recon_core.restore.edm import EDM
from recon_core.restore.fit import Training as Fitting
from recon_core.restore.generic import NonLocalMeans, TotalVariation, Wavelet
from recon_core.restore.inpaint import DDNM
from recon_core.restore.regression import RegressionUNet
from recon_core.sampling import Phase
from recon_core.victims.autoencoder import FullyConnected, UNet
from recon_core.victims.autoencoder_training import AutoencoderTraining
from recon_core.victims.losses import Loss
from recon_core.victims.network import Network, Released
from recon_core.victims.separability import MixCon, UniCon
from recon_core.victims.split_training import SplitTraining
from recon_core.victims.training import Training

INF, NAN = math.inf, math.nan
REFUSED: list[tuple[type[Any], dict[str, Any], str]] = [
    (AutoencoderRecovery, {"level": 0.123}, r"level=0.123 is not one of training.levels=\("),
    (
        AutoencoderRecovery,
        {"masks": ("half", "holes")},
        "masks='half,holes' must be different ones",
    ),
    (AutoencoderRecovery, {"masks": ("half", "half")}, "masks='half,half'"),
    (AutoencoderRecovery, {"masks": ()}, "at least one"),
    (AutoencoderRecovery, {"sigma": -0.1}, "sigma=-0.1 is not a standard deviation"),
    (AutoencoderRecovery, {"sigma": 0.1, "attack": KnownMask()}, "set attack.noisy to true"),
    (AutoencoderRecovery, {"augment_p": 1.1}, "augment_p=1.1 is not a probability"),
    (AutoencoderTraining, {"epochs": 0}, "epochs=0"),
    (AutoencoderTraining, {"check_every": 0}, "check_every=0"),
    (AutoencoderTraining, {"batch_size": 0}, "batch_size=0"),
    (AutoencoderTraining, {"lr": INF}, "lr=inf"),
    (AutoencoderTraining, {"lr": 1e-3, "lr_end": 1e-2}, "lr_end=0.01 above 0 and at most lr"),
    (AutoencoderTraining, {"lr_end": 0.0}, "lr_end=0.0 above 0"),
    (AutoencoderTraining, {"hold": 1.5}, "hold=1.5"),
    (AutoencoderTraining, {"levels": ()}, r"levels=\(\)"),
    (AutoencoderTraining, {"levels": (1e-4, 1e-3)}, "each below the one before"),
    (AutoencoderTraining, {"levels": (1e-4, NAN)}, "must be positive"),
    (BFDnCNN, {"depth": 1}, "depth=1 is too small"),
    (BFDnCNN, {"depth": 1001}, "depth=1001 is too large; use at most 1000"),
    (Carlini, {"n_arcs": 1}, "n_arcs=1"),
    (Carlini, {"slack": -1.0}, "slack=-1"),
    (Components, {"spare": -0.1}, "spare="),
    (Components, {"core": 1.0}, "core="),
    (Components, {"n_rounds": 0}, "n_rounds="),
    (Curation, {"n_subsets": 0}, "n_subsets=0"),
    (Curation, {"share": 0}, "share=0"),
    (Curation, {"noise_fraction": 1.0}, "noise_fraction=1.0"),
    (Curation, {"mixture_fraction": INF}, "mixture_fraction=inf"),
    (Curation, {"mixture_strength": 0.0}, "mixture_strength=0.0"),
    (Curation, {"min_iteration": -1}, "min_iteration=-1"),
    (Curation, {"seed": -1}, "seed=-1"),
    (DDNM, {"travel_length": 0}, "travel_length=0 must be at least 1"),
    (DDNM, {"travel_repeat": 0}, "travel_repeat=0 must be at least 1"),
    (DDNM, {"n_samples": 0}, "n_samples=0 must be at least 1"),
    (DDNM, {"n_steps": 1}, "n_steps=1 is too few"),
    (Descent, {"n_steps": 0}, "n_steps=0"),
    (Descent, {"lr": 0.0}, r"lr=0\.0"),
    (Descent, {"low": 1.0}, r"low=1\.0"),
    (Descent, {"spread": -1.0}, r"spread=-1\.0"),
    (Descent, {"n_smooth": -1}, "n_smooth=-1"),
    (Descent, {"total_variation": 1.0}, "n_smooth=0"),
    (BFDnCNN, {"strength": 1.1}, r"strength=1\.1 is outside \[0, 1\]"),
    (RegressionUNet, {"strength": 1.1}, r"strength=1\.1 is outside \[0, 1\]"),
    (EDM, {"strength": -0.1}, r"strength=-0\.1 is outside \[0, 1\]"),
    (EDM, {"n_steps": 1}, "n_steps=1 is too few"),
    (EDM, {"sigma_min": 0.0}, "sigma_min=0.0 must be above 0"),
    (Fitting, {"accumulate": 0}, "accumulate=0"),
    (Fitting, {"accumulate": 5, "batch_size": 4}, "accumulate=5 is more than batch_size=4"),
    (Fitting, {"n_steps": 0}, "n_steps=0"),
    (Fitting, {"lr": 0.0}, r"lr=0\.0"),
    (Fitting, {"ema_ramp": -1.0}, "ema_ramp"),
    (FullyConnected, {"depth": 1}, "depth=1 must be at least 2"),
    (FullyConnected, {"width": 0}, "width=0 must be at least 1"),
    (GradientInversion, {"lr": 0.0}, "lr=0.0 must be positive"),
    (GradientInversion, {"zeta": -1.0}, "zeta=-1.0 must be at least 0"),
    (GradientInversion, {"weight_decay": NAN}, "weight_decay=nan"),
    (GradientInversion, {"n_steps": 0}, "n_steps=0 must be positive"),
    (GradientInversion, {"tolerance": -1e-9}, "tolerance"),
    (GradientInversion, {"value_range": (1.0, 0.0)}, "is empty"),
    (GradientInversion, {"value_range": (0.0, INF)}, "two finite numbers"),
    (GradientInversion, {"value_range": None}, "start='grey'"),
    (Growth, {"n_seeds": -1}, "n_seeds="),
    (Growth, {"n_rounds": 0}, "n_rounds="),
    (Growth, {"share": 0.0}, "share="),
    (InstaHide, {"n_epochs": 0}, "n_epochs=0"),
    (InstaHide, {"k_pub": 4, "largest": 0.1}, "largest=0.1 must be above 1/6"),
    (InstaHideRecovery, {"n_public": 0, "scheme": InstaHide(k_pub=0)}, "n_public=0"),
    (InstaHideRecovery, {"n_public": 3, "scheme": InstaHide(k_pub=4)}, "scheme.k_pub=4"),
    (InstaHideRecovery, {"scheme": Mixing.as_a_whole(2)}, "n_encodings=0: a theory scheme needs"),
    (InstaHideRecovery, {"n_encodings": 7}, "n_encodings=7"),
    (InstaHideRecovery, {"augment_p": 2.0}, "augment_p=2"),
    (Inversion, {"augment_p": 1.1}, "augment_p=1.1 is not a probability"),
    (Inversion, {"n_classes": 1}, "n_classes=1; a classifier needs at least 2"),
    (Inversion, {"held_out": -1}, "held_out=-1 must be 0, to invert the training images, or"),
    (
        Inversion,
        {"attack": GradientInversion(value_range=(-1.0, 1.0))},
        r"attack.value_range=\(-1.0, 1.0\), but images of a run are in \[0, 1\]; leave it",
    ),
    (Iteration, {"n_iterations": 0}, "n_iterations=0"),
    (KKT, {"augment_p": 1.5}, r"augment_p=1\.5"),
    (KKT, {"n_attacks": 0}, "n_attacks=0 must be at least 1"),
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
    (KKTAttack, {"save_at": (0, 5)}, "must start at iteration 1"),
    (KKTAttack, {"alpha": INF}, "alpha=inf"),
    (KKTAttack, {"sigma": NAN}, "sigma=nan"),
    (KKTAttack, {"lam_min": NAN}, "lam_min=nan"),
    (KKTAttack, {"lam_lr": 0.0}, r"lam_lr=0\.0 must be positive"),
    (KKTAttack, {"stop_above": -1.0}, r"stop_above=-1\.0"),
    (KKTAttack, {"ncc_stop_above": NAN}, "ncc_stop_above=nan"),
    (KKTAttack, {"stop_after": 0}, "stop_after=0"),
    (KnownMask, {"tolerance": NAN}, "tolerance=nan"),
    (Loss, {"power": NAN}, "power="),
    (Loss, {"delta": 0.0}, "delta="),
    (MixCon, {"beta": -1e-4}, "beta=.* must be 0, or its balance"),
    (MixCon, {"beta": 1e-17}, "beta=.* must be 0, or its balance"),
    (MixCon, {"beta": INF}, "beta=.* must be 0, or its balance"),
    (MixCon, {"eps": 0.0}, r"eps=.* is outside \(0, 1\)"),
    (MixCon, {"eps": NAN}, r"eps=.* is outside \(0, 1\)"),
    (MixCon, {"lam": -1.0}, "lam=.* must be at least 0"),
    (Mixing, {"k_pub": -1}, "k_pub=-1"),
    (Mixing, {"wa": 0.0}, "wa=0.0"),
    (Mixing, {"noise": -0.1}, "noise=-0.1"),
    (Network, {"widths": ()}, r"widths=\(\)"),
    (Network, {"widths": (5, 0)}, r"widths=\(5, 0\)"),
    (Network, {"init_std_first": 0.0}, "init_std_first=0.0"),
    (Network, {"leak": 1.0}, "leak=1.0"),
    (NoiseAware, {"fills": (), "gammas": ()}, "both empty"),
    (NoiseAware, {"fills": (INF,)}, "fills="),
    (NoiseAware, {"descent_steps": -1}, "descent_steps=-1"),
    (NoiseAware, {"gammas": (0.0,)}, "gamma=0.0"),
    (NonLocalMeans, {"sigma": 0.0}, "sigma=0.0"),
    (NonLocalMeans, {"patch_size": 0}, "patch_size=0"),
    (Optimiser, {"lr": 0.0}, "lr=0.0 must be positive"),
    (Optimiser, {"lr": NAN}, "lr=nan must be positive"),
    (Optimiser, {"rule": "gd", "momentum": 1.0}, "momentum=1.0 is outside"),
    (Optimiser, {"momentum": 0.9}, "momentum=0.9 has no meaning for adadelta"),
    (Optimiser, {"rule": "adam", "momentum": 0.9}, "momentum=0.9 has no meaning for adam"),
    (Optimiser, {"rho": 1.0}, "rho=1.0 is outside"),
    (Optimiser, {"eps": 0.0}, "eps=0.0 must be positive"),
    (Optimiser, {"betas": (0.9, 1.0)}, r"betas=\(0.9, 1.0\) are not"),
    (Phase, {"n_runs": 0}, "n_runs=0"),
    (Phase, {"pool_size": 1}, "pool_size=1 must be at least 2"),
    (Phase, {"enough": 0}, "enough=0 must be at least 1"),
    (Phase, {"prior_back": 0.0}, "prior_back=0.0 must be above 0 and below prior_runs=10.0"),
    (Phase, {"prior_back": 10.0}, "prior_back=10.0 must be above 0 and below"),
    (Phase, {"prior_runs": INF}, "prior_runs=inf"),
    (Phase, {"prior_back": NAN}, "prior_back=nan"),
    (Released, {"noise": -0.1}, "noise=-0.1 must be at least 0; 0.01 is 1 %"),
    (Released, {"noise": NAN}, "noise=nan must be at least 0"),
    (Search, {"lr": (0.0, 1.0)}, r"search\.lr=\(0.0, 1.0\) is not"),
    (Search, {"lam_lr": (2.0, 1.0)}, r"search\.lam_lr=\(2.0, 1.0\) is not"),
    (Search, {"sigma": (0.1, INF)}, r"search\.sigma=\(0.1, inf\) is not"),
    (Search, {"lam_min": (NAN, 1.0)}, r"search\.lam_min=\(nan, 1.0\) is not"),
    (Search, {"alpha": (2.0, 1.0)}, r"search\.alpha=\(2.0, 1.0\) is not"),
    (SpanAttack, {"n_images": 1}, "n_images=1"),
    (SpanAttack, {"surplus": 2.0}, r"surplus=2.0 is outside \[0, 1\]"),
    (SpanAttack, {"n_independent": 0}, "n_independent=0 must be at least 1"),
    (SpanAttack, {"n_network": 0}, "n_network=0 must be at least 1"),
    (SpanAttack, {"overcomplete": 0.5}, r"overcomplete=0.5 is outside \[1, 100\]"),
    (SplitTraining, {"epochs": 0}, "epochs=0 must be at least 1"),
    (SplitTraining, {"per_class": 0}, "per_class=0 must be at least 1"),
    (SplitTraining, {"lr": INF}, "lr=inf"),
    (SplitTraining, {"momentum": 1.0}, r"momentum=1.0 is outside \[0, 1\)"),
    (SplitTraining, {"weight_decay": -1e-4}, "weight_decay=-0.0001 must be at least 0"),
    (StrongInversion, {"starts": ()}, "starts is empty"),
    (StrongInversion, {"lr": INF}, "lr=inf"),
    (StrongInversion, {"value_range": None}, "start='grey'"),
    (TotalVariation, {"strength": 0.0}, "strength=0.0"),
    (TotalVariation, {"n_iterations": 0}, "n_iterations=0"),
    (Training, {"epochs": 0}, "epochs=0"),
    (Training, {"stop_every": 0}, "stop_every=0"),
    (Training, {"batch_size": 0}, "batch_size=0"),
    (Training, {"weight_decay": -1.0}, "weight_decay=-1.0"),
    (Training, {"stop_loss": 0.0}, "stop_loss=0.0"),
    (Training, {"diverged_above": NAN}, "diverged_above=nan"),
    (Training, {"span": True}, "span=True with optimiser.rule='adadelta'"),
    (UNet, {"channels": ()}, r"channels=\(\) must name"),
    (UNet, {"channels": (4, 0)}, r"channels=\(4, 0\)"),
    (UNet, {"convolutions": 0}, "convolutions=0 must be at least 1"),
    (UNet, {"leak": 1.0}, r"leak=.* outside \[0, 1\)"),
    (UNet, {"leak": NAN}, r"leak=.* outside \[0, 1\)"),
    (UniCon, {"lam": NAN}, "lam=.* must be at least 0"),
    (UnknownMask, {"gamma": 0.0}, "gamma=0.0"),
    (Wavelet, {"sigma": 25.0}, "sigma=25.0"),
]


@pytest.mark.parametrize(
    ("kind", "settings", "message"), REFUSED, ids=lambda v: getattr(v, "__name__", None)
)
def test_a_setting_out_of_range_is_refused(
    kind: type[Any], settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        kind(**settings)
