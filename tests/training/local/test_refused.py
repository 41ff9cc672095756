"""Wrong use of local steps: a sentence that says what to do, on every rank, and nothing hangs."""

import copy
import time
import warnings
from unittest import mock

import pytest

from training.attached import attach, heard, not_refused
from training.launch import launch
from training.needs import torch
from training.pool import on_ranks

pytest.importorskip("training.needs")
import gradcast
from training.local.reference import net, train
from training.local.test_rounds import sgd

Options = gradcast.Options
OPTIONS = {"warmup_steps": 6, "adapt": True, "sync_every": 4}

WRONG = [
    ({"sync_every": 0}, "at least 1"),
    ({"sync_every": -3}, "at least 1"),
    ({"sync_every": 2.5}, "whole number"),
    ({"sync_every": True}, "whole number"),
    ({"sync_every": "often"}, "or auto"),
    ({"sync_every": "auto"}, "needs options.evaluate"),
    ({"sync_every": "auto", "evaluate": 0.5, "evaluate_metric": "loss"}, "it is 0.5"),
    ({"sync_every": "auto", "evaluate": len}, "accuracy or loss is expected"),
    ({"sync_every": "auto", "evaluate": len, "evaluate_metric": "error"}, "accuracy or loss is expected"),
    ({"sync_every": "auto", "evaluate": len, "evaluate_metric": "loss", "sync_every_max": 1}, "at least 2"),
    ({"sync_every": "auto", "evaluate": len, "evaluate_metric": "loss", "outer_overlap": 64}, "at most 63"),
    (
        {"sync_every": "auto", "evaluate": len, "evaluate_metric": "loss", "outer_lr": 0.5},
        "'auto' averages unless outer is given",
    ),
    ({"sync_every": 5, "evaluate": len}, "belongs to sync_every='auto'"),
    ({"sync_every": 5, "sync_every_max": 50}, "belongs to sync_every='auto'"),
    ({"evaluate_metric": "loss"}, "without sync_every"),
    ({"sync_every": 1}, "that is DDP: leave it out"),
    ({"sync_every": 5, "outer": "adam"}, "nesterov or average"),
    ({"sync_every": 5, "outer": "average", "outer_lr": 0.5}, "outer_lr belongs to"),
    ({"sync_every": 5, "outer": "average", "outer_momentum": 0.5}, "outer_momentum belongs to"),
    ({"sync_every": 5, "outer_lr": 0.0}, "above 0"),
    ({"sync_every": 5, "outer_momentum": 1.0}, "below 1"),
    ({"sync_every": 5, "outer_overlap": 5}, "at most 4"),
    ({"sync_every": 5, "outer_overlap": -1}, "at least 0"),
    ({"sync_every": 5, "outer_overlap": 0, "outer_merge": 0.5}, "nothing to merge"),
    ({"sync_every": 5, "outer_merge": 1.0}, "below 1"),
    ({"sync_every": 5, "inner": "rack"}, "host or None"),
    ({"inner": "host"}, "without sync_every"),
    ({"outer": "average"}, "without sync_every"),
    ({"outer_overlap": 2}, "without sync_every"),
    ({"sync_every": 5, "max_grad_norm": 1.0}, "clip_grad_norm_"),
    ({"sync_every": 5, "max_grad_value": 1.0}, "clip_grad_value_"),
    ({"sync_every": 5, "weight": "samples"}, "no gradients travel"),
    ({"sync_every": 5, "plan": "plan.json"}, "no measured plan"),
    ({"sync_every": 5, "adapt": False}, "no measured plan"),
    ({"sync_every": 5, "compare_every": 10}, "compared in every round"),
    ({"sync_every": 5, "split_compiled": True}, "forward waits for nothing"),
]


@pytest.mark.parametrize(("options", "words"), WRONG, ids=lambda each: str(each))
def test_wrong_options(options, words):
    with pytest.raises(gradcast.Error, match=words) as caught:
        Options(**options)
    assert "\n" not in str(caught.value)


@on_ranks(2)
def test_what_attach_refuses(rank):
    options = Options(sync_every=4)
    module = net(0)
    found = not_refused(lambda: gradcast.attach(module, options=options), "hook mode has none")
    ddp = torch.nn.parallel.DistributedDataParallel(net(0), find_unused_parameters=True)
    for each, words in [(ddp, "ddp.module"), (ddp.module, "something else waits")]:
        found += not_refused(lambda each=each: gradcast.attach(each, sgd(each), options=options), words)
    del ddp, each
    with mock.patch.dict("os.environ", GRADCAST_DISABLE="1"):
        found += not_refused(lambda: gradcast.attach(module, sgd(module), options=options), "GRADCAST_DISABLE")
    with mock.patch.dict("os.environ", GRADCAST_PLAN="plan.json"):
        found += not_refused(lambda: gradcast.attach(module, sgd(module), options=options), "GRADCAST_PLAN")
    own = Options(sync_every=4 + rank.index)
    found += not_refused(lambda: gradcast.attach(module, sgd(module), options=own), "options.sync_every is 4 on rank 0")
    inner = Options(sync_every=4, inner="host")
    found += not_refused(lambda: gradcast.attach(module, sgd(module), options=inner), "two or more hosts", "leave it")
    gaps = copy.deepcopy(module)
    gaps.odd.bias = torch.nn.Parameter(torch.zeros(320)[::2])
    return found + not_refused(lambda: gradcast.attach(gaps, sgd(gaps), options=options), "odd.bias", "contiguous")


