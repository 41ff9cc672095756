"""The doctor inside of a training: what it leaves behind, what it finds, and what it says where it cannot."""

import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import pytest

import gradcast
from gradcast.lab import LabError
from gradcast.lab.workers import run_workers
from training.needs import torch
from training.pool import environment

nn = torch.nn
SCRIPT = Path(__file__).resolve().parents[1] / "doctor" / "train.py"
TIMEOUT_S = 180
QUICK = ["--no-network", "--no-trial", "--seconds", "1", "--steps", "8"]


@pytest.fixture(autouse=True)
def _this_job(monkeypatch):
    for name, value in environment().items():
        monkeypatch.setenv(name, value)


def train(tmp_path, *arguments, doctor=None):
    """Two ranks; the digest of the final state. ``doctor``: its options; None: without it."""
    state = tmp_path / f"state{doctor is None}"
    before = [] if doctor is None else ["-m", "gradcast", "doctor", *doctor, "-o", str(tmp_path / "run")]
    with open(tmp_path / f"said{doctor is None}", "w") as said:
        run_workers([*before, str(SCRIPT), *arguments, "--state", str(state)], 2, timeout_s=TIMEOUT_S, output=said)
    return state.read_text()


def result_in(tmp_path):
    return json.loads((tmp_path / "run" / "doctor.json").read_text())


def require_sums(result):
    parts = sum(part["ms"] for part in result["parts"])
    assert parts == pytest.approx(result["step"]["ms"], abs=1e-6)
    for rank in result["ranks"]:
        assert sum(rank["parts"].values()) == pytest.approx(rank["step_ms"], abs=1e-6)


@pytest.mark.parametrize("workers", ["0", "2"])
def test_the_training_ends_in_the_very_state_in_which_it_would_have(tmp_path, workers):
    arguments = ["--layer-ms", "0.5", "--workers", workers, "--read-ms", "2"]
    options = ["--seconds", "1", "--steps", "8"]  # everything: the network and gradcast, too
    assert train(tmp_path, *arguments, doctor=options) == train(tmp_path, *arguments)
    result = result_in(tmp_path)
    require_sums(result)
    assert result["world_size"] == 2
    assert result["nodes"] == [[0, 1]]
    assert result["script"] == str(SCRIPT)
    assert result["not_tried"] is None
    assert {action["key"] for action in result["actions"]} >= {"overlap", "bucket", "wire", "accumulate", "loader"}
    assert result["floor_ms"] <= result["step"]["ms"] + 1
    assert [each["rank"] for each in result["timeline"]] == [0, 1]
    assert all(each["blocks"] and each["spans"] for each in result["timeline"])
    assert result["network"]["pairs"] == [] or result["network"]["pairs"][0]["tcp_gbit_per_s"] > 0
    said = (tmp_path / "saidFalse").read_text()
    assert "what would help" in said or "Nothing here will help" in said


def test_what_was_put_in_is_found_and_named(tmp_path):
    train(tmp_path, "--layer-ms", "1", "--slow-rank", "1", "--slow-ms", "120", doctor=QUICK)
    result = result_in(tmp_path)
    require_sums(result)
    assert result["view_rank"] == 0
    assert result["verdict"]["kind"] == "straggler"
    slow = result["straggler"]
    assert slow["rank"] == 1
    assert slow["stage"] in ("forward", "backward")
    assert slow["layer"].startswith("3.") or slow["layer"] == "3"
    best = result["actions"][0]
    assert best["key"] == "straggler"
    assert best["speedup"] > 1.5


@pytest.mark.parametrize(
    ("arguments", "part"),
    [(["--read-ms", "60"], "data_storage"), (["--prepare-ms", "60", "--workers", "1"], "data_cpu")],
)
def test_slow_data_is_told_apart(tmp_path, arguments, part):
    train(tmp_path, "--layer-ms", "0.5", *arguments, doctor=QUICK)
    result = result_in(tmp_path)
    require_sums(result)
    parts = {each["key"]: each["ms"] for each in result["parts"]}
    # On busy cores one rank's data may be much slower than the other's.
    assert result["verdict"]["kind"] == "data-bound" or result["straggler"]["stage"] == part
    other = {"data_storage": "data_cpu", "data_cpu": "data_storage"}[part]
    assert parts[part] > 3 * parts[other]


