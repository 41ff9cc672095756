"""Are the wire kernels as fast as the device's memory? What wire_benchmark measured, beside a copy of the same bytes.

Fails where a kernel has less than 85 % of the copy's bandwidth for blocks of 16 MiB and more.

    build-gpu/benchmarks/wire_benchmark --benchmark_out=bandwidth.json --benchmark_out_format=json
    python -m benchmarks.gpu_bandwidth bandwidth.json
"""

import argparse
import json
import sys
from pathlib import Path

from tabulate import tabulate

COPY = "device_copy"
LEAST_SHARE, FROM_BYTES = 0.85, 16 << 20


def measured(text: str) -> dict[str, dict[int, float]]:
    """Bytes per second by kernel and block size, of Google Benchmark's JSON. Raises ValueError for one that failed."""
    found: dict[str, dict[int, float]] = {}
    for each in json.loads(text).get("benchmarks", []):
        name, size = each["name"].removesuffix("/manual_time").rsplit("/", 1)
        if "bytes_per_second" not in each:
            raise ValueError(f"{each['name']} was not measured: {each.get('error_message', 'no reason is given')}")
        found.setdefault(name, {})[int(size)] = each["bytes_per_second"]
    return found


def table(found: dict[str, dict[int, float]]) -> tuple[str, bool]:
    """Shares of the copy's bandwidth, and whether all that count are large enough. Raises ValueError without any."""
    copies = found.get(COPY, {})
    sizes = [size for size in sorted(copies) if size >= FROM_BYTES]
    kernels = [name for name in found if name != COPY]
    if not sizes or not kernels:
        raise ValueError(f"a {COPY} of {FROM_BYTES >> 20} MiB or more, and kernels to compare with it, are expected")
    shares = {name: [found[name][size] / copies[size] for size in sizes] for name in kernels}
    rows = [[COPY, *(f"{copies[size] / 1e9:.0f} GB/s" for size in sizes)]]
    rows += [[name, *(f"{share:.0%}" for share in shares[name])] for name in kernels]
    text = tabulate(rows, ["", *(f"{size >> 20} MiB" for size in sizes)], tablefmt="github", disable_numparse=True)
    return text, all(share >= LEAST_SHARE for each in shares.values() for share in each)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", metavar="JSON")
    args = parser.parse_args()
    try:
        text, is_fast = table(measured(Path(args.results).read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        print(f"{args.results}: {error}", file=sys.stderr)
        return 1
    print(text)
    if not is_fast:
        print(f"a kernel has less than {LEAST_SHARE:.0%} of the copy's bandwidth", file=sys.stderr)
    return 0 if is_fast else 1


if __name__ == "__main__":
    sys.exit(main())
