"""What delays signal handlers loses none of them."""

import signal
import time

import pytest

from gradcast.training.compat import interrupts

NUMBERS = (signal.SIGALRM, signal.SIGUSR1, signal.SIGUSR2)
INTERVAL_S, LIMIT_S = 5e-5, 0.5


class StopError(Exception):
    pass


def stop(number, frame):
    raise StopError


def test_handlers_that_raise_at_any_moment_are_called_and_put_back():
    before = [signal.signal(number, stop) for number in NUMBERS]
    caught, end_s = 0, time.monotonic() + LIMIT_S
    try:
        while time.monotonic() < end_s:
            try:
                signal.setitimer(signal.ITIMER_REAL, INTERVAL_S)
                for _ in range(50):
                    with interrupts.after_this():
                        pass
                time.sleep(10 * INTERVAL_S)
            except StopError:
                caught += 1
            else:
                pytest.fail("a signal was lost")
        with interrupts.after_this():
            pass
        assert [signal.getsignal(number) for number in NUMBERS] == [stop] * len(NUMBERS)
    finally:
        for number, handler in zip(NUMBERS, before, strict=True):
            signal.signal(number, handler)
    assert caught > 0