def diagnosed(program, tmp_path, *options, ranks=2):
    """A script of one's own under the doctor: exit code of rank 0 and all that was said, by one process per rank."""
    path = tmp_path / "script.py"
    path.write_text(program)
    command = [sys.executable, "-m", "gradcast", "doctor", *options, "-o", str(tmp_path / "run"), str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    return done.returncode, done.stderr


TRAINS = """
import os, sys, torch, torch.distributed as dist
for name, value in dict(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0").items():
    os.environ.setdefault(name, value)
dist.init_process_group("gloo")
ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
sgd = torch.optim.SGD(ddp.parameters(), lr=0.1)
for step in range(int(sys.argv[1]) if len(sys.argv) > 1 else 3):
    ddp(torch.ones(2, 4)).sum().backward()
    sgd.step()
"""


@pytest.mark.parametrize(
    ("program", "code", "words"),
    [
        ("print('nothing')", 0, "without a DistributedDataParallel module"),
        ("raise SystemExit(7)", 7, "without a DistributedDataParallel module"),
        ("import sys; sys.exit('too bad')", 1, "too bad"),
        ("def broken():\n    raise ValueError('mine')\nbroken()", 1, "ValueError: mine"),
        (TRAINS, 0, "there is one worker"),
        (TRAINS.replace("sgd.step()", "pass"), 0, "before an optimizer"),
    ],
)
def test_what_cannot_be_diagnosed_is_said_and_the_exit_code_stays(tmp_path, program, code, words):
    found, said = diagnosed(program, tmp_path)
    assert found == code
    assert words in said
    assert "defect of gradcast" not in said
    assert "no diagnosis" in said


def test_an_error_of_the_script_is_shown_from_its_own_first_line_on(tmp_path):
    _, said = diagnosed("def broken():\n    raise ValueError('mine')\nbroken()", tmp_path)
    assert "script.py" in said
    assert "runpy" not in said
    assert "diagnosis/script.py" not in said


def test_a_script_that_is_not_there():
    done = subprocess.run(
        [sys.executable, "-m", "gradcast", "doctor", "nowhere.py"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "there is no script nowhere.py" in done.stderr


def test_its_own_options_reach_the_script(tmp_path):
    path = tmp_path / "script.py"
    path.write_text("import sys; print(sys.argv[1:])")
    command = [sys.executable, "-m", "gradcast", "doctor", "--steps", "9", "-o", str(tmp_path / "run"), str(path)]
    arguments = ["--lr", "-1", "--steps=3", "--", "-5us"]
    done = subprocess.run([*command, *arguments], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(arguments)


def test_three_steps_are_too_few(tmp_path):
    path = tmp_path / "script.py"
    arguments = ["-m", "gradcast", "doctor", "-o", str(tmp_path / "run"), str(path)]
    # What a rank says is kept only when it fails, and rank 0 says it.
    path.write_text(TRAINS + "\nif dist.get_rank() == 0: raise SystemExit(3)")
    with pytest.raises(LabError, match=r"exit code 3(.|\n)*ended after [12] of the 25 steps"):
        run_workers(arguments, 2, timeout_s=TIMEOUT_S)


# --- From code ---


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
    return equal, hooks, None if result is None else {"parts": result["parts"], "step": result["step"]}


@pytest.mark.parametrize("accumulate", [False, True])
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
    """A buffer that forward replaces, dropout, outputs in a dictionary, and a head that may stay unused."""

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
    """Ten steps of one kind of loop: the final state, and what the doctor has said."""
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
    with around as outcome:
        for step in range(14):
            torch.manual_seed(100 * rank.index + step)
            train_step(case, rank, step, ddp, encoder, optimizers, scaler)
    said = None if outcome is None or outcome.result is None else outcome.result["steps"]
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


def test_where_parameters_stay_unused_there_is_no_diagnosis_and_training_goes_on(ranks, tmp_path):
    for equal, said in ranks.run(2, train_twice, "unused", str(tmp_path / "run"), timeout_s=TIMEOUT_S):
        assert equal
        assert said is None


def train_with_a_defect(rank, folder):
    from gradcast.diagnosis import findings, probes

    def breaks(*_):
        raise ZeroDivisionError("a defect")

    broken = findings if rank.index == 0 else probes
    name = "result" if rank.index == 0 else "no such thing"
    with mock.patch.object(broken, name, breaks, create=True):
        state, said = train_heads(rank, "plain", folder)
    reference, _ = train_heads(rank, "plain", None)
    return all(torch.equal(one, other) for one, other in zip(state, reference, strict=True)), said


def test_a_defect_of_the_doctor_does_not_end_a_training(ranks, tmp_path):
    for equal, said in ranks.run(2, train_with_a_defect, str(tmp_path / "run"), timeout_s=TIMEOUT_S):
        assert equal
        assert said is None


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
        ("steps", "at least 5 is expected"),
        ("hook", "leave it out for the diagnosis"),
    ],
)
def test_wrong_use_is_refused(ranks, case, words):
    for said in ranks.run(2, refused, case):
        assert words in said


# --- Its parts ---


def test_a_snapshot_gives_back_every_bit_and_the_same_objects():
    from gradcast.diagnosis.snapshot import Snapshot

    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    adam = torch.optim.AdamW(module.parameters(), lr=torch.tensor(0.1), amsgrad=True)
    seen = []
    adam.register_step_post_hook(lambda *_: seen.append(1))
    module(torch.randn(3, 4)).sum().backward()
    adam.step()

    def everything():
        states = [value.clone() for each in adam.state.values() for value in each.values()]
        tensors = [*(each.detach().clone() for each in [*module.parameters(), *module.buffers()]), *states]
        return [*tensors, torch.get_rng_state(), adam.param_groups[0]["lr"].clone()]

    held = [*adam.state.values()], [parameter.grad for parameter in module.parameters()]
    before = everything()
    snapshot = Snapshot(module, [adam])
    assert all(parameter.grad is None for parameter in module.parameters())
    for _ in range(3):
        adam.param_groups[0]["lr"].add_(0.5)
        adam.param_groups[0]["weight_decay"] = 7.0
        adam.zero_grad()
        module(torch.randn(3, 4)).sum().backward()
        adam.step()
    changed = everything()
    assert not any(torch.equal(one, other) for one, other in zip(before[:4], changed[:4], strict=True))
    assert seen == [1], "a user's hook has no part in steps that are not the user's"
    snapshot.restore()
    assert all(torch.equal(one, other) for one, other in zip(before, everything(), strict=True))
    assert adam.param_groups[0]["weight_decay"] != 7.0
    assert all(one is other for one, other in zip(held[0], adam.state.values(), strict=True))
    assert all(one is parameter.grad for one, parameter in zip(held[1], module.parameters(), strict=True))
    adam.step()
    assert seen == [1, 1]


def test_a_snapshot_keeps_learning_rates_at_zero_and_gradients_of_other_modules():
    from gradcast.diagnosis.snapshot import Snapshot

    module, head = nn.Linear(4, 4), nn.Linear(4, 1)
    sgd = torch.optim.SGD([*module.parameters(), *head.parameters()], lr=0.5, momentum=0.9)
    head(module(torch.randn(3, 4))).sum().backward()
    weight, gradient = head.weight.detach().clone(), head.weight.grad.clone()
    snapshot = Snapshot(module, [sgd])
    sgd.zero_grad()
    head(module(torch.randn(3, 4))).sum().backward()
    sgd.step()
    assert torch.equal(head.weight, weight), "it stands still"
    snapshot.restore()
    assert sgd.param_groups[0]["lr"] == 0.5
    assert torch.equal(head.weight.grad, gradient)


class Items(torch.utils.data.Dataset):
    def __init__(self, read_s, prepare_s):
        self.read_s, self.prepare_s = read_s, prepare_s

    def __len__(self):
        return 12

    def __getitem__(self, index):
        time.sleep(self.read_s)
        end = time.thread_time() + self.prepare_s
        while time.thread_time() < end:
            pass
        return torch.zeros(1)


@pytest.mark.parametrize("workers", [0, 2])
def test_reading_and_preparing_are_told_apart_in_a_loaders_workers(workers):
    from gradcast.diagnosis.loader import LoaderWatch

    watch = LoaderWatch()
    try:
        batches = list(torch.utils.data.DataLoader(Items(0.02, 0.005), batch_size=2, num_workers=workers))
    finally:
        watch.close()
    reading_ms, preparing_ms, count = watch.totals_ms()
    assert len(batches) == count == 6
    assert watch.workers == workers
    assert watch.waited_ns > 0
    # What was asked for, within what clocks say; more where the machine is busy.
    assert reading_ms >= 0.9 * 12 * 20
    assert preparing_ms >= 0.9 * 12 * 5
    assert reading_ms > preparing_ms
    before = watch.totals_ms()
    list(torch.utils.data.DataLoader(Items(0, 0), batch_size=2))
    assert watch.totals_ms() == before, "it looks no longer"


def test_a_tape_makes_the_gradients_that_the_step_made():
    from gradcast.diagnosis import tape
    from gradcast.diagnosis.loader import LoaderWatch
    from gradcast.diagnosis.observer import Observer

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)
            self.device, self.require_backward_grad_sync = torch.device("cpu"), True
            self.find_unused_parameters = self.static_graph = False
            self.__dict__["module"] = self

        def forward(self, value, *, scale):
            return {"a": self.one(value) * scale, "b": [self.two(value)], "unused": self.one(value)}

    net = Net()
    sgd = torch.optim.SGD(net.parameters(), lr=0.0)
    loader, ended = LoaderWatch(), []
    observer = Observer(net, [sgd], loader, lambda: ended.append(1))
    for _ in range(2):
        sgd.zero_grad()
        out = net(torch.randn(3, 4), scale=2.0)
        (out["a"].square().sum() + out["b"][0].sum()).backward()
        sgd.step()
    wanted = [parameter.grad.clone() for parameter in net.parameters()]
    observer.close()
    loader.close()
    (passes,) = observer.tapes[-1].by_backward
    sgd.zero_grad()
    list(tape.run_again(net, passes))
    assert all(torch.equal(one, p.grad) for one, p in zip(wanted, net.parameters(), strict=True))
    assert len(ended) == len(observer.steps) == 2
    for step in observer.steps:
        stages = sum(step[name] for name in ("loader", "forward", "backward", "update", "loop"))
        assert stages == pytest.approx(step["step"])


def attached_by_the_script(rank, folder):
    """As in a script that attaches gradcast, which runs with GRADCAST_DISABLE=1 under the doctor."""
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
