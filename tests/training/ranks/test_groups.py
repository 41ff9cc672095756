"""Process groups: a forgotten one, one of other workers, one for other devices, and a part of the workers."""

import contextlib
import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest

import gradcast
from training.attached import Attached, attach, error_of, heard, hosts_of, not_refused
from training.inside import session_of
from training.models import TASKS
from training.needs import torch
from training.pair import differences
from training.pool import on_ranks

pytest.importorskip("training.needs")
import torch.testing._internal.distributed.fake_pg  # registers the group

from gradcast.host_traffic import Hosts
from gradcast.training import launch_order
from gradcast.training.acceptance import Accepted
from gradcast.training.compat import extension
from gradcast.training.local import session
from gradcast.training.ranks import group, group_pool, together
from gradcast.training.ranks.nccl_settings import options_with, settings_for, stream_settings

nn = torch.nn
dist = torch.distributed
TIMEOUT = timedelta(seconds=30)
BAD_NEWS = "NCCL error ... unhandled system error"


@pytest.mark.parametrize("has_priority", [True, False])
def test_blocks_on_our_stream_have_the_programs_priority(has_priority):
    backend = SimpleNamespace(options=SimpleNamespace(is_high_priority_stream=has_priority))
    on_ours = gradcast.Nccl(own_stream=True)
    assert stream_settings(backend, on_ours) == (True, has_priority, False)
    assert stream_settings(backend, gradcast.Nccl(event_times=True)) == (False, True, True)
    assert stream_settings(None, on_ours) == (True, False, False), "another backend has none"


@on_ranks(2)
def test_the_options_of_streams_arrive_at_the_transport(rank):
    made = extension.load().Transport
    with mock.patch.object(extension.load(), "Transport", side_effect=made) as transport:
        nccl = gradcast.Nccl(own_stream=True, event_times=True)
        attached = Attached(nn.Linear(2, 2), nccl=nccl)
    assert transport.call_args.args[-3:] == (True, False, True)
    attached.step(torch.ones(4, 2))
    attached.handle.detach()


@on_ranks(2)
def test_a_forgotten_process_group_is_named(rank):
    """The program forgot init_process_group, but it was started as one of several workers."""
    dist.destroy_process_group()
    with mock.patch.dict(os.environ, WORLD_SIZE="2"):
        return not_refused(lambda: gradcast.attach(nn.Linear(3, 3)), "init_process_group")


def gloo_threads():
    return sum("gloo" in each.read_text() for each in Path("/proc/self/task").glob("*/comm"))


@on_ranks(2)
def test_the_threads_of_destroyed_groups_end(rank):
    """A program that destroys its groups and makes new ones, as notebooks and tests do."""
    rounds, found = 6, []
    for number in range(rounds):
        dist.destroy_process_group()
        store = dist.PrefixStore(f"again {number}", rank.store)
        dist.init_process_group("gloo", store=store, rank=rank.index, world_size=2, timeout=TIMEOUT)
        group_pool.lasting_group([0, 1], TIMEOUT, "gloo", "test")
        found.append(gloo_threads())
    # Threads get their name when they run, and are listed for a while after they have ended.
    return None if 0 < found[-1] < found[0] + rounds else found


def open_sockets():
    found = 0
    for each in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # that of the listing itself
            found += os.readlink(each).startswith("socket:")
    return found


@on_ranks(2)
def test_what_carries_weights_keeps_no_connection_open(rank):
    """A replica that goes has to close its own."""
    numbers = extension.load().Numbers(2, torch.device("cpu"))
    part = dist.new_group([0, 1])
    numbers.begin(part, rank.index + 0.5)
    found, before = numbers.wait(), open_sockets()
    dist.destroy_process_group(part)
    del part
    deadline_s = time.monotonic() + 10
    while open_sockets() >= before and time.monotonic() < deadline_s:
        time.sleep(0.01)
    return [] if found == [0.5, 1.5] and open_sockets() < before else [found, before, open_sockets()]


@on_ranks(3)
def test_a_rank_outside_the_group_is_refused(rank):
    part = dist.new_group([0, 1])
    if rank.index == 2:
        return not_refused(lambda: gradcast.attach(nn.Linear(3, 3), process_group=part))
    return gradcast.attach(nn.Linear(3, 3), process_group=part).detach()


