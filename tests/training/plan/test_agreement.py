"""All ranks follow the same plan at the same step, and say what they follow."""

import json
from itertools import pairwise

import pytest

import gradcast
from gradcast.cli import main
from training.attached import planning
from training.needs import torch
from training.pair import Training

pytest.importorskip("training.needs")
from gradcast.training.step.step_message import REPORT_ELEMENTS, SIGNATURE_ELEMENTS


def follow(rank, mode, steps):
    """Rank r is slower the higher it is, so that the ranks measure different things and must agree."""
    ours = Training(rank.index, "transformer", "sgd plain", mode=mode, plan=planning("p3", warmup_steps=4))
    seen = []

    def note(side):
        plan, names = side.handle.plan, [place.name for place in side.handle.layout]
        blocks = [(block.op, block.buffer, block.ranges) for block in plan.blocks]
        seen.append((side.handle.plan_version, plan.policy, blocks, names))

    for _ in range(steps):
        if rank.index:
            torch.randn(200 * rank.index, 200).matmul(torch.randn(200, 200))
        ours.step(between=note)
    ours.handle.flush()
    check_stats(ours, rank.size)
    profile = ours.handle.profile
    found = seen, ours.handle.plan.hash(profile), profile.to_json()
    ours.handle.detach()
    return found


@pytest.mark.parametrize("world_size", [2, 3])
def test_all_ranks_follow_the_same_plan_at_the_same_step(ranks, mode, world_size):
    results = ranks.run(world_size, follow, mode, 8)
    assert results == [results[0]] * world_size
    policies = [policy for _, policy, _, _ in results[0][0]]
    assert policies[4:] == ["p3"] * 4
    assert "p3" not in policies[:4]


def check_stats(ours, world_size):
    stats = ours.handle.stats()
    json.dumps(stats)
    known = ("step", "mode", "world_size", "policy")
    assert [stats[name] for name in known] == [8, ours.handle.mode, world_size, "p3"]
    # Gradients, and the step message with a flag for each; all begin at multiples of 32 bytes.
    counts = [p.numel() for p in ours.module.parameters()]
    total = sum(32 * -(4 * n // -32) for n in (*counts, len(counts) + SIGNATURE_ELEMENTS + REPORT_ELEMENTS))
    assert stats["bytes"] == stats["gradient_buffer_bytes"] == total
    assert stats["blocks"] >= 1
    assert min(stats["packed_bytes"], stats["record_bytes"], stats["plan_version"]) >= 0
    assert 0 < stats["bound_ms"] <= stats["predicted_ms"] * (1 + 1e-9)
    assert stats["compute_ms"] > 0
    assert 0 <= stats["exposed_ms"] <= stats["measured_ms"]
    # In hook mode the user's optimizer is the user's own business.
    assert stats["update_calls"] >= (1 if ours.handle.mode == "overlap" else 0)


def record(rank, mode, steps):
    watch = gradcast.Watch(timeline_steps=4)
    ours = Training(rank.index, "transformer", "sgd plain", mode=mode, policy="fifo", watch=watch)
    ours.train(steps)
    ours.handle.flush()
    timeline = json.loads(json.dumps(ours.handle.timeline()))
    spans, blocks = check_events(timeline, rank.index, rank.size)
    steps = {event["args"]["step"] for event in spans}
    assert 1 <= len(steps) <= 5
    assert {event["cat"] for event in spans} >= {"backward", "block"}
    block_count = len(ours.handle.plan.blocks)
    full = [step for step in steps if sum(event["args"]["step"] == step for event in blocks) == block_count]
    assert len(full) >= 3
    ours.handle.detach()
    return ours.handle.stats()["record_bytes"]


def test_the_timeline_is_a_bounded_chrome_trace(ranks, mode):
    for few, many in zip(ranks.run(2, record, mode, 8), ranks.run(2, record, mode, 24), strict=True):
        assert many <= 2 * few, "the record grows with the number of steps"


def check_events(timeline, rank, world_size):
    assert timeline["distributedInfo"] == {"rank": rank, "world_size": world_size}
    spans = [event for event in timeline["traceEvents"] if event["ph"] == "X"]
    for event in spans:
        assert set(event) >= {"ph", "ts", "dur", "pid", "tid", "cat", "name", "args"}
        assert event["dur"] >= 0
        assert event["pid"] == rank
        assert (event["tid"], event["cat"]) in {
            (1, "backward"), (1, "forward"), (1, "update"), (1, "wait"), (2, "block"),
        }  # fmt: skip
        assert isinstance(event["args"]["step"], int)
    blocks = sorted((event for event in spans if event["cat"] == "block"), key=lambda event: event["ts"])
    for event in blocks:
        assert set(event["args"]) >= {"block", "bytes", "tensors", "reason", "step", "ready_us"}
        assert event["args"]["ready_us"] <= event["ts"] + 1e-3
    # One block at a time: the next is launched once the last is finished.
    assert all(event["ts"] + event["dur"] <= after["ts"] + 1e-3 for event, after in pairwise(blocks))
    return spans, blocks


def save(rank, folder, mode):
    ours = Training(rank.index, "transformer", "sgd plain", mode=mode)
    ours.train(5)
    ours.handle.flush()
    for write, name in (
        (ours.handle.save_profile, "profile"), (ours.handle.save_plan, "plan"), (ours.handle.save_timeline, "timeline"),
    ):  # fmt: skip
        write(f"{folder}/{name}{rank.index}.json")
    ours.handle.detach()


def test_saved_files_are_what_the_commands_read(ranks, tmp_path, capsys, mode):
    ranks.run(2, save, str(tmp_path), mode)
    profile, plan = tmp_path / "profile0.json", tmp_path / "plan0.json"
    assert profile.read_text() == (tmp_path / "profile1.json").read_text()
    json.loads((tmp_path / "timeline1.json").read_text())
    assert main.main(["simulate", str(profile)]) == 0
    assert "forecast" in capsys.readouterr().out
    gradcast.Plan.from_json(plan.read_text()).check(gradcast.load_profile(str(profile)))
    pytest.importorskip("matplotlib", reason="gradcast dev plot needs matplotlib: pip install 'gradcast[plot]'")
    picture = tmp_path / "plan.png"
    assert main.main(["dev", "plot", str(plan), "--profile", str(profile), "-o", str(picture)]) == 0
    assert picture.stat().st_size > 1000
