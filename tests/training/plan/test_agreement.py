"""All ranks follow the same plan at the same step, and say what they follow."""

import json
from itertools import pairwise

import pytest

import gradcast
from gradcast.cli import main
from training.needs import torch
from training.ours import Ours

pytest.importorskip("training.needs")
from gradcast.training.step.gradient_buffers import REPORT_ELEMENTS

STATS = {
    "step", "mode", "world_size", "plan_version", "policy", "blocks", "bytes", "predicted_ms", "bound_ms",
    "measured_ms", "compute_ms", "exposed_ms", "update_calls", "gradient_buffer_bytes", "packed_bytes", "record_bytes",
}  # fmt: skip


def follow(rank, mode, warmup_steps, steps):
    """Rank r is slower the higher it is, so that the ranks measure different things and must agree."""
    ours = Ours("transformer", "sgd plain", rank.index, mode=mode, warmup_steps=warmup_steps, policy="p3")
    seen = []
    for number in range(steps):
        if rank.index:
            torch.randn(200 * rank.index, 200).matmul(torch.randn(200, 200))
        ours.step(number)
        followed = ours.followed[-1]
        blocks = [(block.op, block.buffer, block.ranges) for block in followed.blocks]
        seen.append((followed.plan_version, followed.policy, blocks, [place.name for place in followed.layout]))
    ours.handle.flush()
    profile = ours.handle.profile
    answer = {
        "seen": seen,
        "hash": ours.handle.plan.hash(profile),
        "profile": profile.to_json(),
        "stats": ours.handle.stats(),
        # Behind each gradient its mark, behind one of them the notes; all begin at multiples of 32 bytes.
        "parameter_bytes": sum(32 * -(4 * (p.numel() + 1) // -32) for p in ours.bare.parameters())
        + 4 * REPORT_ELEMENTS,
    }
    ours.handle.detach()
    return answer


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("mode", ["overlap", "hook"])
def test_all_ranks_follow_the_same_plan_at_the_same_step(ranks, mode, world_size):
    results = ranks.run(world_size, follow, mode, 4, 8)
    for result in results:
        assert result["seen"] == results[0]["seen"]
        assert result["hash"] == results[0]["hash"]
        assert result["profile"] == results[0]["profile"]
    policies = [policy for _, policy, _, _ in results[0]["seen"]]
    assert policies[4:] == ["p3"] * 4
    assert "p3" not in policies[:4]
    for result in results:
        check_stats(result["stats"], mode, world_size, result["parameter_bytes"])


def check_stats(stats, mode, world_size, parameter_bytes):
    assert set(stats) >= STATS
    assert (stats["step"], stats["mode"], stats["world_size"], stats["policy"]) == (8, mode, world_size, "p3")
    assert stats["bytes"] == stats["gradient_buffer_bytes"] == parameter_bytes
    assert stats["blocks"] >= 1
    assert stats["packed_bytes"] >= 0
    assert 0 < stats["bound_ms"] <= stats["predicted_ms"] * (1 + 1e-9)
    assert stats["measured_ms"] > 0
    assert 0 < stats["compute_ms"] <= stats["measured_ms"]
    assert 0 <= stats["exposed_ms"] <= stats["measured_ms"]
    # In hook mode the user's optimizer is the user's own business.
    assert stats["update_calls"] >= (1 if mode == "overlap" else 0)
    json.dumps(stats)


def record(rank, mode, steps, keep):
    ours = Ours("transformer", "sgd plain", rank.index, mode=mode, timeline_steps=keep, policy="fifo")
    ours.train(range(steps))
    ours.handle.flush()
    timeline = ours.handle.timeline()
    block_count = len(ours.handle.plan.blocks)
    size = ours.handle.stats()["record_bytes"]
    ours.handle.detach()
    return json.dumps(timeline), block_count, size


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


@pytest.mark.parametrize("mode", ["overlap", "hook"])
def test_the_timeline_is_a_bounded_chrome_trace(ranks, mode):
    short, long = ranks.run(2, record, mode, 8, 4), ranks.run(2, record, mode, 24, 4)
    for rank, (few, many) in enumerate(zip(short, long, strict=True)):
        for text, block_count, _ in (few, many):
            spans, blocks = check_events(json.loads(text), rank, 2)
            steps = {event["args"]["step"] for event in spans}
            assert 1 <= len(steps) <= 5
            assert {event["cat"] for event in spans} >= {"backward", "block"}
            full = [step for step in steps if sum(event["args"]["step"] == step for event in blocks) == block_count]
            assert len(full) >= 3
        assert many[2] <= 2 * few[2], "the record grows with the number of steps"


def save(rank, folder, mode):
    ours = Ours("transformer", "sgd plain", rank.index, mode=mode)
    ours.train(range(5))
    ours.handle.flush()
    for write, name in (
        (ours.handle.save_profile, "profile"), (ours.handle.save_plan, "plan"), (ours.handle.save_timeline, "timeline"),
    ):  # fmt: skip
        write(f"{folder}/{name}{rank.index}.json")
    ours.handle.detach()


@pytest.mark.parametrize("mode", ["overlap", "hook"])
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
