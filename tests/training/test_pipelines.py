"""A stage of a pipeline is refused: its schedules make gradients that no hook sees."""

import warnings

import pytest

from training.attached import attach, not_refused
from training.needs import torch
from training.pair import DDP, net
from training.pool import on_ranks

pytest.importorskip("torch.distributed.pipelining")
from torch.distributed import pipelining

SCHEDULES = ("ScheduleGPipe", "Schedule1F1B", "ScheduleInterleavedZeroBubble")


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("wrap", [False, True])
@on_ranks(2)
def test_a_stage_is_refused_in_its_first_forward_pass(rank, schedule, wrap, mode):
    """Two replicas of a pipeline with one stage."""
    own = [torch.distributed.new_group([each]) for each in range(2)][rank.index]
    module = net()
    called = DDP(module) if wrap else module
    sgd = torch.optim.SGD(module.parameters(), lr=0.1)
    handle = attach(called, sgd, mode)
    stage = pipelining.PipelineStage(called, 0, 1, torch.device("cpu"), group=own)
    make = getattr(pipelining, schedule)
    stages = [stage] if schedule == "ScheduleInterleavedZeroBubble" else stage
    steps = make(stages, n_microbatches=2, loss_fn=lambda output, target: (output - target).square().sum())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = not_refused(lambda: steps.step(torch.ones(4, 6), target=torch.ones(4, 2)), "pipeline", "detach()")
    handle.detach()
    return found