@on_ranks(2)
def test_a_group_without_a_backend_for_the_device_is_refused(rank):
    other = dist.new_group(backend="cuda:gloo")
    return not_refused(lambda: gradcast.attach(nn.Linear(3, 3), process_group=other), "cpu", "backend")


@on_ranks(3)
def test_a_part_of_the_workers_trains_together(rank):
    """Ranks 1 and 2 of three, in a group of their own, in which they are 0 and 1."""
    part = dist.new_group([1, 2])

    def program(side):
        module = TASKS["convnet"].module(seed=rank.index)
        adam = torch.optim.Adam(module.parameters(), lr=3e-3)
        called = side.called(module, adam, part)
        for number in range(6):
            adam.zero_grad()
            TASKS["convnet"].loss(called, TASKS["convnet"].batch(rank.index, number)).backward()
            adam.step()
        if side.handle is not None:
            assert (side.handle.rank, side.handle.world_size) == (rank.index - 1, 2)
        return module.state_dict() | side.result(module, adam)

    return [] if rank.index == 0 else differences(rank, program, "overlap")


@pytest.mark.skipif(not dist.is_nccl_available(), reason="this torch has no NCCL")
@on_ranks(2)
def test_blocks_go_before_compute_on_nccl(rank):
    """Without a device: what gradcast asks torch for, where the trainer's group has NCCL for one."""
    with (
        mock.patch.object(dist, "get_backend_config", return_value="cpu:gloo,cuda:nccl"),
        mock.patch.object(dist, "new_group", return_value=dist.group.WORLD) as new_group,
    ):
        group.make_group(None, torch.device("cpu"), 30.0, nccl=gradcast.Nccl(max_ctas=6))
        bounded = new_group.call_args.kwargs["pg_options"]
        group.make_group(None, torch.device("cpu"), 30.0)
    options = new_group.call_args.kwargs["pg_options"]
    assert new_group.call_args.kwargs["backend"] == "cpu:gloo,cuda:nccl"
    assert (options.is_high_priority_stream, options._timeout.total_seconds()) == (True, 30.0)
    assert (bounded.config.max_ctas, options.config.max_ctas) == (6, dist.ProcessGroupNCCL.Options().config.max_ctas)


@contextlib.contextmanager
def nccl_named():
    """As if the trainer's group had NCCL for devices. What gradcast's groups ask of it, as they are made."""
    asked, new_group = [], dist.new_group

    def without_nccl(ranks, *, backend, pg_options, **options):
        asked.append(pg_options)
        return new_group(ranks, backend="gloo", **options)

    with (
        mock.patch.object(dist, "get_backend_config", return_value="cpu:gloo,cuda:nccl"),
        mock.patch.object(dist, "new_group", without_nccl),
    ):
        yield asked


@pytest.mark.skipif(not dist.is_nccl_available(), reason="this torch has no NCCL")
@on_ranks(4)
def test_the_bound_on_thread_blocks_reaches_all_groups_of_blocks(rank):
    """Without a device; also the group inside of a host."""
    module = nn.Linear(3, 3)
    sgd = torch.optim.SGD(module.parameters(), lr=0.1)
    nccl = gradcast.Nccl(max_ctas=5)
    local = gradcast.Options(local=gradcast.LocalSteps(2, inner="host"), nccl=nccl)
    with nccl_named() as asked:
        attach(module, sgd, nccl=nccl).detach()
        with hosts_of(2):
            gradcast.attach(module, sgd, options=local).detach()
    found = [(each.config.max_ctas, each.is_high_priority_stream) for each in asked]
    return [] if found == [(5, True)] * 2 else found


def nccl_of(**settings):
    """The program's backend for a device, with these settings of NCCL's configuration."""
    options = dist.ProcessGroupNCCL.Options()
    for name, value in settings.items():
        setattr(options.config, name, value)
    return SimpleNamespace(options=options)


THEIRS = {"traffic_class": 3, "net_name": "IB", "min_ctas": 8, "max_ctas": 16, "cta_policy": 1, "split_share": 1}


