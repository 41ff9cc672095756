"""How fast the kernels are that gradcast adds to a step on a GPU, beside a copy in the GPU's memory.

    python -m benchmarks.gpu_bandwidth [--mib 256]

Each moves bytes and computes next to nothing, so it should be about as fast as a copy. Fails where one has less than 40
% of a copy's rate. ``--device cpu`` shows that the rest works, and never fails.
"""

import argparse
import statistics
import sys
from collections.abc import Callable

import torch
from tabulate import tabulate

from benchmarks.gpu_ranks import device_of
from gradcast.training.measure.clocks import clock_of

_RATE_MIN = 0.4
_ROUNDS = 20
_RANKS = 4
_PIECES = 32


def kernels(count: int, device: torch.device) -> dict[str, tuple[Callable[[], object], int]]:
    """By name: what runs, and the bytes that it reads and writes. ``count``: fp32 numbers of gradients."""
    gradients, flat = torch.randn(count, device=device), torch.empty(count, device=device)
    pieces, places = gradients.chunk(_PIECES), flat.chunk(_PIECES)
    scale = torch.tensor(0.5)
    message, wire = torch.empty(count // 2, device=device), torch.empty(count, dtype=torch.bfloat16, device=device)
    received = wire.view(_RANKS, -1)
    size = count * 4
    return {
        "a copy": (lambda: flat.copy_(gradients), 2 * size),
        "a gradient is scaled into the buffer": (lambda: torch.mul(gradients, scale, out=flat), 2 * size),
        f"{_PIECES} gradients are scaled into it": (
            lambda: [torch.mul(each, scale, out=place) for each, place in zip(pieces, places, strict=True)],
            2 * size,
        ),
        "the norms of gradients": (lambda: torch._foreach_norm(pieces), size),
        "a block of several ranges is packed": (lambda: torch.cat(places[::2], out=message), size),
        "fp32 becomes bf16 for the wire": (lambda: wire.copy_(flat), size + size // 2),
        f"the parts of {_RANKS} ranks are summed": (
            lambda: received.sum(0, dtype=torch.float32).to(torch.bfloat16),
            size // 2 + size // _RANKS * 5 // 2,
        ),
        "bf16 becomes fp32": (lambda: flat.copy_(wire), size + size // 2),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--mib", type=int, default=256, help="of gradients (default: 256)")
    args = parser.parse_args()
    device = device_of(args.device)
    clock = clock_of(device)
    rates: dict[str, float] = {}
    for name, (run, size_bytes) in kernels(args.mib << 18, device).items():
        times_ns = []
        for _ in range(_ROUNDS):
            begin = clock.stamp()
            run()
            times_ns.append(clock.between(begin, clock.stamp()))
        rates[name] = size_bytes / statistics.median(times_ns)
    copy = rates["a copy"]
    rows = [[name, rate, rate / copy] for name, rate in rates.items()]
    print(tabulate(rows, [f"{args.mib} MiB of gradients", "GB/s", "of a copy's rate"], floatfmt=("", ".0f", ".2f")))
    slow = [name for name, rate in rates.items() if rate < _RATE_MIN * copy]
    if slow and device.type == "cuda":
        print(f"less than {_RATE_MIN:.0%} of a copy's rate: {', '.join(slow)}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
