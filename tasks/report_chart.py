"""One chart, as inline SVG: the score of the i-th best image, per method (001, figure 2).

Targets are solid, decoys dashed, in one colour per method; colours are CSS variables, so that the
page's light and dark schemes apply. A pure function of numbers: no fonts, scripts or files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

WIDTH, HEIGHT = 720, 400
LEFT, RIGHT, TOP, BOTTOM = 46, 14, 14, 46
MAX_POINTS = 400


def ranked_curves(
    curves: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    *,
    threshold: float,
    description: str,
) -> str:
    """SVG of `curves`: title -> (target scores, decoy scores), in any order; NaN-free.

    The y axis goes from 0 (or the lowest score, if that is below) to 1.
    """
    values = [value for pair in curves.values() for scores in pair for value in scores]
    n_images = max((len(scores) for pair in curves.values() for scores in pair), default=0)
    low = min(0.0, min(values, default=0.0))
    frame = _Frame(n_images, low)
    parts = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(description)}">',
        *_axes(frame),
        _threshold_line(frame, threshold),
    ]
    for k, (targets, decoys) in enumerate(curves.values()):
        for scores, kind in ((decoys, "decoys"), (targets, "targets")):
            if len(scores):
                points = _polyline(frame, sorted(scores, reverse=True))
                parts.append(f'<polyline class="curve {kind} m{k}" points="{points}"/>')
    return "\n".join([*parts, "</svg>"])


class _Frame:
    """Maps (rank, score) to the plane of the drawing."""

    def __init__(self, n_images: int, low: float) -> None:
        self.n_images = n_images
        self.low = low

    def x(self, rank: float) -> float:
        share = (rank - 1) / max(1, self.n_images - 1)
        return LEFT + share * (WIDTH - LEFT - RIGHT)

    def y(self, score: float) -> float:
        share = (1 - score) / (1 - self.low)
        return TOP + share * (HEIGHT - TOP - BOTTOM)


def _axes(frame: _Frame) -> list[str]:
    parts = []
    for tenth in range(0, 11, 2):
        y = frame.y(tenth / 10)
        label = "0" if tenth == 0 else "1" if tenth == 10 else f"0.{tenth}"
        parts.append(
            f'<line class="rule" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        )
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{label}</text>')
    base = HEIGHT - BOTTOM
    for rank in _ticks(frame.n_images):
        x = frame.x(rank)
        parts.append(f'<line class="tick" x1="{x:.1f}" x2="{x:.1f}" y1="{base}" y2="{base + 5}"/>')
        parts.append(f'<text x="{x:.1f}" y="{base + 19}" text-anchor="middle">{rank}</text>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(
        f'<text class="axis" x="{middle:.0f}" y="{HEIGHT - 6}" text-anchor="middle">'
        "images, from the best scored to the worst</text>"
    )
    return parts


def _ticks(n_images: int) -> list[int]:
    """1, about five round ranks, and the last one unless it would touch its neighbour."""
    if n_images <= 1:
        return [1] if n_images else []
    rough = max(1, n_images // 5)
    power = 10 ** (len(str(rough)) - 1)
    step = min((s * power for s in (1, 2, 5, 10)), key=lambda s: abs(s - rough))
    inner = [rank for rank in range(step, n_images, step) if rank > 1]
    return [1, *[rank for rank in inner if n_images - rank > step / 2], n_images]


def _threshold_line(frame: _Frame, threshold: float) -> str:
    y = frame.y(threshold)
    return (
        f'<line class="threshold" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        f'<text class="axis" x="{WIDTH - RIGHT}" y="{y - 6:.1f}" text-anchor="end">'
        f"good: above {threshold:g}</text>"
    )


def _polyline(frame: _Frame, ranked: Sequence[float]) -> str:
    """At most MAX_POINTS points of the ranked scores, the first and the last among them."""
    last = len(ranked) - 1
    n_points = min(len(ranked), MAX_POINTS)
    picked = sorted({round(k * last / max(1, n_points - 1)) for k in range(n_points)})
    points = [f"{frame.x(i + 1):.1f},{frame.y(ranked[i]):.1f}" for i in picked]
    if last == 0:
        points.append(f"{frame.x(1) + 6:.1f},{frame.y(ranked[0]):.1f}")  # a dot needs a length
    return " ".join(points)
