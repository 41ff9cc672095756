"""The doctor around a loop, from code: every kind of loop goes on as if nothing had happened."""

import contextlib
import os
from unittest import mock

import pytest

import gradcast
from training.needs import torch

dist, nn = torch.distributed, torch.nn
TIMEOUT_S = 180


def make_ddp():
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.3), nn.Linear(64, 64), nn.BatchNorm1d(64))
    return nn.parallel.DistributedDataParallel(module)


def steps(rank, ddp, adam, count, *, accumulate=False):
    for step in range(count):
        torch.manual_seed(100 * rank.index + step)
        adam.zero_grad()
        if accumulate:
            with ddp.no_sync():
                ddp(torch.randn(8, 64)).square().mean().backward()
        ddp(torch.randn(8, 64)).square().mean().backward()
        adam.step()


def state_of(modules, optimizers):
    tensors = [value for module in modules for value in module.state_dict().values()]
    states = [state for each in optimizers for state in each.state.values()]
    return [*tensors, *(value for state in states for value in state.values() if isinstance(value, torch.Tensor))]


def with_doctor(rank, folder, accumulate):
    ddps = [make_ddp(), make_ddp()]
    adams = [torch.optim.Adam(ddp.parameters(), lr=0.01) for ddp in ddps]
    with gradcast.doctor(ddps[0], adams[0], steps=5, seconds=0.5, network=False, output=folder) as outcome:
        steps(rank, ddps[0], adams[0], 14, accumulate=accumulate)
    steps(rank, ddps[1], adams[1], 14, accumulate=accumulate)
    states = [state_of([ddp], [adam]) for ddp, adam in zip(ddps, adams, strict=True)]
    equal = all(torch.equal(one, other) for one, other in zip(*states, strict=True))
    hooks = len(ddps[0]._forward_hooks) + len(ddps[0]._forward_pre_hooks)
    hooks += len(adams[0]._optimizer_step_pre_hooks) + len(adams[0]._optimizer_step_post_hooks)
    result = outcome.result
    assert outcome.why_nothing is None
    return equal, hooks, None if result is None else {"parts": result["parts"], "step": result["step"]}