@on_ranks(2)
def test_what_a_handle_refuses(rank):
    module = net(0)
    optimizer = sgd(module)
    handle = attach(module, optimizer, **OPTIONS)
    found = not_refused(lambda: handle.weight(3), "handle.weight()")
    found += not_refused(handle.send_buffers, "end_round")
    found += not_refused(lambda: handle.save_plan("plan.json"), "no measured plan")
    handle.flush()
    handle.detach()
    plain = attach(module, optimizer)
    for call in (plain.end_round, plain.global_model):
        found += not_refused(call, "options.sync_every")
    plain.detach()
    return found


@on_ranks(2)
def test_a_scaler_is_refused(rank):
    module = net(0)
    optimizer = sgd(module)
    handle = attach(module, optimizer, **OPTIONS)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(module(torch.randn(3, 40)).square().mean()).backward()
    found = not_refused(lambda: scaler.step(optimizer), "GradScaler", "bf16")
    handle.detach()
    return found


@on_ranks(2)
def test_a_changed_model_is_refused_before_it_travels(rank):
    module = net(0)
    optimizer = sgd(module)
    handle = attach(module, optimizer, **OPTIONS)
    for step in range(3):
        train(module, optimizer, rank.index, step)
    module.frozen.requires_grad_(True)
    found = not_refused(lambda: train(module, optimizer, rank.index, 3), "have changed since attach", "attach again")
    handle.detach()
    return found


@on_ranks(2)
def test_another_memory_format_is_refused_before_it_travels(rank):
    module = torch.nn.Conv2d(3, 8, 3)
    optimizer = sgd(module)
    handle = attach(module, optimizer, **OPTIONS)
    module.to(memory_format=torch.channels_last)
    module(torch.ones(2, 3, 4, 4)).sum().backward()
    optimizer.step()
    found = not_refused(handle.end_round, "weight has another memory format", "attach again")
    handle.detach()
    return found


@pytest.mark.parametrize("overlap", [0, 3])
@on_ranks(3)
def test_loops_of_different_lengths_that_end_the_round(rank, overlap):
    """Rank 1 makes two steps less than the others, so it ends the round where they still take fragments."""
    module = net(0)
    optimizer = sgd(module)
    handle = attach(module, optimizer, **OPTIONS | {"sync_every": 7, "outer_overlap": overlap})
    start_s = time.monotonic()

    def loop():
        for step in range(15 - 2 * (rank.index == 1)):
            train(module, optimizer, rank.index, step)
        handle.end_round()

    found = not_refused(loop, "loops differ", "rank 1", "13 steps", "same number")
    found += not_refused(lambda: train(module, optimizer, rank.index, 20))
    found += [] if time.monotonic() - start_s < 20 else ["it takes long"]
    handle.detach(wait_s=1.0)
    return found


@on_ranks(2)
def test_loops_of_different_lengths_that_detach(rank):
    module = net(0)
    optimizer = sgd(module)
    handle = attach(module, optimizer, **OPTIONS)
    for step in range(2 + rank.index):
        train(module, optimizer, rank.index, step)
    with heard() as lines:
        found = not_refused(handle.detach, "2 to 3 steps")
    told = any("never averaged" in line for line in lines)
    return found + ([] if told == (rank.index == 0) else lines)


def test_a_rank_that_ends_earlier():
    """The other one gets an error that says what may be wrong."""
    ends = launch(2, "ends_earlier", module="training.local.ends")
    assert ends[0].code == 0, ends[0].errors
    assert ends[1].code == 1, ends[1].errors
    told = ends[1].told[-1]
    assert told["code"] == "communication", told
    assert "ranks whose loops have different lengths" in told["message"], told
    assert "after 10 optimizer steps" in told["message"], told


@pytest.mark.slow
def test_the_end_of_a_run_that_is_shorter_than_a_round():
    ends = launch(2, "is_short", module="training.local.ends")
    assert [end.code for end in ends] == [0, 0], ends[0].errors
    assert "never averaged" in ends[0].errors
    assert "never averaged" not in ends[1].errors


@pytest.mark.slow
def test_a_global_copy_that_differs_is_found_before_it_is_used():
    ends = launch(2, "is_damaged", module="training.local.ends")
    for end in ends:
        assert end.told[-1]["code"] == "communication", end.errors
        assert "the global copy of rank 1 differs" in end.told[-1]["message"]
