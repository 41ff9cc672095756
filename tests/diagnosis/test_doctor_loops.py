"""The doctor around a loop, from code: every kind of loop goes on as if nothing had happened."""

import contextlib
import gc
import os
import weakref
from pathlib import Path
from unittest import mock

import pytest

import gradcast
from training.needs import torch

dist, nn = torch.distributed, torch.nn
TIMEOUT_S = 180


def make_ddp():
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.3), nn.Linear(64, 64), nn.BatchNorm1d(64))
    ddp = nn.parallel.DistributedDataParallel(module)
    return ddp, torch.optim.Adam(ddp.parameters(), lr=0.01)


def steps(rank, ddp, adam, count, before_update=lambda step: None):
    for step in range(count):
        torch.manual_seed(100 * rank.index + step)
        adam.zero_grad()
        ddp(torch.randn(8, 64)).square().mean().backward()
        before_update(step)
        adam.step()


def state_of(modules, optimizers):
    tensors = [value for module in modules for value in module.state_dict().values()]
    states = [state for each in optimizers for state in each.state.values()]
    return [*tensors, *(value for state in states for value in state.values() if isinstance(value, torch.Tensor))]


def are_equal(state, other):
    return all(torch.equal(one, two) for one, two in zip(state, other, strict=True))


def with_doctor(rank, folder):
    (ddp, adam), (other_ddp, other_adam) = make_ddp(), make_ddp()
    with gradcast.doctor(ddp, adam, steps=5, seconds=0.5, network=False, output=folder) as outcome:
        steps(rank, ddp, adam, 14)
    steps(rank, other_ddp, other_adam, 14)
    equal = are_equal(state_of([ddp], [adam]), state_of([other_ddp], [other_adam]))
    hooks = len(ddp._forward_hooks) + len(ddp._forward_pre_hooks)
    hooks += len(adam._optimizer_step_pre_hooks) + len(adam._optimizer_step_post_hooks)
    assert outcome.why_nothing is None, outcome.why_nothing
    keys = ("parts", "step", "overlap_left_out", "actions")
    return equal, hooks, outcome.result and {key: outcome.result[key] for key in keys}


def test_around_a_loop(ranks, tmp_path):
    results = ranks.run(3, with_doctor, str(tmp_path / "run"), timeout_s=TIMEOUT_S)
    # Three ranks: the sums have the order of DDP's own buckets, which the doctor does not touch.
    assert [(equal, hooks, result is None) for equal, hooks, result in results] == [
        (True, 0, False), (True, 0, True), (True, 0, True),
    ]  # fmt: skip
    found = results[0][2]
    assert sum(part["ms"] for part in found["parts"]) == pytest.approx(found["step"]["ms"], abs=1e-6)
    assert {"overlap", "bucket"} <= {each["key"] for each in found["actions"]}
    assert found["overlap_left_out"] is None
    assert (tmp_path / "run" / "trace.json.gz").exists()


class Heads(nn.Module):
    """Has a buffer that forward replaces, dropout, outputs in a dictionary, and a head that may stay unused."""

    def __init__(self):
        super().__init__()
        self.body, self.heads = nn.Linear(8, 8), nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, value, heads=(0, 1)):
        value = nn.functional.dropout(self.body(value), 0.2)
        self.mean = 0.9 * self.mean + value.detach().mean(0)
        return {"heads": [self.heads[head](value) for head in heads], "mean": self.mean}


def heads_loss(ddp, value, **keywords):
    return sum(out.square().mean() for out in ddp(value, **keywords)["heads"])


def train_heads(rank, case, doctor):
    """Runs some steps of one kind of loop. Returns the final state, and what the doctor says on rank 0: the number of
    steps, and whether the loop uses gradients, or why it says nothing.
    """
    from gradcast.diagnosis.analyze import result

    torch.manual_seed(0)
    module, encoder = Heads(), nn.Linear(8, 8)
    if case == "frozen":
        module.body.requires_grad_(False)
    options = {
        "static_graph": {"static_graph": True},
        "find_unused": {"find_unused_parameters": True, "gradient_as_bucket_view": True},
        "unused": {"find_unused_parameters": True},
        "small_buckets": {"bucket_cap_mb": 0.0001},
    }.get(case, {})
    ddp = nn.parallel.DistributedDataParallel(module, **options)
    if case == "hook":
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

        ddp.register_comm_hook(None, fp16_compress_hook)
    groups = [ddp.module.body.parameters(), ddp.module.heads.parameters()]
    given = [[*groups[0], *groups[1]]] if case != "two_optimizers" else [[*group] for group in groups]
    if case == "encoder":
        given[0] += encoder.parameters()
    optimizers = [torch.optim.Adam([p for p in group if p.requires_grad], lr=0.01) for group in given]
    scaler = torch.amp.GradScaler("cpu", enabled=case == "scaler", init_scale=4.0)
    if case == "eval":
        ddp.eval()
    around = contextlib.nullcontext()
    if doctor is not None:
        around = gradcast.doctor(ddp, optimizers, steps=5, seconds=0.01, network=False, trial=False, output=doctor)
    called = []
    with mock.patch.object(result, "build", wraps=result.build) as made, around as outcome:
        for step in range(14):
            torch.manual_seed(100 * rank.index + step)
            train_step(case, rank, step, ddp, encoder, optimizers, scaler)
            if step == 3:
                optimizers[0].register_step_post_hook(lambda *_: called.append(1))
    assert len(called) == 10, "a hook behind the doctor's is called in each step, also where the doctor removes its own"
    said = None if outcome is None else outcome.why_nothing
    if outcome is not None and outcome.result is not None:
        said = (outcome.result["steps"]["normal"], made.call_args.args[1].gradients_used)
        lines = [each for each in outcome.result["early_waits"] if Path(__file__).name in each["where"]]
        assert bool(lines) == said[1], "what uses gradients is named"
    return state_of([ddp, encoder], optimizers), said


