"""The engine and the in-process transport as Python sees them; what they do inside is tested in tests/engine."""

import gc
import subprocess
import sys
import time
from array import array
from concurrent.futures import ThreadPoolExecutor

import pytest

import _testing
import gradcast
from conftest import ROOT
from gradcast import _core

PATIENCE_NS = 20_000_000_000
HOUR_NS = 3_600_000_000_000
ELEMENTS = 8


def follow_block_per_tensor(engine, kind="f"):
    """Three tensors, the last one first, as backward makes them."""
    size = ELEMENTS * array(kind).itemsize
    tensors = [
        gradcast.Tensor(name=f"t{i}", bytes=size, element_bytes=array(kind).itemsize, ready_ns=0, need_ns=0)
        for i in range(3)
    ]
    profile = gradcast.Profile(name="floats", forward_ns=0, backward_ns=0, tensors=tensors)
    blocks = [gradcast.Block(ranges=[(i * size, (i + 1) * size)]) for i in (2, 1, 0)]
    engine.follow(profile, gradcast.Plan(blocks=blocks))


def give_all(engine):
    engine.begin()
    for tensor in (2, 1, 0):
        engine.on_ready(tensor)


class Ranks:
    """Engines of several ranks over one buffer each, filled with the rank's number plus one."""

    def __init__(self, world_size, kind="f"):
        self.world = _testing.InprocWorld(world_size)
        self.buffers = [array(kind, [rank + 1] * 3 * ELEMENTS) for rank in range(world_size)]
        self.engines = [_core.Engine(self.world.transport(rank, [self.buffers[rank]])) for rank in range(world_size)]
        for engine in self.engines:
            follow_block_per_tensor(engine, kind)

    def give_all(self, rank):
        give_all(self.engines[rank])


@pytest.mark.parametrize("kind", ["f", "d"])
def test_ranks_as_threads_sum_their_gradients(kind):
    ranks = Ranks(3, kind=kind)

    def run(rank):
        engine = ranks.engines[rank]
        for iteration in range(20):
            ranks.buffers[rank][:] = array(kind, [rank + iteration] * len(ranks.buffers[rank]))
            ranks.give_all(rank)
            assert engine.wait([0, 2], PATIENCE_NS)
            assert engine.wait_all()
            assert list(ranks.buffers[rank]) == [3 + 3 * iteration] * (3 * ELEMENTS)
            assert engine.arrivals() == [2, 1, 0]
            assert engine.arrivals(1) == [1, 0]
            assert not engine.busy

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(run, range(3)))
    counters = ranks.engines[0].counters()
    assert (counters.iterations, counters.blocks) == (20, 60)
    assert counters.bytes == 20 * 3 * ELEMENTS * array(kind).itemsize
    timeline = ranks.engines[0].timeline()
    assert [record.iteration for record in timeline] == list(range(4, 20))
    for record in timeline:
        assert record.plan_version == 1
        for block, ready_ns in zip(record.blocks, reversed(record.ready_ns), strict=True):
            assert 0 < ready_ns == block.ready_ns <= block.launch_ns <= block.finish_ns
    assert repr(timeline[0].blocks[0]).startswith("BlockRecord(ready_ns=")


def test_the_clock_is_that_of_perf_counter():
    before_ns = time.perf_counter_ns()
    now_ns = _core.Engine.now_ns()
    assert before_ns <= now_ns <= time.perf_counter_ns()


def test_other_threads_run_while_one_waits():
    """Were the GIL held, the gradients would come only after the waiting is over."""
    ranks = Ranks(2)
    ranks.give_all(0)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(ranks.engines[0].wait_all, PATIENCE_NS)
        ranks.give_all(1)
        assert waiting.result()


def test_a_plain_capsule_serves_as_a_transport_and_keeps_what_it_points_to():
    world = _testing.InprocWorld(1)
    engine = _core.Engine(world.transport(0, [array("f", [1.0] * 3 * ELEMENTS)]).capsule)
    del world
    gc.collect()
    follow_block_per_tensor(engine)
    give_all(engine)
    assert engine.wait_all(PATIENCE_NS)


@pytest.mark.parametrize("transport", [None, 3, "gradcast.Transport.1", object(), time.__dict__])
def test_what_is_no_transport_is_refused(transport):
    with pytest.raises(gradcast.Error, match="give a transport of this version") as caught:
        _core.Engine(transport)
    assert caught.value.code == "invalid_option"
    with pytest.raises(gradcast.Error, match="give a transport of this version"):
        _testing.TransportDriver(transport)


