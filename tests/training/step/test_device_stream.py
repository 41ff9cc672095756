"""Streams of a device whose kernels run after the host has gone on, on a device of the test's own: no GPU is needed."""

import subprocess
import sys
import time

import pytest

from training.compiled_check import load_check
from training.needs import torch  # noqa: F401

pytestmark = pytest.mark.slow

PATIENCE_S = 20


@pytest.fixture(scope="module")
def device(tmp_path_factory):
    """The module with such a device, which is torch's PrivateUse1 in this process."""
    return load_check("device_stream_check.cc", ["device_stream.cc"], tmp_path_factory.mktemp("device_stream"))


@pytest.fixture
def checked(device):
    checked = device.Checked()
    checked.expect([[(0, 100)], [(100, 200)], [(200, 300)]])
    yield checked
    checked.give_up()
    checked.close()


def becomes_true(condition):
    deadline_s = time.monotonic() + PATIENCE_S
    while not condition() and time.monotonic() < deadline_s:
        time.sleep(0.001)
    return condition()


def tells(checked, *expected):
    """And nothing else a moment later."""
    becomes_true(lambda: len(checked.told()) >= len(expected))
    time.sleep(0.02)
    return checked.told() == list(expected)


def ends(checked, name):
    """Once the waiting thread has put the operation's rest on its stream."""
    return becomes_true(lambda: checked.finish_end(name))


def queued(checked, *names):
    return becomes_true(lambda: checked.queued() == list(names))


def test_its_threads_do_not_take_memory_on_the_first_device(device, checked):
    before = device.calls_from_device_0()
    kernel = checked.write(0, 100)
    assert checked.start_elsewhere("a", [(0, 100)])
    checked.end("a", [(0, 100)])
    assert queued(checked, "a")
    checked.finish_write(kernel)
    assert ends(checked, "a")
    assert tells(checked, "a began", "a ended")
    assert device.calls_from_device_0() == before


def test_an_operation_whose_bytes_are_written_begins_where_it_is_started(checked):
    checked.finish_write(checked.write(0, 100))
    assert not checked.start("a", [(0, 100)])
    assert not checked.start("b", [(200, 300)]), "nobody writes there"
    checked.end("a")
    assert tells(checked)
    assert ends(checked, "a")
    assert tells(checked, "a ended")


def test_an_operation_begins_when_the_device_has_written_all_of_its_bytes(checked):
    first, second, other = checked.write(0, 50), checked.write(50, 100), checked.write(100, 200)
    assert checked.start("a", [(0, 100)])
    checked.end("a")
    checked.finish_write(first)
    assert ends(checked, "a")
    assert tells(checked)
    checked.finish_write(second)
    assert tells(checked, "a began", "a ended")
    assert checked.start("b", [(100, 200)])
    checked.finish_write(other)
    assert tells(checked, "a began", "a ended", "b began")


def test_the_end_of_one_does_not_wait_for_the_gradients_of_the_next(checked):
    first, second = checked.write(0, 100), checked.write(100, 200)
    assert checked.start("a", [(0, 100)])
    assert checked.start("b", [(100, 200)])
    checked.end("a")
    checked.finish_write(first)
    assert ends(checked, "a")
    assert tells(checked, "a began", "a ended")
    checked.end("b")
    checked.finish_write(second)
    assert ends(checked, "b")
    assert tells(checked, "a began", "a ended", "b began", "b ended")


STREAMS = 2000, 2001  # on which autograd runs


def test_a_block_costs_one_event_and_one_wait(device, checked):
    records, waits = device.records(), checked.waits()
    for lo in range(0, 200, 10):
        checked.write(lo, lo + 10)
    assert device.records() - records == 2
    for name, lo in (("a", 0), ("b", 100)):
        assert checked.start(name, [(lo, lo + 100)])
    assert checked.waits() - waits == 2


def test_blocks_that_share_a_gradient_share_its_event(device, checked):
    checked.expect([[(0, 30)], [(30, 60), (90, 100)], [(60, 90)]])
    records = device.records()
    kernel = checked.write(0, 100)
    assert device.records() - records == 1
    for name, block in (("a", [(0, 30)]), ("b", [(30, 60), (90, 100)]), ("c", [(60, 90)])):
        assert checked.start(name, block)
    checked.finish_write(kernel)
    assert tells(checked, "a began", "b began", "c began")


