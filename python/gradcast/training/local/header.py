"""What travels with each fragment: how many steps each rank has made, and a checksum of its global copy.

Every rank writes its own place and zeros elsewhere, so the sums are what each rank has written. Digits below 128 and
their sums with zeros are exact in every wire format: bf16 has 8 bits of precision.
"""

from collections.abc import Sequence

import torch

from gradcast.errors import Error, refused

_BASE = 128
_STEP_DIGITS, _SUM_DIGITS = 5, 7  # of twice the number of steps and whether the round is being ended
DIGITS = _STEP_DIGITS + _SUM_DIGITS
_SUM_LIMIT = _BASE**_SUM_DIGITS


def write(header: torch.Tensor, rank: int, *, step: int, ending: bool, checksum: int) -> None:
    """``header``: DIGITS elements for each rank, 1-d."""
    header.zero_()
    digits = [*_digits(2 * step + ending, _STEP_DIGITS), *_digits(checksum % _SUM_LIMIT, _SUM_DIGITS)]
    header[rank * DIGITS : (rank + 1) * DIGITS] = torch.tensor(digits, dtype=header.dtype)


def check(header: torch.Tensor, fragment: int) -> None:
    """Raises Error on every rank unless all have sent the fragment after the same step and from the same global copy.
    On a device the host waits for the header. REQUIRES: it has arrived."""
    rows = header.view(-1, DIGITS).tolist()
    steps = [_number(row[:_STEP_DIGITS]) for row in rows]
    for rank, other in enumerate(steps):
        if other != steps[0]:
            raise refused(
                f"the ranks' loops differ: rank 0 is {_place(steps[0])}, rank {rank} {_place(other)}; give all ranks "
                "the same number of optimizer steps, and let all call handle.end_round() after the last one"
            )
    sums = [_number(row[_STEP_DIGITS:]) for row in rows]
    for rank, other in enumerate(sums):
        if other != sums[0]:
            raise Error(
                f"the global copy of rank {rank} differs from rank 0's in fragment {fragment} {_place(steps[0])}: the "
                "network, memory or a library has damaged it; go on from the last checkpoint",
                "communication",
            )


def _place(number: int) -> str:
    step, ending = divmod(number, 2)
    return f"in handle.end_round() after {step} steps" if ending else f"after {step} steps"


def _digits(number: int, count: int) -> list[int]:
    return [number // _BASE**position % _BASE for position in range(count)]


def _number(digits: Sequence[float]) -> int:
    return sum(round(digit) * _BASE**position for position, digit in enumerate(digits))
