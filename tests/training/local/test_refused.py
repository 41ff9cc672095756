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

Options, LocalSteps = gradcast.Options, gradcast.LocalSteps
OPTIONS = {"local": LocalSteps(4)}

LOSS = {"evaluate": len, "evaluate_metric": "loss"}
WRONG = [
    ({"every": 0}, "at least 1"),
    ({"every": -3}, "at least 1"),
    ({"every": 2.5}, "whole number"),
    ({"every": True}, "whole number"),
    ({"every": None}, "whole number"),
    ({"every": "often"}, "or auto"),
    ({"every": 10**9}, "at most 100000"),
    ({"every": "auto"}, "evaluate is None; a function"),
    ({"every": "auto", "evaluate": 0.5, "evaluate_metric": "loss"}, "evaluate is 0.5; a function"),
    ({"every": "auto", "evaluate": len}, "accuracy or loss is expected"),
    ({"every": "auto", "evaluate": len, "evaluate_metric": "error"}, "accuracy or loss is expected"),
    ({"every": "auto", **LOSS, "every_max": 1}, "at least 2"),
    ({"every": "auto", **LOSS, "every_max": 10**9}, "at most 100000"),
    ({"every": "auto", **LOSS, "overlap": 64}, "at most 63"),
    ({"every": "auto", **LOSS, "lr": 0.5}, "as every='auto' has by default"),
    ({"every": 5, "evaluate": len}, "belongs to every='auto'"),
    ({"every": 5, "every_max": 50}, "belongs to every='auto'"),
    ({"every": 1}, "that is DDP: omit options.local"),
    ({"every": 5, "outer": "adam"}, "nesterov or average"),
    ({"every": 5, "outer": "average", "lr": 0.5}, "lr belongs to"),
    ({"every": 5, "outer": "average", "momentum": 0.5}, "momentum belongs to"),
    ({"every": 5, "lr": 0.0}, "above 0"),
    ({"every": 5, "momentum": 1.0}, "below 1"),
    ({"every": 5, "overlap": 5}, "at most 4"),
    ({"every": 5, "overlap": -1}, "at least 0"),
    ({"every": 5, "overlap": 2.5}, "whole number"),
    ({"every": 5, "overlap": 0, "merge": 0.5}, "nothing is merged"),
    ({"every": 5, "merge": 1.0}, "below 1"),
    ({"every": 5, "inner": "rack"}, "host or None"),
]
EXCLUDED = [
    ({"clip": gradcast.Clip(norm=1.0)}, "clip_grad_norm_"),
    ({"clip": gradcast.Clip(value=1.0)}, "clip_grad_value_"),
    ({"weight": "samples"}, "no gradients are sent"),
    ({"broadcast_buffers": False}, "averaged once a round"),
    ({"unseen_reads": "before_forward"}, "forward waits for nothing"),
    ({"plan": gradcast.Planning(file="plan.json")}, "no measured plan"),
    ({"plan": gradcast.Planning(adapt=False)}, "no measured plan"),
    ({"compare_every": 10}, "compared in every round"),
    ({"split_compiled": True}, "forward waits for nothing"),
    ({"nccl": gradcast.Nccl(register_buffers=True)}, "options.nccl.register_buffers is given"),
    ({"watch": gradcast.Watch(on_alarm=len)}, "alarms compare steps with a plan"),
]


@pytest.mark.parametrize(("settings", "words"), WRONG, ids=str)
def test_wrong_settings(settings, words):
    with pytest.raises(gradcast.Error, match=f"^options.local.*{words}") as caught:
        LocalSteps(**settings)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("options", "words"), EXCLUDED, ids=str)
def test_what_local_steps_exclude(options, words):
    with pytest.raises(gradcast.Error, match=r"is given with options\.local") as caught:
        Options(local=LocalSteps(5), **options)
    assert words in str(caught.value)
    Options(local=LocalSteps(5), wire="int8", nccl=gradcast.Nccl(4), watch=gradcast.Watch(timeout_s=1.0))


@on_ranks(2)
def test_what_attach_refuses(rank):
    options = Options(**OPTIONS)
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
    own = Options(local=LocalSteps(4 + rank.index))
    words = "options.local.every is 4 on rank 0"
    found += not_refused(lambda: gradcast.attach(module, sgd(module), options=own), words)
    inner = Options(local=LocalSteps(4, inner="host"))
    found += not_refused(lambda: gradcast.attach(module, sgd(module), options=inner), "two or more hosts", "omit it")
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
        found += not_refused(call, "options.local")
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
    handle = attach(module, optimizer, local=LocalSteps(7, overlap=overlap))
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