def test_a_block_waits_for_each_stream_that_has_written_to_it(device, checked):
    records, waits = device.records(), checked.waits()
    kernels = [(checked.write(lo, lo + 25, STREAMS[lo // 25 % 2]), STREAMS[lo // 25 % 2]) for lo in range(0, 100, 25)]
    assert checked.start("a", [(0, 100)])
    assert (device.records() - records, checked.waits() - waits) == (2 + 1, 2), "one more to watch the beginning"
    for kernel, stream in kernels:
        assert tells(checked)
        checked.finish_write(kernel, stream)
    assert tells(checked, "a began")


def test_a_block_does_not_wait_for_kernels_behind_its_last_gradient(checked):
    """Backward runs ahead while a block waits for room in flight."""
    first, second = checked.write(0, 50), checked.write(50, 100)
    checked.compute()
    checked.write(100, 200)
    assert checked.start("a", [(0, 100)])
    checked.finish_write(first)
    assert tells(checked)
    checked.finish_write(second)
    assert tells(checked, "a began")


def test_a_block_that_starts_before_all_is_written_waits_for_the_rest(checked):
    """Which the engine does not do: the event is recorded where the block starts then."""
    kernel = checked.write(0, 50)
    assert checked.start("a", [(0, 100)])
    checked.finish_write(kernel)
    assert tells(checked, "a began")


def test_bytes_that_are_no_block_are_refused(checked):
    for ranges in ([(250, 350)], [(300, 400)]):
        with pytest.raises(ValueError, match="no block of the plan"):
            checked.start("a", ranges)
    checked.expect([[(300, 400)]])
    assert not checked.start("a", [(300, 400)])
    with pytest.raises(ValueError, match="no block of the plan"):
        checked.start("b", [(0, 100)])


def test_a_poll_asks_the_first_open_event_of_each_stream(device, checked):
    """A stream passes them in order, and the waiting thread polls every 50 us."""
    blocks = [[(10 * number, 10 * number + 10)] for number in range(48)]
    checked.expect(blocks)
    for number, (ends,) in enumerate(blocks):
        checked.write(*ends)
        assert checked.start(f"block {number}", [ends])
        checked.end(f"block {number}")
    assert queued(checked, *(f"block {number}" for number in range(48)))
    since = device.queries()
    assert becomes_true(lambda: device.queries() > since + 300)
    assert device.asked_since(since) == 2


@pytest.fixture
def timed(device):
    timed = device.Checked(times=True)
    timed.expect([[(0, 100)], [(100, 200)], [(200, 300)]])
    yield timed
    timed.give_up()
    timed.close()


def test_operations_are_timed_by_the_devices_clock(device, timed):
    """Whenever the waiting thread looks, and whenever the host has started them."""
    device.set_clock(5)
    kernels = [timed.write(lo, lo + 100) for lo in (0, 100, 200)]
    for name, lo in (("a", 0), ("b", 100)):
        assert timed.start(name, [(lo, lo + 100)])
        timed.end(name, [(lo, lo + 100)])
    device.set_clock(100)
    timed.finish_write(kernels[0])
    timed.finish_write(kernels[1])
    for name, end_us in (("a", 120), ("b", 145)):
        device.set_clock(end_us)
        assert ends(timed, name)
    assert tells(timed, "a began", "b began", "a ended", "b ended") or timed.told()[-1] == "b ended"
    device.set_clock(200)
    timed.finish_write(kernels[2])
    device.set_clock(230)
    timed.start("c", [(200, 300)])
    timed.end("c", [(200, 300)])
    device.set_clock(260)
    assert ends(timed, "c")
    assert becomes_true(lambda: "c" in timed.durations())
    # a from its gradients on, b from the end of a on, c from its start on.
    assert timed.durations() == {"a": 20_000, "b": 25_000, "c": 30_000}


def test_what_is_given_up_has_no_time(timed):
    timed.write(0, 100)
    assert timed.start("a", [(0, 100)])
    timed.end("a")
    assert queued(timed, "a")
    timed.give_up()
    assert becomes_true(lambda: "a ended" in timed.told())
    assert timed.durations() == {}


def test_without_times_no_event_is_added(device, checked):
    kernel = checked.write(0, 100)
    checked.finish_write(kernel)
    records = device.records()
    assert not checked.start("a", [(0, 100)])
    checked.end("a", [(0, 100)])
    assert ends(checked, "a")
    assert tells(checked, "a ended")
    assert device.records() - records == 1, "the end"
    assert checked.durations() == {}


@pytest.mark.parametrize("has_high_priority", [True, False])
def test_its_stream_has_the_priority_that_is_asked_for(device, has_high_priority):
    before = len(device.priorities())
    device.Checked(has_high_priority=has_high_priority).close()
    assert device.priorities()[before:] == [has_high_priority, True], "the second one has ends alone"


def test_a_range_that_is_written_again_is_waited_for_again(checked):
    for turn in range(3):
        kernel = checked.write(0, 100)
        assert checked.start(f"step {turn}", [(0, 100)])
        checked.finish_write(kernel)
        checked.end(f"step {turn}")
        assert ends(checked, f"step {turn}")
        assert tells(checked, *(f"step {each} {what}" for each in range(turn + 1) for what in ("began", "ended")))


def test_what_cannot_be_put_on_the_device_ends_badly_and_the_next_one_well(checked):
    checked.end("a", fails=True)
    assert tells(checked, "a ended badly")
    checked.end("b")
    assert ends(checked, "b")
    assert tells(checked, "a ended badly", "b ended")


def test_what_is_given_up_is_waited_for_no_more(checked):
    checked.write(0, 100)
    assert checked.start("a", [(0, 100)])
    checked.end("a")
    assert tells(checked)
    checked.give_up()
    assert becomes_true(lambda: len(checked.told()) == 2)
    checked.close()
    checked.close()
    checked.end("b")
    assert tells(checked, "a began", "a ended")


STREAM = 1000  # of whoever uses what has arrived


def test_what_uses_the_bytes_of_an_operation_runs_behind_its_end(checked):
    checked.start("a", [(0, 100)])
    checked.end("a", [(0, 40), (60, 100)])
    assert queued(checked, "a")
    between, beyond = checked.use(STREAM, 40, 60), checked.use(STREAM, 100, 120)
    assert checked.could_run(STREAM, between)
    assert checked.could_run(STREAM, beyond)
    uses = [checked.use(STREAM + number, *range_) for number, range_ in enumerate([(0, 10), (90, 200), (30, 70)], 1)]
    assert not any(checked.could_run(STREAM + number, use) for number, use in enumerate(uses, 1))
    assert ends(checked, "a")
    assert all(checked.could_run(STREAM + number, use) for number, use in enumerate(uses, 1))


def test_it_does_not_wait_for_other_operations(checked):
    for name, start in (("a", 0), ("b", 100)):
        checked.start(name, [(start, start + 100)])
        checked.end(name, [(start, start + 100)])
    assert queued(checked, "a", "b")
    use = checked.use(STREAM, 0, 100)
    assert ends(checked, "a")
    assert checked.could_run(STREAM, use)
    late = checked.use(STREAM, 50, 150)
    assert not checked.could_run(STREAM, late)
    assert ends(checked, "b")
    assert checked.could_run(STREAM, late)


def test_all_that_one_operation_has_carried_costs_one_wait(checked):
    """A block carries many gradients, and each wait is a call of the device's."""
    checked.end("a", [(0, 100)])
    checked.end("b", [(100, 200)])
    assert queued(checked, "a", "b")
    parts = [(lo, lo + 10) for lo in range(0, 200, 10)]
    assert checked.use_all(STREAM + 4, [*parts, *reversed(parts)]) == 2
    assert ends(checked, "a")
    assert ends(checked, "b")


def test_of_operations_on_the_same_bytes_the_last_one_counts(checked):
    checked.end("a", [(0, 100)])
    assert ends(checked, "a")
    checked.end("b", [(40, 60)])  # another plan cuts elsewhere
    checked.end("c", [(50, 150)])
    assert queued(checked, "a", "b", "c")
    use = checked.use(STREAM, 45, 55)
    assert not checked.could_run(STREAM, use)
    assert ends(checked, "b")
    assert not checked.could_run(STREAM, use)
    assert ends(checked, "c")
    assert checked.could_run(STREAM, use)


def test_what_could_not_be_queued_is_not_called_so(checked):
    checked.end("a", [(0, 100)], fails=True)
    assert tells(checked, "a ended badly")
    assert checked.queued() == []
    assert checked.could_run(STREAM, checked.use(STREAM, 0, 100))


def test_no_memory_on_the_device_says_what_to_do(device):
    told = device.message_of_no_memory("CUDA out of memory. Tried to allocate 2.00 GiB.")
    assert told.startswith("the device has no memory left for a block on its way; make the batch smaller")
    assert "Tried to allocate 2.00 GiB" in told
    assert "\n" not in told


FAKE_DRIVER = r"""
#define _GNU_SOURCE
#include <pthread.h>
#include <stdio.h>

int cuThreadExchangeStreamCaptureMode(int* mode) {
  char name[16];
  pthread_getname_np(pthread_self(), name, sizeof name);
  printf("%s %d\n", name, *mode);
  fflush(stdout);
  *mode = 0;
  return 0;
}
"""

# The driver first: on a machine with a GPU, torch would load the real one.
STARTS_THREADS = """
import ctypes, importlib.util, sys
ctypes.CDLL(sys.argv[1])
import torch
spec = importlib.util.spec_from_file_location("device_stream_check", sys.argv[2])
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
checked = module.Checked()
checked.expect([[(0, 100)]])
checked.start_elsewhere("a", [(0, 100)])
checked.close()
"""


def test_its_threads_do_not_end_a_capture_of_the_program(device, tmp_path):
    """Each thread that works for the device takes itself out of other threads' captures: the waiting thread, and here
    two that have the program's name."""
    source, driver = tmp_path / "driver.c", tmp_path / "libcuda.so.1"
    source.write_text(FAKE_DRIVER)
    linked = ["-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", str(driver)]
    subprocess.run(["cc", str(source), *linked], check=True, timeout=60)
    command = [sys.executable, "-c", STARTS_THREADS, str(driver), device.__file__]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    told = sorted(line.rsplit(" ", 1) for line in ended.stdout.splitlines())
    thread_local = "1"
    assert [mode for _, mode in told] == [thread_local] * 3
    assert [name for name, _ in told].count("gradcast-wait") == 1
