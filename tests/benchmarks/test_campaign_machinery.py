"""The no-op campaign at tiny sizes: is it planned, stored and measured as its lines say?"""

from __future__ import annotations

import pytest
import torch

from benchmarks.campaign.machinery import (
    NoOp,
    in_fresh_process,
    made_up_images,
    no_op_campaign,
)
from recon_core.types import N_AUGMENT, STATS
from tasks.campaign.part import columns_of
from tasks.campaign.plan import Plan

N_IMAGES = 40


def test_a_run_that_does_nothing_gives_the_same_few_valid_rows_each_time() -> None:
    plan = Plan(no_op_campaign(40, images_per_run=10), made_up_images(N_IMAGES, 8))
    specs = plan.part(0, []).specs
    nothing = torch.empty(0)
    one, two = (
        columns_of(NoOp().run_batch(specs, nothing, device=torch.device("cpu"))) for _ in range(2)
    )
    assert len(one["targets/image_id"]) == 2 * len(specs)
    assert len(one["pairs/target_row"]) == len(specs)
    assert one["targets/augment"].shape[1] == N_AUGMENT
    assert all(f"runs/{name}" in one for name in STATS)
    assert all((one[name] == two[name]).all() for name in one)


@pytest.mark.slow
def test_a_campaign_in_a_process_of_its_own_says_what_it_took() -> None:
    facts = in_fresh_process(40, 1, n_images=N_IMAGES)
    assert facts["n_runs"] == 40
    assert facts["n_parts"] == 20
    assert 0 < facts["first_half_s"] < facts["seconds"]
    assert 0 < facts["before_gib"] <= facts["halfway_gib"] <= facts["peak_gib"] < 2
    assert len(facts["content_hash"]) == 64