def train_step(case, rank, step, ddp, encoder, optimizers, scaler):
    value = torch.randn(4, 8)
    for each in optimizers:
        each.zero_grad(set_to_none=case != "zeros")
    if case == "closure":

        def closure():
            loss = heads_loss(ddp, value)
            loss.backward()
            return loss

        optimizers[0].step(closure)
        return
    if case == "encoder":
        value = encoder(value)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=case == "autocast"):
        if case == "accumulate":
            with ddp.no_sync():
                heads_loss(ddp, torch.randn(4, 8)).backward()
        if case == "unused":
            loss = heads_loss(ddp, value, heads=((rank.index + step) % 2,))
        elif case == "two_forwards":
            loss = heads_loss(ddp, value) + heads_loss(ddp, 2 * value)
        else:
            loss = heads_loss(ddp, value)
    scaler.scale(loss).backward()
    if case == "clip":
        nn.utils.clip_grad_norm_(ddp.parameters(), 0.1)
    with torch.no_grad() if case == "no_grad" else contextlib.nullcontext():
        for each in optimizers:
            scaler.step(each)
    scaler.update()


def train_twice(rank, case, folder, breaks=False):
    """``breaks``: the doctor has a defect on rank 0."""
    from gradcast.diagnosis.analyze import result

    defect = contextlib.nullcontext()
    if breaks and rank.index == 0:
        defect = mock.patch.object(result, "build", side_effect=ZeroDivisionError("a defect"))
    with defect:
        state, said = train_heads(rank, case, folder)
    return are_equal(state, train_heads(rank, case, None)[0]), said


@pytest.mark.parametrize(
    "case",
    [
        "plain", "static_graph", "find_unused", "small_buckets", "hook", "two_optimizers", "encoder", "frozen", "eval",
        "closure", "zeros", "autocast", "scaler", "two_forwards", "no_grad", "accumulate", "clip",
    ],
)  # fmt: skip
def test_any_loop_goes_on_as_if_nothing_had_been(ranks, tmp_path, case):
    first, other = ranks.run(2, train_twice, case, str(tmp_path / "run"), timeout_s=TIMEOUT_S)
    # DDP's own writing into gradients is none of the loop's.
    assert (first, other) == ((True, (5, case in ("scaler", "clip"))), (True, None))


@pytest.mark.parametrize(
    ("case", "breaks", "why"), [("unused", False, "some parameters have no gradient"), ("plain", True, "a defect")]
)
def test_where_there_is_no_diagnosis_the_training_goes_on(ranks, tmp_path, case, breaks, why):
    for equal, said in ranks.run(2, train_twice, case, str(tmp_path / "run"), breaks, timeout_s=TIMEOUT_S):
        assert equal
        assert why in said


def with_sparse_gradients(rank, folder):
    torch.manual_seed(0)
    ddp = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Embedding(16, 8, sparse=True), nn.Linear(8, 8)))
    sgd = torch.optim.SGD(ddp.parameters(), lr=0.1)
    with gradcast.doctor(ddp, sgd, steps=5, seconds=0.01, network=False, output=folder) as outcome:
        for step in range(14):
            sgd.zero_grad()
            ddp(torch.arange(rank.index, rank.index + 4) + step % 4).square().mean().backward()
            sgd.step()
    return outcome.result


def test_what_gradcast_cannot_train_is_diagnosed_all_the_same(ranks, tmp_path):
    found, other = ranks.run(2, with_sparse_gradients, str(tmp_path / "run"), timeout_s=TIMEOUT_S)
    assert other is None
    assert "the gradient of 0.weight is sparse" in found["not_tried"]
    assert found["parts"]
    assert {"accumulate", "straggler"} <= {each["key"] for each in found["actions"]}


