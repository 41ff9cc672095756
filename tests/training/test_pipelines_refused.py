"""What gradcast refuses of pipelines, and a schedule that fails."""

import contextlib

import pytest

import gradcast
from gradcast.training.compat.pipeline_stages import Makes
from gradcast.training.step.backward_passes import NO_TASK
from gradcast.training.step.pipeline_gradients import StagePasses
from training import compare
from training.attached import attach, error_of, not_refused
from training.needs import torch
from training.pair import DDP, net
from training.pipelines import Part, init_device_mesh, pipelining, replicate
from training.pool import on_ranks

nn = torch.nn


@pytest.mark.parametrize("wrap", [False, True])
@on_ranks(2)
def test_the_module_of_a_stage_is_refused_before_a_schedule_runs(rank, wrap, mode):
    """Whichever comes first, on all ranks: those with later stages would wait for the first one."""
    module = net()
    called = DDP(module) if wrap else module
    sgd = torch.optim.SGD(module.parameters(), lr=0.1)
    handle = attach(called, sgd, mode)
    found = not_refused(lambda: stage_of(rank, called), "detach()", "attach(stage")
    found += not_refused(lambda: stage_of(rank, nn.Sequential(module)), "detach()", "attach(stage")
    handle.detach()
    stage = stage_of(rank, called)
    found += not_refused(lambda: attach(called, sgd, mode), "in a stage of a pipeline", "attach(stage")
    handle = attach(stage, sgd, mode, torch.distributed.group.WORLD)
    stage_of(rank, module)  # perhaps for evaluation
    handle.detach()
    return found


def stage_of(rank, module=None):
    own = [torch.distributed.new_group([each]) for each in range(2)][rank.index]
    return pipelining.PipelineStage(module or net(), 0, 1, torch.device("cpu"), group=own)


REFUSED = {
    "no group": ({}, "process_group="),
    "clipping": ({"clip": gradcast.Clip(norm=1.0)}, "clip in the loop"),
    "weights": ({"weight": "samples"}, "several backward passes"),
}


@pytest.mark.parametrize("name", REFUSED)
@on_ranks(2)
def test_what_stages_cannot_do_is_refused(rank, name):
    options, word = REFUSED[name]
    stage, group = stage_of(rank), None if name == "no group" else torch.distributed.group.WORLD
    sgd = torch.optim.SGD(stage.submod.parameters(), lr=0.1)
    return not_refused(lambda: attach(stage, sgd, process_group=group, **options), word)


@on_ranks(2)
def test_other_modules_of_stages_are_refused(rank):
    group = torch.distributed.group.WORLD
    sharded, plain = stage_of(rank, replicate(net(), mesh=init_device_mesh("cpu", (2,)))), stage_of(rank)
    return not_refused(lambda: attach([plain, sharded], None, "hook"), "shard both") + not_refused(
        lambda: attach([plain, net()], None, "hook", group), "stages of this rank only"
    )


@on_ranks(2)
def test_stages_without_work_or_with_the_same_parameter_are_refused(rank):
    group = torch.distributed.group.WORLD
    frozen, tied = stage_of(rank, net().requires_grad_(False)), [stage_of(rank), stage_of(rank)]
    tied[1].submod[0] = tied[0].submod[0]
    return not_refused(lambda: attach(frozen, None, "hook", group), "frozen", "omit attach") + not_refused(
        lambda: attach(tied, None, "hook", group), "in common", "copy"
    )


def test_no_gradient_is_used_before_all_stages_have_ended():
    passes = StagePasses([], [[0], [1]])
    passes.refuse_inside()
    passes.open()
    passes.complete(0)
    with pytest.raises(gradcast.Error, match="inside of a pipeline's schedule"):
        passes.refuse_inside()
    passes.complete(1)
    passes.refuse_inside()


def test_a_stage_that_runs_again_belongs_to_another_schedule():
    """The one before has failed between two passes."""
    passes = StagePasses([], [[0], [1]])
    passes.open()
    passes.complete(0)
    with passes.running_of(1, Makes.BY_AUTOGRAD, is_last=False):
        assert passes.goes_on
    with passes.running_of(0, Makes.BY_AUTOGRAD, is_last=False):
        assert not passes.goes_on


def test_each_reduction_is_a_pass_of_its_own():
    passes, seen = StagePasses([], [[0]]), []
    for _ in range(2):
        with passes.running_of(0, Makes.BY_REDUCTION, is_last=True):
            seen.append(passes.task)
        assert passes.running == passes.task == NO_TASK
    assert len({*seen, NO_TASK}) == 3


@on_ranks(4)
def test_replicas_of_other_stages_are_refused(rank, mode):
    """The modules of stages have equal shapes, so nothing else shows it."""
    position = rank.index // 2
    pairs = [torch.distributed.new_group(each) for each in ([0, 2], [1, 3])]
    part = Part(position)
    stage = pipelining.PipelineStage(part, position, 2, torch.device("cpu"), group=pairs[rank.index % 2])
    adam, before = torch.optim.AdamW(part.parameters()), [each.clone() for each in part.parameters()]
    found = not_refused(lambda: attach(stage, adam, mode, torch.distributed.group.WORLD), "the same stages")
    return found + compare.trees(list(part.parameters()), before)


@on_ranks(2)
def test_a_backward_pass_outside_of_the_schedule_is_refused(rank, mode):
    stage = stage_of(rank)
    sgd = torch.optim.SGD(stage.submod.parameters(), lr=0.1)
    handle = attach(stage, sgd, mode, torch.distributed.group.WORLD)
    loss = stage.submod(torch.ones(2, 6)).sum()
    found = not_refused(loss.backward, "outside of its schedule")
    other = pipelining.ScheduleGPipe(stage_of(rank, stage.submod), n_microbatches=2, loss_fn=nn.functional.mse_loss)
    with pytest.raises(RuntimeError) as raised:
        other.step(torch.ones(4, 6), target=torch.ones(4, 2))
    found += [] if "attach again" in str(raised.value.__cause__) else [str(raised.value.__cause__)]
    with handle.no_sync():
        stage.submod(torch.ones(2, 6)).sum().backward()
    handle.detach()
    return found


@on_ranks(2)
def test_a_schedule_that_fails_is_a_failed_backward_pass(rank, mode):
    """The other rank learns of it where it uses the gradients."""
    stage = stage_of(rank)
    sgd = torch.optim.SGD(stage.submod.parameters(), lr=0.1)
    handle = attach(stage, sgd, mode, torch.distributed.group.WORLD)
    steps = pipelining.ScheduleGPipe(stage, n_microbatches=2, loss_fn=lambda output, target: output.square().sum())

    calls = []

    def on_last_gradient(_):
        calls.append(rank)
        return 1 / 0 if len(calls) == 4 and rank.index == 1 else None

    def step():
        sgd.zero_grad()
        with contextlib.suppress(RuntimeError):
            steps.step(torch.ones(4, 6), target=torch.ones(4, 2))
        sgd.step()
        handle.flush()

    stage.submod[0].weight.register_hook(on_last_gradient)
    step()
    code, message = error_of(step)
    if rank.index == 0:
        rank.signal("told")
    rank.wait_for("told")  # by a rank that trains on, not by its end
    return [] if (code is not None) == (rank.index == 0) else [message]