def test_wrong_use_is_refused():
    ranks = Ranks(1)
    engine = ranks.engines[0]
    for call in (lambda: engine.on_ready(0), engine.arrivals, engine.wait_all):
        with pytest.raises(gradcast.Error, match="call begin first") as caught:
            call()
        assert caught.value.code == "invalid_use"
    assert engine.begin() == 0
    assert engine.busy
    assert engine.waiting_for() == "block 1 of 3 (t2, 32 B) waits for the gradient of t2"
    assert not engine.wait([1], 0)
    assert not engine.wait_all(1_000_000)
    for option in ("timeline_iterations", "queue_window"):
        with pytest.raises(gradcast.Error, match=f"{option} is 0"):
            _core.Engine(_testing.InprocWorld(1).transport(0, []), **{option: 0})
    engine.shutdown()
    engine.shutdown()
    with pytest.raises(gradcast.Error, match="has been shut down"):
        engine.begin()
    assert len(engine.timeline()) == 1


def test_a_failure_raises_with_the_code_of_the_network():
    ranks = Ranks(1)
    ranks.world.fail(0, 1, "the cable is cut")
    ranks.give_all(0)
    with pytest.raises(gradcast.Error) as caught:
        ranks.engines[0].wait_all(PATIENCE_NS)
    assert caught.value.code == "communication"
    assert str(caught.value) == "block 2 of 3 (t1, 32 B) failed on rank 0 of 1: the cable is cut"


def test_an_engine_goes_in_the_middle_of_its_work():
    ranks = Ranks(2)
    ranks.world.delay(1, 0, HOUR_NS)
    ranks.give_all(0)
    ranks.give_all(1)
    while "on the network" not in ranks.engines[1].waiting_for():
        time.sleep(0.001)
    del ranks.engines[1]
    gc.collect()
    with pytest.raises(gradcast.Error, match="rank 1 has left: the engine was shut down"):
        ranks.engines[0].wait_all(PATIENCE_NS)


def test_a_program_may_end_with_everything_in_flight():
    code = """if True:
        from array import array
        import _testing
        import gradcast
        from gradcast import _core
        world = _testing.InprocWorld(2)
        engine = _core.Engine(world.transport(0, [array("f", [1.0] * 8)]))
        tensor = gradcast.Tensor(name="t", bytes=32, ready_ns=0, need_ns=0)
        profile = gradcast.Profile(name="p", forward_ns=0, backward_ns=0, tensors=[tensor])
        engine.follow(profile, gradcast.Plan(blocks=[gradcast.Block(ranges=[(0, 32)])]))
        engine.begin()
        engine.on_ready(0)
        engine.wait_all(50_000_000)
        print(engine.waiting_for().split("(")[0])
    """
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT / "tests", capture_output=True, text=True, timeout=60
    )
    assert (result.returncode, result.stdout, result.stderr) == (0, "block 1 of 1 \n", "")


def test_a_driver_refuses_what_it_cannot_start_and_ends_what_it_has():
    """What a driver is for stands in tests/transport/transport_conformance.py."""
    driver = _testing.TransportDriver(_testing.InprocWorld(2).transport(0, [array("f", [1.0] * 4)]))
    with pytest.raises(gradcast.Error, match="broadcast"):
        driver.start(0, [(0, 4)], op="broadcast")
    driver.start(0, [(0, 4)])
    with pytest.raises(gradcast.Error, match="ticket 0 was started already"):
        driver.start(0, [(0, 4)])
    driver.close()
    driver.close()
    assert driver.wait(0, PATIENCE_NS) == "the driver was closed"
    with pytest.raises(gradcast.Error, match="the driver is closed"):
        driver.start(3, [(0, 4)])
    # The longest wait is not over at once.
    world = _testing.InprocWorld(2)
    first, second = (_testing.TransportDriver(world.transport(rank, [array("f", [1.0])])) for rank in range(2))
    first.start(0, [(0, 4)])
    with ThreadPoolExecutor() as threads:
        waiting = threads.submit(first.wait, 0, 2**63 - 1)
        time.sleep(0.01)
        second.start(0, [(0, 4)])
        assert waiting.result() == ""
    # One that is forgotten ends by itself, also with an operation in flight.
    forgotten = _testing.TransportDriver(_testing.InprocWorld(2).transport(0, [array("f", [1.0])]))
    forgotten.start(0, [(0, 4)])
    del forgotten
    gc.collect()