@pytest.mark.skipif(not dist.is_nccl_available(), reason="this torch has no NCCL")
@pytest.mark.parametrize(
    ("nccl", "expected"),
    [
        ({}, {}),
        ({"max_ctas": 4}, {"max_ctas": 4, "min_ctas": 4}),  # NCCL refuses a minimum above the maximum
        ({"max_ctas": 12, "cta_policy": "default"}, {"max_ctas": 12, "cta_policy": 0}),
    ],
)
def test_a_group_of_blocks_has_the_settings_of_the_programs_group(nccl, expected):
    """Unless the options say otherwise. Without them it would send in another traffic class than the cluster's."""
    settings = settings_for(nccl_of(**THEIRS), gradcast.Nccl(**nccl))
    config = options_with(settings, None).config
    found = {name: getattr(config, name) for name in THEIRS}
    not_theirs = {"split_share": dist.ProcessGroupNCCL.Options().config.split_share}  # how the program's group was made
    assert found == THEIRS | not_theirs | expected


@pytest.mark.skipif(not dist.is_nccl_available(), reason="this torch has no NCCL")
def test_what_the_program_has_not_set_is_left_to_nccl():
    assert settings_for(nccl_of(), gradcast.Nccl()) == ()
    assert settings_for(SimpleNamespace(), gradcast.Nccl()) == (), "the program's backend is another"


@pytest.mark.skipif(not dist.is_nccl_available(), reason="this torch has no NCCL")
def test_a_policy_that_torch_does_not_know_is_refused():
    options = SimpleNamespace(config=SimpleNamespace(max_ctas=-1))
    with mock.patch.object(dist, "ProcessGroupNCCL", SimpleNamespace(Options=lambda: options)):
        assert settings_for(SimpleNamespace(), gradcast.Nccl(max_ctas=2)) == (("max_ctas", 2),)
        refusal = error_of(lambda: settings_for(SimpleNamespace(), gradcast.Nccl(cta_policy="zero")))
    assert refusal[0] == "invalid_use"
    assert refusal[1].startswith("options.nccl.cta_policy is 'zero', which torch ")


@pytest.mark.skipif(not dist.is_nccl_available(), reason="this torch has no NCCL")
@on_ranks(4)
def test_the_settings_of_the_programs_group_reach_all_groups_of_blocks(rank):
    """Without a device. A group with other settings is not used again."""
    module = nn.Linear(3, 3)
    sgd = torch.optim.SGD(module.parameters(), lr=0.1)
    local = gradcast.Options(local=gradcast.LocalSteps(2, inner="host"))
    with nccl_named() as asked:
        for traffic_class in (2, 2, 7):
            with mock.patch.object(group, "_backend", return_value=nccl_of(traffic_class=traffic_class)):
                attach(module, sgd).detach()
        with mock.patch.object(group, "_backend", return_value=nccl_of(traffic_class=5)), hosts_of(2):
            gradcast.attach(module, sgd, options=local).detach()
    return [] if [each.config.traffic_class for each in asked] == [2, 7, 5, 5] else [len(asked)]


@on_ranks(4)
def test_the_group_inside_of_a_host_is_connected_too(rank):
    """Without a device."""
    made = group.make_group(None, torch.device("cpu"), 30.0)
    made.hosts = Hosts((0, 0, 1, 1))
    device = torch.device("cuda", 0)
    with (
        mock.patch.object(session, "HiddenDdp") as hidden,
        mock.patch.object(group.Group, "backend", "nccl"),
        mock.patch.object(together, "on_device", contextlib.nullcontext),
        mock.patch.object(group, "_has_room", return_value=True),
        mock.patch.object(extension.load(), "connect") as connect,
    ):
        session.inside_hosts(mock.Mock(device=device), made)
    inside = hidden.call_args.args[1]
    assert inside.size() == 2
    assert connect.mock_calls == [mock.call(inside, device, *each) for each in group.DDP_MESSAGES]


@on_ranks(2)
def test_torch_finds_nothing_to_warn_of_where_a_group_is_destroyed(rank):
    """Where the program has registered a backend of its own, as some parts of torch do."""
    with mock.patch.dict(dist.Backend._plugins, {"other": None}):
        made = group.make_group(None, torch.device("cpu"), 30.0)
    return [] if made.own.name() == "gloo" else [made.own.name()]