@pytest.mark.parametrize("accumulate", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_around_a_loop(ranks, tmp_path, accumulate):
    results = ranks.run(3, with_doctor, str(tmp_path / "run"), accumulate, timeout_s=TIMEOUT_S)
    assert [result is not None for _, _, result in results] == [True, False, False]
    for equal, hooks, _ in results:
        # Three ranks: the sums have the order of DDP's own buckets, which the doctor does not touch.
        assert equal
        assert hooks == 0
    found = results[0][2]
    assert sum(part["ms"] for part in found["parts"]) == pytest.approx(found["step"]["ms"], abs=1e-6)
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
    """Runs ten steps of one kind of loop. Returns the final state and the doctor's step counts."""
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
    with mock.patch.object(result, "build", wraps=result.build) as made, around as outcome:
        for step in range(14):
            torch.manual_seed(100 * rank.index + step)
            train_step(case, rank, step, ddp, encoder, optimizers, scaler)
    said = None
    if outcome is not None and outcome.result is not None:
        said = outcome.result["steps"] | {"gradients_used": made.call_args.args[1].gradients_used}
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
        if case == "unused":
            loss = heads_loss(ddp, value, heads=((rank.index + step) % 2,))
        elif case == "two_forwards":
            loss = heads_loss(ddp, value) + heads_loss(ddp, 2 * value)
        else:
            loss = heads_loss(ddp, value)
    scaler.scale(loss).backward()
    with torch.no_grad() if case == "no_grad" else contextlib.nullcontext():
        for each in optimizers:
            scaler.step(each)
    scaler.update()


def train_twice(rank, case, folder):
    state, said = train_heads(rank, case, folder)
    reference, _ = train_heads(rank, case, None)
    return all(torch.equal(one, other) for one, other in zip(state, reference, strict=True)), said


@pytest.mark.parametrize(
    "case",
    [
        "plain", "static_graph", "find_unused", "small_buckets", "hook", "two_optimizers", "encoder", "frozen", "eval",
        "closure", "zeros", "autocast", "scaler", "two_forwards", "no_grad",
    ],
)  # fmt: skip
def test_any_loop_goes_on_as_if_nothing_had_been(ranks, tmp_path, case):
    (equal, said), (others_equal, _) = ranks.run(2, train_twice, case, str(tmp_path / "run"), timeout_s=TIMEOUT_S)
    assert equal
    assert others_equal
    assert said["normal"] == 5
    assert said["gradients_used"] == (case == "scaler"), "DDP's own writing is none of the loop's"


def test_where_parameters_stay_unused_there_is_no_diagnosis_and_training_goes_on(ranks, tmp_path):
    for equal, said in ranks.run(2, train_twice, "unused", str(tmp_path / "run"), timeout_s=TIMEOUT_S):
        assert equal
        assert said is None


def train_with_a_defect(rank, folder):
    from gradcast.diagnosis.analyze import result
    from gradcast.diagnosis.probe import prober

    def breaks(*_):
        raise ZeroDivisionError("a defect")

    broken = result if rank.index == 0 else prober
    name = "build" if rank.index == 0 else "no such thing"
    with mock.patch.object(broken, name, breaks, create=True):
        state, said = train_heads(rank, "plain", folder)
    reference, _ = train_heads(rank, "plain", None)
    return all(torch.equal(one, other) for one, other in zip(state, reference, strict=True)), said


def test_a_defect_of_the_doctor_does_not_end_a_training(ranks, tmp_path):
    for equal, said in ranks.run(2, train_with_a_defect, str(tmp_path / "run"), timeout_s=TIMEOUT_S):
        assert equal
        assert said is None


def with_clipping(rank, folder, clips):
    """Returns how often a hook behind the doctor's was called; on rank 0 also the actions, and why overlap is left
    out.
    """
    ddp, called = make_ddp(), []
    adam = torch.optim.Adam(ddp.parameters(), lr=0.01)
    with gradcast.doctor(ddp, adam, steps=5, seconds=0.01, network=False, output=folder) as outcome:
        for step in range(14):
            torch.manual_seed(100 * rank.index + step)
            adam.zero_grad()
            ddp(torch.randn(8, 64)).square().mean().backward()
            if clips:
                nn.utils.clip_grad_norm_(ddp.parameters(), 1.0)
            if step == 4:
                adam.register_step_post_hook(lambda *_: called.append(1))
            adam.step()
    found = outcome.result
    return len(called), found and ({each["key"] for each in found["actions"]}, found["overlap_left_out"])


@pytest.mark.parametrize("clips", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_loop_that_clips_is_promised_no_overlap(ranks, tmp_path, clips):
    results = ranks.run(2, with_clipping, str(tmp_path / "run"), clips, timeout_s=TIMEOUT_S)
    assert [called for called, _ in results] == [10, 10]
    keys, why = results[0][1]
    assert ("overlap" in keys) == (not clips)
    assert (why is None) == (not clips)
    assert "wire" in keys


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(16, 8, sparse=True), nn.Linear(8, 8)

    def forward(self, words):
        return self.head(self.table(words))


def with_sparse_gradients(rank, folder):
    torch.manual_seed(0)
    ddp = nn.parallel.DistributedDataParallel(Words())
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
    assert "the gradient of table.weight is sparse" in found["not_tried"]
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


def refused(rank, case):
    ddp = make_ddp()
    sgd = torch.optim.SGD(ddp.parameters(), lr=0.1)
    model, optimizers = {
        "bare": (ddp.module, sgd),
        "others": (ddp, torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)),
        "none": (ddp, []),
        "closure": (ddp, torch.optim.LBFGS(ddp.parameters())),
        "steps": (ddp, sgd),
        "hook": (ddp, sgd),
    }[case]
    if case == "hook":
        ddp.register_comm_hook(object(), lambda _, bucket: bucket.buffer())
    try:
        with gradcast.doctor(model, optimizers, steps=0 if case == "steps" else 20):
            return "accepted"
    except gradcast.Error as error:
        return str(error)


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("bare", "wrap the model first"),
        ("others", "holds no parameter"),
        ("none", "needs the optimizer"),
        ("closure", "LBFGS.step() needs a closure"),
        ("steps", "must be a whole number of at least 5"),
        ("hook", "leave it out for the diagnosis"),
    ],
)
def test_wrong_use_is_refused(ranks, case, words):
    for said in ranks.run(2, refused, case):
        assert words in said


def with_more_threads_than_cores(rank, folder):
    """Returns the doctor's lint, the numbers of threads with which passes ran, and the number afterwards."""
    usual, many, seen = torch.get_num_threads(), len(os.sched_getaffinity(0)) + 1, set()
    ddp = make_ddp()
    adam = torch.optim.Adam(ddp.parameters(), lr=0.01)
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


def attached_by_the_script(rank, folder):
    """Like a script that attaches gradcast, which runs with GRADCAST_DISABLE=1 under the doctor."""
    ddp = make_ddp()
    adam = torch.optim.Adam(ddp.parameters(), lr=0.01)
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
