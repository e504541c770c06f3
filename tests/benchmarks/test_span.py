"""The span attack's benchmarks: each runs small, and sides that differ are not timed."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.record import Measurement
from benchmarks.restore import in_span
from benchmarks.span import features as span_features
from benchmarks.span import speed as span
from recon_core.restore.generic import GENERIC_RESTORERS
from storage.sources.load import load_images


@pytest.mark.slow
def test_the_whole_of_it_runs_small() -> None:
    lines = list(span.measure(load_images("photos", split="heldout"), quick=True, seed=0))
    by_case = {(line.case, line.unit): line.value for line in lines}
    assert (
        by_case["20 planted Laplacian sources, 2,000 samples, float64", "smallest correlation"]
        > 0.9
    )
    good = {case: value for (case, unit), value in by_case.items() if unit == "good of 10"}
    assert len(good) == 10
    assert min(good.values()) >= 8
    (made,) = {case for case, unit in by_case if unit == "pairs" and case.endswith("10 images")}
    assert by_case[made, "pairs"] >= 6  # confident, so clearly nearer than the mean image alone
    assert by_case["true span of 10 images", "mean SSIM"] > 0.5


def test_features_come_back_and_those_of_other_images_do_not() -> None:
    images = load_images("photos", split="heldout")
    lines = list(span_features.measure(images, quick=True, seed=0))
    found = {(line.case, line.unit): line.value for line in lines}
    known = "20 maps of (16, 14, 14), known start"
    assert {case for case, _unit in found} == {known, known.replace("known", "unknown")}
    assert found[known, "features of 20"] >= 5
    assert found[known, "other images' features of 20"] <= 2
    assert (
        found[known, "median correlation"]
        > 0.2 + found[known, "median correlation with other images' features"]
    )


def restored(seed: int, **good: int) -> in_span.Restored:
    """A victim of 10 images: of each method as many good ones as said, the others at .1."""
    good |= {f"{generic}, projected": good["before"] for generic in GENERIC_RESTORERS}
    methods = {
        name: in_span.Scored(
            images=[0.8] * n + [0.1] * (10 - n), decoys=[0.5] + [0.1] * 9, seconds=2.0 + seed
        )
        for name, n in good.items()
    }
    return in_span.Restored(n=10, seed=seed, methods=methods)


def test_victims_restored_inside_the_span_are_summed_up() -> None:
    some = [
        restored(0, before=4, after=6, oracle=10, control=5),
        restored(1, before=2, after=6, oracle=10),
    ]
    found = {(line.case, line.unit): line.value for line in in_span.lines(some)}
    assert found["10 images, before", "good of 10, mean of 2 victims"] == 3
    assert found["10 images, after", "good of 10, mean of 2 victims"] == 6
    assert found["10 images, control", "good of 10, mean of 1 victims"] == 5
    assert found["10 images, after", "good decoys of 10, mean of 2 victims"] == 1
    assert found["10 images, after", "of 10, mean of 2 victims, at 1 % false positives"] == 6
    assert found["10 images, before", "s"] == 2.5
    low, high = span.LOW, span.HIGH
    for unit, of_both, ends in (
        (in_span.RISES, 2, (1.5, 3)),
        (in_span.BEYOND, 10 / 4, (5 / 3, 5)),
        (f"{in_span.SSIM_OVER} before", (12 * 0.7 + 2) / (6 * 0.7 + 2), (5.2 / 3.8, 5.2 / 2.4)),
    ):
        values = [found["10 images", u] for u in (unit, f"{unit}, {low}", f"{unit}, {high}")]
        assert values == pytest.approx([of_both, *ends], rel=1e-3)
    closed = found["10 images", "share of the headroom in SSIM closed"]
    assert closed == pytest.approx((6 - 3) / (10 - 3), rel=1e-3)
    worse = in_span.lines([restored(0, before=6, after=4, oracle=10)])
    assert [line.value for line in worse if "headroom" in line.unit] == [0]
    assert found["10 images", f"{in_span.SHARE_WORSE} 0.02"] == 0
    assert found["10 images", "share of images better by more than 0.02"] == 0.3


def _of_more_images(found: Iterable[Measurement]) -> Iterator[Measurement]:
    for line in found:
        yield replace(line, case=line.case.replace("10 images", "12 images"))


def test_claims_on_restoration_inside_the_span() -> None:
    better = [restored(seed, before=4, after=6, oracle=10) for seed in range(3)]
    same = [restored(seed, before=4, after=4, oracle=10) for seed in range(3)]
    mixed = [restored(0, before=4, after=3, oracle=10), *better[1:]]
    outcomes = {}
    for name, some in (("better", better), ("same", same), ("mixed", mixed)):
        claims = list(in_span.in_span_claims(list(in_span.lines(some)), name=name))
        outcomes[name] = [claim.outcome for claim in claims]
        assert all(claim.where.startswith("ours, another setting") for claim in claims)
        assert all(claim.seconds for claim in claims)
    assert outcomes["better"] == ["holds"] * 4
    assert outcomes["same"] == ["does not hold"] * 3 + ["holds"]
    assert outcomes["mixed"] == ["undecided"] * 3 + ["does not hold"]
    some = [restored(seed, before=9 + seed, after=9, oracle=10) for seed in range(2)]
    full = list(in_span.lines(some))  # with nothing to restore
    beside = in_span.in_span_claims([*full, *_of_more_images(in_span.lines(better))], name="x")
    assert [claim.outcome for claim in beside] == ["holds"] * 4
    assert claims[0].ours == (
        "mixed: 4 -> 5 good of 10, mean of 3 victims; good after over before 1.25 [0.75, 1.5]"
    )
    with pytest.raises(ValueError, match="has no restoration inside the span; run python -m"):
        list(in_span.in_span_claims([], name="nothing"))


@pytest.mark.slow
def test_restoration_inside_the_span_is_not_computed_twice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["--store", str(tmp_path), "--n", "10", "40", "--victims", "2", "--quick"]
    in_span.main([*words, "--sheet", str(tmp_path / "sheet.png")])
    assert (tmp_path / "sheet.png").read_bytes().startswith(b"\x89PNG")
    first = capsys.readouterr().out
    assert len(list(tmp_path.glob("*-?.json"))) == 4
    monkeypatch.setattr(in_span, "restored", lambda *_a, **_k: pytest.fail("computed again"))
    in_span.main(words)
    strip = re.compile(r'"load_average": [0-9.]+')
    assert strip.sub("", capsys.readouterr().out) == strip.sub("", first)
    few = json.loads((tmp_path / "10-0.json").read_text())["methods"]
    assert few["after"]["images"] == few["before"]["images"]  # left to sparse derivatives
    part = tmp_path / "40-1.json"
    part.write_text(part.read_text().replace('"after"', '"later"'))
    with pytest.raises(SystemExit, match=r"40-1.json.*methods lack after"):
        in_span.main(words)
