"""Every policy on the bundled profiles over a grid of networks: the tables of benchmarks/results/tables.md.

Times are predictions of ``play``; a cell is the iteration time over the bound of the policy's own kinds of operation,
and in brackets over the plain bound. Run: python -m benchmarks.policy_tables [--refresh benchmarks/results/tables.md]
"""

from tabulate import tabulate

from benchmarks.pages import parser_of, show
from gradcast import _core
from gradcast.comparison.compare import Comparison, compare
from gradcast.files import load_profile

PROFILES = ("resnet50", "vgg16")
# The published layer times are those of batch 128 on a V100; half of them stand for batch 64.
SCALE = 0.5
BANDWIDTHS_GBIT_PER_S = (1, 3, 10, 25)
WORKERS = (2, 8, 64)
HOP_LATENCY_NS = 50e3
MARK = "policy tables"


def ring(gbit_per_s: float, workers: int) -> _core.LinkModel:
    hop = _core.Hop(latency_ns=HOP_LATENCY_NS, bandwidth_bytes_per_s=gbit_per_s * 1e9 / 8)
    return _core.ring_link(hop, workers)


def row(gbit_per_s: float, workers: int, comparison: Comparison, policies: list[str]) -> list[str]:
    by_policy = {row.policy: row for row in comparison.rows}
    cells = [f"{by_policy[name].ratio_to_bound:.3f} ({by_policy[name].ratio_to_plain_bound:.3f})" for name in policies]
    forecast = by_policy["forecast"]
    return [
        f"{gbit_per_s} x {workers}",
        f"{comparison.link_ns / comparison.compute_ns:.2f}",
        f"{forecast.plan.bound_ns / 1e6:.1f}",
        f"{forecast.speedup_over_ddp:.2f}",
        *cells,
    ]


def table(name: str, mode: str) -> str:
    profile = load_profile(name, scale=SCALE)
    policies = [info.name for info in _core.policies() if mode == "overlap" or not info.overlap_only]
    rows = [
        row(gbit_per_s, workers, compare(profile, ring(gbit_per_s, workers), policies, mode=mode), policies)
        for gbit_per_s in BANDWIDTHS_GBIT_PER_S
        for workers in WORKERS
    ]
    headers = ["Gbit/s x workers", "comm / compute", "bound, ms", "forecast over ddp", *policies]
    return f"**{name}, {mode} mode**\n\n" + tabulate(rows, headers, tablefmt="github", disable_numparse=True)


def main() -> None:
    args = parser_of(__doc__).parse_args()
    text = "\n\n".join(table(name, mode) for mode in ("overlap", "hook") for name in PROFILES)
    show(text, MARK, args.refresh)


if __name__ == "__main__":
    main()
