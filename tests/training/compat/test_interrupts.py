"""Signal handlers that are delayed are called in the end, and all are put back."""

import contextlib
import os
import signal
import threading
import time

from gradcast.training.compat import interrupts

NUMBERS = (signal.SIGALRM, signal.SIGUSR1, signal.SIGUSR2)
INTERVAL_S, LIMIT_S = 5e-5, 0.5


class StopError(Exception):
    pass


def test_handlers_that_raise_at_any_moment_are_called_and_put_back():
    calls, sent, end_s = [], 0, time.monotonic() + LIMIT_S

    def stop(number, frame):
        calls.append(number)
        raise StopError

    before = [signal.signal(number, stop) for number in NUMBERS]
    try:
        while time.monotonic() < end_s:
            sent += 1
            with contextlib.suppress(StopError):
                signal.setitimer(signal.ITIMER_REAL, INTERVAL_S)
                for _ in range(50):
                    with interrupts.after_this():
                        pass
                while len(calls) < sent:
                    time.sleep(INTERVAL_S)
            assert len(calls) == sent
        with interrupts.after_this():
            pass
        assert [signal.getsignal(number) for number in NUMBERS] == [stop] * len(NUMBERS)
    finally:
        for number, handler in zip(NUMBERS, before, strict=True):
            signal.signal(number, handler)


def test_a_child_that_another_thread_forks_inside_a_block_is_not_delayed():
    before, codes = signal.signal(signal.SIGUSR1, lambda *_: os._exit(7)), []

    def fork():
        child = os.fork()
        if child == 0:
            signal.raise_signal(signal.SIGUSR1)
            os._exit(1)
        codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

    try:
        with interrupts.after_this():
            thread = threading.Thread(target=fork)
            thread.start()
            thread.join()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert codes == [7]
