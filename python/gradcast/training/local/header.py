"""The header of each fragment: the number of steps that each rank has made, and a checksum of its global copy.

Every rank writes its own place and zeros elsewhere, so the sums are what each rank has written. Digits of seven bits
and their sums with zeros are exact in every wire format: bf16 has 8 bits of precision.
"""

from collections.abc import Sequence

import torch

from gradcast.errors import Error, refused

_DIGIT_BITS = 7
_STEP_DIGITS, _SUM_DIGITS = 5, 7  # of twice the number of steps and whether the round is being ended
DIGITS = _STEP_DIGITS + _SUM_DIGITS
# An odd number, so that each bit of the checksum changes the leading bits of the product (Knuth, "Sorting and
# Searching", 6.4: multiplicative hashing).
_MIXER = 0x1E3779B97F4A7C15


def write(header: torch.Tensor, rank: int, *, step: int, ending: bool, checksum: torch.Tensor) -> None:
    """``header``: DIGITS elements for each rank, 1-d. ``checksum``: an int64. On a device the host does not wait."""
    header.zero_()
    place = torch.full_like(checksum, 2 * step + ending)
    mixed = (checksum * _MIXER) >> (64 - _SUM_DIGITS * _DIGIT_BITS)
    digits = torch.cat([_digits(place, _STEP_DIGITS), _digits(mixed, _SUM_DIGITS)])
    header[rank * DIGITS : (rank + 1) * DIGITS] = digits


def check(header: torch.Tensor, fragment: int) -> None:
    """Raises Error on every rank unless all have sent the fragment after the same step and from the same global copy.
    On a device the host waits for the current stream. REQUIRES: it has arrived."""
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


def _digits(number: torch.Tensor, count: int) -> torch.Tensor:
    """The last digits, the lowest first."""
    shifts = torch.arange(0, count * _DIGIT_BITS, _DIGIT_BITS, device=number.device)
    return (number >> shifts) & ((1 << _DIGIT_BITS) - 1)


def _number(digits: Sequence[float]) -> int:
    return sum(round(digit) << position * _DIGIT_BITS for position, digit in enumerate(digits))