def in_a_part_of_the_ranks(rank):
    from gradcast.diagnosis.preconditions import obstacle

    group = dist.new_group([0, 1])
    if rank.index == 2:
        return None
    ddp = nn.parallel.DistributedDataParallel(nn.Linear(2, 2), process_group=group)
    return obstacle(ddp, [torch.optim.SGD(ddp.parameters(), lr=0.1)])


def test_a_module_of_a_part_of_the_ranks_is_refused(ranks):
    first, second, _ = ranks.run(3, in_a_part_of_the_ranks)
    assert first == second
    assert "averaged over 2 of 3 ranks" in first


def refused(rank):
    """What the doctor says to each wrong use."""
    ddp, adam = make_ddp()
    hooked, hooked_adam = make_ddp()
    hooked.register_comm_hook(object(), lambda _, bucket: bucket.buffer())
    uses = {
        "wrap the model first": (ddp.module, adam),
        "holds no parameter": (ddp, torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)),
        "needs the optimizer": (ddp, []),
        "LBFGS.step() needs a closure": (ddp, torch.optim.LBFGS(ddp.parameters())),
        "must be a whole number of at least 5": (ddp, adam, 0),
        "omit it for the diagnosis": (hooked, hooked_adam),
    }
    said = {}
    for words, (model, optimizers, *steps) in uses.items():
        with pytest.raises(gradcast.Error) as refusal, gradcast.doctor(model, optimizers, steps=(steps or [20])[0]):
            pass
        said[words] = str(refusal.value)
    return said


def test_wrong_use_is_refused(ranks):
    for said in ranks.run(2, refused):
        assert {words: text for words, text in said.items() if words not in text} == {}


def with_more_threads_than_cores(rank, folder):
    """Returns the doctor's lint, the numbers of threads with which passes ran, and the number afterwards."""
    usual, many, seen = torch.get_num_threads(), len(os.sched_getaffinity(0)) + 1, set()
    ddp, adam = make_ddp()
    ddp.module.register_forward_hook(lambda *_: seen.add(torch.get_num_threads()))
    torch.set_num_threads(many)
    try:
        options = {"network": False, "trial": False, "output": folder}
        with gradcast.doctor(ddp, adam, steps=5, seconds=0.01, **options) as outcome:
            steps(rank, ddp, adam, 12)
        after = torch.get_num_threads()
    finally:
        torch.set_num_threads(usual)
    return outcome.result, seen, after, many


def test_steps_with_threads_that_fit_say_what_too_many_cost(ranks, tmp_path):
    results = ranks.run(2, with_more_threads_than_cores, str(tmp_path / "run"), timeout_s=TIMEOUT_S)
    for _, seen, after, many in results:
        assert len(seen) == 2
        assert max(seen) == many
        assert after == many
    # If it costs too little to be told from noise, it is no finding.
    (listed,) = [each for each in results[0][0]["lint"] if each["key"] == "threads"] or [{"cost_ms": 1.0}]
    assert listed["cost_ms"] > 0


def freed_without_garbage_collection(rank, folder):
    make_ddp()  # for the imports of a process's first DDP
    gc.collect()
    gc.disable()
    try:
        ddp, adam = make_ddp()
        alive = weakref.ref(ddp)
        with gradcast.doctor(ddp, adam, steps=5, seconds=0.01, network=False, output=folder) as outcome:
            steps(rank, ddp, adam, 12)
        del ddp, adam
        return alive() is None, outcome.why_nothing
    finally:
        gc.enable()


def test_the_training_is_free_when_its_last_reference_goes(ranks, tmp_path):
    found = ranks.run(2, freed_without_garbage_collection, str(tmp_path / "run"), timeout_s=TIMEOUT_S)
    assert found == [(True, None), (True, None)]


def attached_by_the_script(rank, folder):
    """Like a script that attaches gradcast, which runs with GRADCAST_DISABLE=1 under the doctor."""
    ddp, adam = make_ddp()
    with mock.patch.dict(os.environ, {"GRADCAST_DISABLE": "1"}):
        handle = gradcast.attach(ddp, adam)
        with gradcast.doctor(ddp, adam, steps=5, seconds=0.01, network=False, output=folder) as outcome:
            steps(rank, ddp, adam, 12)
        with pytest.raises(gradcast.Error, match="attached to this module already"):
            gradcast.attach(ddp, adam)
    handle.detach()
    return None if outcome.result is None else outcome.result["not_tried"] or outcome.result["plan"]["policy"]


def test_gradcast_is_tried_where_the_script_attaches_it_itself(ranks, tmp_path):
    first, second = ranks.run(2, attached_by_the_script, str(tmp_path / "run"), timeout_s=TIMEOUT_S)
    assert first in ("forecast", "ddp")
    assert second is None
