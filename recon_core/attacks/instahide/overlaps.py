"""Counts of private images that two encodings share: step 1 of the InstaHide paper, after step 2.

With the public images c of an encoding known, s = +-y - c, of which the posterior mean is

    t = y tanh(y c / tau^2) - c,    E[t_e t_f] = v_e v_f rho / tau^2 with v = E[t^2],

to first order in the correlation rho = (common images) / 2 of s_e and s_f. Without public images,
or if they are not known, squares are compared: corr(y_e^2, y_f^2) = rho^2.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int8
from torch import Tensor

from recon_core.attacks.instahide.mixing import Mixing

SAME_AT = 0.9
"""Share of pixels that one pair of private images must explain in two encodings to be in both."""


def posterior_mean(
    y: Float[Tensor, "m d"], c: Float[Tensor, "m d"], mixing: Mixing
) -> Float[Tensor, "m d"]:
    """t: what is to be expected of the private part s ~ N(0, tau^2), given y = |s + c|."""
    return y * torch.tanh(y * c / mixing.private_variance) - c


def overlaps(
    y: Float[Tensor, "m d"],
    mixing: Mixing,
    public_part: Float[Tensor, "m d"] | None = None,
) -> Float[Tensor, "m m"]:
    """0, on average, where two encodings have no private image in common, 1 where they have one.

    `public_part`: the weighted sum of each encoding's public images. With it two common images
    give 2; without, or if there are none, squares are compared and they give 4, and public images
    that two have in common count like parts of private ones. The diagonal means nothing.
    """
    d = y.shape[1]
    if public_part is None or mixing.k_pub == 0:
        squares = y.square() / mixing.variance - 1
        return squares @ squares.T * (mixing.variance**2 / (2 * d * mixing.wa**4))
    t = posterior_mean(y, public_part, mixing)
    t = t * (mixing.private_variance / mixing.wa / t.square().mean(1))[:, None]
    product: Tensor = t @ t.T
    return product / d


def common_images(
    y: Float[Tensor, "m d"],
    mixing: Mixing,
    public_part: Float[Tensor, "m d"] | None = None,
    scores: Float[Tensor, "m m"] | None = None,
) -> Int8[Tensor, "m m"]:
    """0, 1 or 2 common private images, 2 only where both can be the same two; diagonal 2.

    `scores`: what `overlaps` gave, if that is there already.
    """
    scores = overlaps(y, mixing, public_part) if scores is None else scores
    squared = public_part is None or mixing.k_pub == 0
    found = (scores > 0.5).to(torch.int8) + (scores > (2.5 if squared else 1.5)).to(torch.int8)
    if public_part is not None or mixing.k_pub == 0:
        c = torch.zeros_like(y) if public_part is None else public_part
        e, f = (found.triu(1) == 2).nonzero(as_tuple=True)
        for some in torch.arange(len(e), device=y.device).split(1024):
            i, j = e[some], f[some]
            wrong = ~same_private_part(y[i], c[i], y[j], c[j], mixing)
            found[i[wrong], j[wrong]] = found[j[wrong], i[wrong]] = 1
    return found.fill_diagonal_(2)


def same_private_part(
    y_e: Float[Tensor, "n d"],
    c_e: Float[Tensor, "n d"],
    y_f: Float[Tensor, "n d"],
    c_f: Float[Tensor, "n d"],
    mixing: Mixing,
) -> Bool[Tensor, " n"]:
    """True where one s explains y_e = |s + c_e| and y_f = |s + c_f| at nearly all pixels."""
    within = 6 * mixing.noise + 1e-4 * mixing.variance**0.5
    from_e = torch.stack([y_e - c_e, -y_e - c_e])
    from_f = torch.stack([y_f - c_f, -y_f - c_f])
    apart = (from_e[:, None] - from_f[None]).abs().amin((0, 1))
    same: Tensor = (apart < within).float().mean(1) > SAME_AT
    return same
