"""gradcast in place of torchft's DistributedDataParallel: the same bits, and replicas that are killed and come back."""

import importlib.util
import json
import os
import subprocess
import sys

import pytest

import gradcast
from conftest import ROOT

MODULE = "gradcast.frameworks.torchft"


def python_with_torchft():
    """This Python, or the one that GRADCAST_TORCHFT_PYTHON names, as `make test-all` does: torchft has its own
    environment there, see tools/torchft.txt.
    """
    named = os.environ.get("GRADCAST_TORCHFT_PYTHON")
    if named is None and importlib.util.find_spec("torchft") is None:
        pytest.skip("torchft is not installed; `make test-all` does that, see tools/torchft.txt")
    return named or sys.executable


def run(case, **job):
    """What tests/frameworks/torchft_cases.py prints."""
    command = [python_with_torchft(), "-m", "tests.frameworks.torchft_cases", case, json.dumps(job)]
    environment = os.environ | {"RUST_LOG": "error", "PYTHONPATH": os.pathsep.join([str(ROOT / "python"), str(ROOT)])}
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200)
    assert ended.returncode == 0, ended.stderr[-6000:]
    return json.loads(ended.stdout)


def parameters(records):
    return [each["parameters"] for each in records]


def test_without_torchft_the_sentence_names_the_extra(monkeypatch):
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    monkeypatch.setitem(sys.modules, "torchft", None)
    with pytest.raises(gradcast.Error, match=r"needs torchft \(.*\); pip install 'gradcast\[torchft\]'") as caught:
        importlib.import_module(MODULE)
    assert caught.value.code == "environment"


@pytest.mark.slow
@pytest.mark.parametrize("waits", [pytest.param(False, marks=pytest.mark.long), True])
def test_the_bits_are_those_of_torchfts_ddp(waits):
    """In the first step one of the replicas heals: it sends zeros, or the bits would differ. If torchft waits for the
    quorum before forward, it has healed by then."""
    ours, theirs = run("trained", waits=waits), run("trained", how="ddp", waits=waits)
    assert parameters(ours["0.0"]) == parameters(ours["1.0"]) == parameters(theirs["0.0"])
    assert ours["0.0"][-1]["workers"] == 2
    assert ours["0.0"][-1]["plan"] == ours["1.0"][-1]["plan"]


@pytest.mark.slow
def test_a_spare_sends_zeros():
    job = {"replicas": 3, "least": 3, "mode": "FIXED_WITH_SPARES"}
    ours, theirs = run("trained", **job), run("trained", how="ddp", **job)
    assert {(each["workers"], each["participants"]) for each in ours["2.0"] if "plan" in each} == {(3, 2)}
    assert parameters(ours["0.0"]) == parameters(ours["2.0"]) == parameters(theirs["0.0"])


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.long)])
def test_replicas_that_are_killed_cost_one_step_each(seed):
    ended = run("killed", replicas=3, pause_s=0.03, dies_after=8 + seed, seed=seed)
    committed = {}
    for name, records in ended.items():
        steps = [each["step"] for each in records if each["committed"]]
        assert steps == list(range(steps[0], steps[-1] + 1)), (name, steps)
        for each in records:
            if each["committed"]:
                committed.setdefault(each["step"], []).append(each)
    for step, records in committed.items():  # survivors and joiners alike
        assert len(set(parameters(records))) == 1, step
        assert len({each["plan"] for each in records if "plan" in each}) <= 1, step
    survivor = ended["2.0"]
    story = [(each["step"], each["committed"], each["participants"], round(each["ms"])) for each in survivor]
    assert sum(not each["committed"] for each in survivor) <= 2, story  # two were killed
    assert len(parameters(survivor)) == survivor[-1]["step"] + sum(not each["committed"] for each in survivor)
    assert survivor[-1]["participants"] == 3
    before = {each["workers"]: each["plan"] for each in ended["1.0"] if "plan" in each}
    for joiner in ("1.1", "0.1"):  # the plan of three replicas, from the first step with three on
        first = next(each for each in ended[joiner] if each.get("workers") == 3)
        assert first is ended[joiner][0]
        assert first["plan"] == before[3]


@pytest.mark.slow
def test_what_is_refused_and_one_replica_alone():
    ended = run("alone")
    for what, sentence in {
        "manager": "the manager is a object",
        "optimizer": "all gradients have to be there by then",
        "wire": "options.wire is 'bf16', and with torchft",
        "weight": "options.weight is 'samples', and with torchft",
        "clips": "options.clip clips inside step()",
        "disabled": "GRADCAST_DISABLE is set",
        "ddp": "the module holds a DistributedDataParallel",
        "inside ddp": "something else waits for the gradient of 0.weight",
        "twice": "gradcast is attached with this manager already",
        "no quorum": "no quorum was started for this step",
        "weighs": "with torchft each participant counts alike",
        "changed": "the module's parameters have changed since attach",
    }.items():
        assert sentence in ended["said"][what], what
    assert ended["trained"]  # as without gradcast