@on_ranks(2)
def test_options_for_nccl_are_ignored_with_a_sentence_elsewhere(rank):
    with heard() as lines:
        attach(nn.Linear(3, 3), None, "hook", nccl=gradcast.Nccl(4, "zero", register_buffers=True)).detach()
    why = "is for blocks over NCCL, and blocks are sent over gloo, so it changes nothing"
    told = [f"options.nccl.{name} {why}" for name in ("max_ctas", "cta_policy", "register_buffers")]
    assert [each for each in lines if "NCCL" in each] == (told if rank.index == 0 else [])


@contextlib.contextmanager
def as_on_a_device(connect):
    """As if the module were on a device, and the program's group had NCCL for it. ``connect``: the extension's."""
    module_of_attach = sys.modules["gradcast.training.attach"]

    with (
        mock.patch.object(Accepted, "device", torch.device("cuda", 1)),
        mock.patch.object(module_of_attach, "backend_of", return_value="nccl"),
        mock.patch.object(module_of_attach, "require_backend"),
        mock.patch.object(launch_order, "backend_of", return_value="nccl"),
        mock.patch.object(group.Group, "backend", "nccl"),
        mock.patch.object(group, "_timeout_of", return_value=TIMEOUT),
        mock.patch.object(group, "_has_room", return_value=True),
        mock.patch.object(together, "on_device", contextlib.nullcontext),
        mock.patch.object(extension.load(), "connect", connect),
    ):
        yield


OPS = "all_reduce", "reduce_scatter", "all_gather"
NUMBER = group.Message("all_reduce", torch.float32, 4)


@pytest.mark.parametrize("fails_for", [None, torch.float16])
@on_ranks(2)
def test_devices_are_connected_when_gradcast_is_attached(rank, fails_for):
    """Not in the first backward pass: what NCCL refuses is heard at once. First for one number, then for the blocks of
    the warm-up, with ``fails_for`` on the wire. Without a device: what attach calls where the module is on one."""
    calls = []

    def connect(process_group, device, *what):
        assert process_group is not dist.group.WORLD
        assert device == torch.device("cuda", 1)
        calls.append(group.Message(*what))
        if calls[-1].wire == fails_for:
            raise dist.DistBackendError(BAD_NEWS)

    words = "connecting the ranks' devices failed on rank"
    with as_on_a_device(connect):
        found = not_refused(lambda: attach(nn.Linear(3, 3), None, "hook", wire="fp16"), words, code="communication")
    assert calls[0] == NUMBER
    assert (len(calls), calls[-1].wire) == (1 if fails_for is None else 2, fails_for)
    return found


@on_ranks(2)
def test_what_a_plan_sends_is_connected_before_it_is_followed(rank, mode):
    """The plans of the warm-up, those that are measured, and the baseline; nothing that only other plans would use."""
    connected, early = [], []
    native = mock.patch.object(
        extension.load(), "connect", lambda _g, _d, *what: connected.append(group.Message(*what))
    )
    with native, mock.patch.object(group.Group, "backend", "nccl"):
        attached = Attached(nn.Sequential(*[nn.Linear(64, 64) for _ in range(6)]), mode)
        exchange = session_of(attached.handle).exchange
        assert "all_reduce" in {each.op for each in connected[1:]}, "those of the warm-up, in attach"
        follow = exchange.follow

        def following(profile, plan):
            kinds = {each.kind for each in connected}
            early.extend(each for each in exchange.buffers.messages(plan.blocks) if each.kind not in kinds)
            follow(profile, plan)

        exchange.follow = following
        for _ in range(8):
            attached.step(torch.ones(4, 64))
        attached.handle.flush()
        assert attached.handle.plan_version > 0
    assert {each.op for each in connected} == {"all_reduce"}
    return early


