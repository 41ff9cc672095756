"""Measures the cost of an all-reduce by its size. Collective."""

import statistics
import time
from typing import Any

import torch

from gradcast import _core
from gradcast.errors import Error, first_line
from gradcast.training.compat import extension
from gradcast.training.ranks.group import Group

_SIZES_BYTES = [1024 * 4**power for power in range(9)]  # 1 KiB to 64 MiB
# A line needs three sizes. The start-up of small operations also shows in larger ones.
_SIZE_COUNT_MIN = 4
_REPEATS = 5
_FIRST_CALLS = 1  # uncounted, because it opens connections and allocates


def samples(group: Group, seconds: float) -> list[tuple[int, float]]:
    """Returns bytes and ns of each operation, the same on every rank. Measures as large sizes as fit into ``seconds``.

    The time is the shortest one over the ranks, because the other ranks waited for the last one. Runs in CPU memory
    over ``group.own``.
    """
    found: list[tuple[int, float]] = []
    spent_s = 0.0
    for index, size in enumerate(_SIZES_BYTES):
        own_s = _times_s(group.own, size)
        times_s = [min(each) for each in zip(*group.gather(own_s), strict=True)]
        found += [(size, 1e9 * time_s) for time_s in times_s]
        # Every rank decides alike, because all know the same times.
        spent_s += sum(times_s) * (1 + _FIRST_CALLS / _REPEATS)
        next_s = (_REPEATS + _FIRST_CALLS) * 4 * statistics.median(times_s)
        if index + 1 >= _SIZE_COUNT_MIN and spent_s + next_s > seconds:
            break
    return found


def fitted(found: list[tuple[int, float]], world_size: int) -> dict[str, Any]:
    """Returns the key "network.collective" of doctor.json. A ring sends 2 (n - 1) / n of the bytes over each link."""
    fit = _core.fit_op_cost(found, max_pieces=1)
    piece = fit.cost.pieces[0]
    beta = piece.beta_ns_per_byte
    sizes = sorted({size for size, _ in found})
    return {
        "op": "all_reduce",
        "samples": [
            {"bytes": size, "ms": statistics.median(time for each, time in found if each == size) / 1e6}
            for size in sizes
        ],
        "alpha_us": piece.alpha_ns / 1e3,
        "beta_ns_per_byte": beta,
        "bus_gbit_per_s": 8 * 2 * (world_size - 1) / world_size / beta if beta > 0 else None,
        "fit_error": fit.relative_error_median,
    }


def _times_s(collective: Any, size_bytes: int) -> list[float]:
    tensor = torch.zeros(size_bytes // 4, dtype=torch.float32, device="cpu")
    c10d, times = extension.load(), []
    try:
        for _ in range(_FIRST_CALLS + _REPEATS):
            start = time.perf_counter()
            c10d.all_reduce(collective, tensor)
            times.append(time.perf_counter() - start)
    except RuntimeError as error:
        message = first_line(error)
        raise Error(f"network check: an all-reduce of {size_bytes} bytes failed: {message}", "communication") from None
    return times[_FIRST_CALLS:]