@on_ranks(2)
def test_of_each_kind_of_message_the_largest_connects_once(rank):
    made = group.make_group(None, torch.device("cpu"), 30.0)
    sizes = {"block of GPT-2": 154 << 20, "alike": 150 << 20, "small": 1 << 20}
    large, alike, small = (group.Message("all_reduce", torch.float32, size) for size in sizes.values())
    double = small._replace(dtype=torch.float64)
    calls = []
    native = mock.patch.object(extension.load(), "connect", lambda _group, _device, *what: calls.append(what))
    with native, mock.patch.object(group, "_has_room", lambda size, _: rank.index == 0 or size < 400 << 20):
        made.connect([large, small])
        assert calls == [], "over Gloo"
        with mock.patch.object(group.Group, "backend", "nccl"), heard() as lines:
            made.connect([alike, large, small, double, small])
            made.connect([alike, small])
            made.connect([large._replace(size_bytes=300 << 20)])
    assert calls == [small, double, large]
    told = "a device has no memory to connect for blocks of up to 314.6 MB beforehand"
    assert [told in each for each in lines] == [True] * (rank.index == 0)


def operations_of(call):
    """Those on process groups, with the elements of what they write."""
    with torch.profiler.profile(record_shapes=True) as profile:
        call()
    events = [each for each in profile.events() if each.name.startswith("c10d::")]
    return [(each.name, *(each.input_shapes[0] or ())) for each in events]


@on_ranks(3)
def test_a_message_that_connects_is_sent_as_a_block_is(rank):
    """Over a group that sends nothing."""
    fake, device = dist.new_group(backend="fake"), torch.device("cpu")
    connect, mib = extension.load().connect, 1 << 20
    found = [
        operations_of(lambda op=op, wire=wire: connect(fake, device, op, torch.float32, mib, wire))
        for op, wire in [*((op, None) for op in OPS), ("all_reduce", torch.bfloat16)]
    ]
    whole, part = 262146, 87382  # elements, padded
    assert found == [
        [("c10d::allreduce_",)],
        [("c10d::_reduce_scatter_base_", part)],
        [("c10d::_allgather_base_", whole)],
        [("c10d::alltoall_base_", whole), ("c10d::_allgather_base_", whole)],
    ]


@on_ranks(3)
def test_a_group_of_a_part_of_the_workers_waits_for_no_others(rank):
    """init_process_group(device_id=...): torch would split a new group off, and wait for the ranks outside of it."""
    everybody, part = dist.group.WORLD, dist.new_group([0, 1])
    bound = torch.device("cuda", rank.index)
    seen = []

    def new_group(**_):
        seen.append(everybody.bound_device_id)
        return part

    if rank.index == 2:
        with group.callers_of(None).together("making a group of all workers, as the others do"):
            return
    everybody.bound_device_id = bound
    try:
        with mock.patch.object(dist, "new_group", new_group):
            group.make_group(part, torch.device("cpu"), None)
            assert everybody.bound_device_id == bound
            group.make_group(None, torch.device("cpu"), None)
    finally:
        everybody.bound_device_id = None
    assert seen == [None, bound]


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (
            "NCCL error ... Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 1000",
            "invalid_use",
            "use the same GPU, which NCCL refuses; give each rank a GPU of its own, with torch.cuda.set_device(",
        ),
        (
            "Last error: Multiple Ranks are using the same GPU/Partition. Set NCCL_MULTI_RANK_GPU_ENABLE=1 to enable",
            "invalid_use",
            "use the same GPU, which NCCL refuses",
        ),
        (BAD_NEWS, "communication", "comparing the ranks' calls of attach (each rank has to make one) failed on rank"),
    ],
)
@on_ranks(2)
def test_what_nccl_refuses_is_told_in_a_sentence(rank, words, code, told):
    """Where the first operation of the trainer's group fails."""
    with mock.patch.object(extension.load(), "gather", side_effect=dist.DistBackendError(words)):
        return not_refused(lambda: gradcast.attach(nn.Linear(3, 3)), told, code=code)


@on_ranks(2)
def test_a_device_that_has_failed_tells_of_it_through_the_store(rank):
    made = group.make_group(None, torch.device("cpu"), 30.0)

    def compute():
        return [3][rank.index]  # IndexError on rank 1

    with (
        mock.patch.object(together, "device_of_messages", return_value=torch.device("meta")),
        mock.patch.object(together, "gather", side_effect=AssertionError("over the device")),
    ):
        words = "counting failed on rank 1 of 2: IndexError: list index out of range"
        found = not_refused(lambda: made.computed_by_each(compute, "counting"), words, code="communication")
    found += [] if made.computed_by_each(lambda: rank.index, "counting") == [0, 1] else ["not every rank's value"]
    made.leave(reusable=False)
    return found
