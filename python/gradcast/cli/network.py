"""``torchrun ... -m gradcast network``: measures the network between the workers, before a training."""

import argparse
import contextlib
import datetime
import json
import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from gradcast import _core, bench_results
from gradcast.cli import common
from gradcast.errors import Error, first_line
from gradcast.units import format_bandwidth, format_size, format_time, parse_size_bytes

if TYPE_CHECKING:
    import torch

_EXAMPLE = "torchrun --nproc-per-node 2 -m gradcast network"
_TIMEOUT_S = 120
_DURATION = "10s"
_SECONDS_MIN, _SECONDS_MAX = 2, 600
_BYTES_MIN, _BYTES_MAX = 4, 64 << 30
_COUNT_MAX = 1_000_000
# Options of --bench alone; without a value they are None.
_SWEEP = ("dtype", "bytes_min", "bytes_max", "factor", "iterations", "warmup")


def add_parser(commands: Any) -> None:
    parser = common.command(
        commands,
        "network",
        "measure the network between the workers, and find the setting that limits it",
        "Start it on all hosts as you start a training: with torchrun, or with RANK, WORLD_SIZE, MASTER_ADDR and "
        "MASTER_PORT set.",
        _EXAMPLE,
    )
    duration = "approximate duration, 2s to 10min; somewhat longer on slow links or with more than 8 hosts (default: "
    common.option(parser, "--duration", "TIME", f"{duration}{_DURATION})", common.DURATION)
    common.add_json_option(parser)
    _add_bench_options(parser.add_argument_group("all-reduces by size, as training sends them"))
    parser.set_defaults(run=run)


def _add_bench_options(group: Any) -> None:
    bench = "time all-reduces of many sizes instead, on the path of training's blocks, and fit the link"
    group.add_argument("--bench", action="store_true", help=bench)
    device = "where the gradients lie; cuda takes one device per rank (default: cuda if torch has a device)"
    common.option(group, "--device", None, device, choices=["cpu", "cuda"])
    common.option(
        group, "--dtype", None, "type of the elements (default: fp32)", choices=["fp32", "bf16", "fp16", "fp64"]
    )
    size = common.argument(_size_bytes)
    common.option(group, "--bytes-min", "SIZE", "smallest size (default: 1KiB)", size)
    common.option(group, "--bytes-max", "SIZE", "largest size (default: 64MiB)", size)
    common.option(group, "--factor", "X", "from one size to the next (default: 2)", common.factor(1.1, 1024))
    iterations = "iterations of each size, of two blocks each (default: 20)"
    common.option(group, "--iterations", "N", iterations, common.whole_number(1, _COUNT_MAX))
    common.option(group, "--warmup", "N", "iterations before them (default: 5)", common.whole_number(0, _COUNT_MAX))


def _size_bytes(text: str) -> int:
    size_bytes = parse_size_bytes(text)
    if not _BYTES_MIN <= size_bytes <= _BYTES_MAX:
        raise Error(f"{text} is not a size from {_BYTES_MIN}B to {_BYTES_MAX >> 30}GiB")
    return size_bytes


def run(args: argparse.Namespace) -> None:
    missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
    if missing:
        raise Error(f"{missing[0]} is not set, so there are no workers to measure between; start it with `{_EXAMPLE}`")
    world_size = common.environment_number("WORLD_SIZE", 1, common.WORKERS_MAX)
    rank = common.environment_number("RANK", 0, world_size - 1)
    common.environment_number("MASTER_PORT", 1, 65535)
    sweep = {name: value for name in _SWEEP if (value := getattr(args, name)) is not None}
    _check_choice(args, sweep)
    common.require_torch("gradcast network")
    if world_size == 1:
        raise Error(f"there is only one worker; start at least two, for instance with `{_EXAMPLE}`")
    if args.bench:
        _bench(args, sweep, is_first=rank == 0)
        return
    found = _checked(args.duration, quiet=args.json)
    if rank != 0:
        return
    if args.json:
        common.print_json(_in_ms(found))
    else:
        _print(found)


def _check_choice(args: argparse.Namespace, sweep: dict[str, Any]) -> None:
    """Raises Error for options that do not go together. Sets the duration of the check."""
    if args.bench:
        if args.duration is not None:
            raise Error("--duration is for the check; with --bench give --iterations and --bytes-max")
        least, most = (sweep.get(name, default) for name, default in (("bytes_min", 1 << 10), ("bytes_max", 64 << 20)))
        if most < least:
            raise Error(f"--bytes-max ({format_size(most)}) is below --bytes-min ({format_size(least)})")
        return
    for name in ("device", *_SWEEP):
        if getattr(args, name) is not None:
            raise Error(f"--{name.replace('_', '-')} is for --bench; add it, or omit the option")
    args.duration = common.DURATION(_DURATION) if args.duration is None else args.duration
    if not _SECONDS_MIN <= args.duration <= _SECONDS_MAX:
        raise Error(f"--duration must be from {_SECONDS_MIN}s to {_SECONDS_MAX // 60}min")


def _bench(args: argparse.Namespace, sweep: dict[str, Any], *, is_first: bool) -> None:
    import torch

    from gradcast.diagnosis.network import bench

    prints = is_first and not args.json
    with _connected(_device_of(args.device)) as group:
        if prints:
            print(f"{group.world_size} ranks over {group.backend} of torch {torch.__version__}, {group.device}\n")
            print(bench_results.header(), flush=True)

        def tell(row: dict[str, Any]) -> None:
            if prints:
                print(bench_results.line(row), flush=True)

        results = bench.measured(group, bench.Sweep(**sweep), tell)
    if is_first:
        report_bench(results, as_json=args.json)


def report_bench(results: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(results, indent=1))
    elif "link" in results:
        link = _core.LinkModel.from_json(json.dumps(results["link"]))
        fit = results["fit"]["all_reduce"]
        print(
            f"\nall_reduce costs {common.describe_cost(link.all_reduce)}; off by {fit['relative_error_median']:.1%} in "
            f"the median, {fit['relative_error_max']:.1%} at most"
        )
    if sentence := bench_results.wrong_sums(results):
        raise Error(sentence, "communication")


def _device_of(name: str | None) -> "torch.device":
    """The device of this rank's gradients, which becomes the current one. Raises Error if there is none."""
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "cpu" or (name is None and count == 0):
        return torch.device("cpu")
    index = common.environment_number("LOCAL_RANK", 0, common.WORKERS_MAX - 1) if count > 1 else 0
    if index >= count:
        raise Error(
            f"this host has {count} CUDA devices, and a rank that would take number {index}; start one rank per "
            "device, or use --device cpu"
        )
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def _in_ms(value: Any) -> Any:
    """Returns the fields of doctor.json with every time in ms, as other commands print them."""
    if isinstance(value, list):
        return [_in_ms(each) for each in value]
    if not isinstance(value, dict):
        return value
    return dict(
        (f"{key.removesuffix('_us')}_ms", each if each is None else each / 1e3)
        if key.endswith("_us")
        else (key, _in_ms(each))
        for key, each in value.items()
    )


@contextlib.contextmanager
def _connected(device: "torch.device") -> Iterator[Any]:
    """The group of ranks that a training on this device would have. Collective."""
    import torch.distributed as dist

    from gradcast.training.ranks.group import make_group

    backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
    try:
        dist.init_process_group(backend, timeout=datetime.timedelta(seconds=_TIMEOUT_S))
    except (RuntimeError, ValueError) as error:
        raise Error(f"the workers cannot connect to each other: {first_line(error)}", "communication") from None
    try:
        yield make_group(None, device, None)
    finally:
        dist.destroy_process_group()


def _checked(seconds: float, quiet: bool) -> dict[str, Any]:
    import torch

    from gradcast.diagnosis.network.check import check

    progress = None if quiet else lambda line: print(f"gradcast: {line}", file=sys.stderr)
    with _connected(torch.device("cpu")) as group:
        found = check(group, seconds=seconds, progress=progress)
    assert found is not None, "there are several ranks"
    return found


def _print(found: dict[str, Any]) -> None:
    rows = [
        [
            f"{pair['a']} - {pair['b']}",
            "-" if pair["latency_us"] is None else format_time(1e3 * pair["latency_us"]),
            *(_rate(pair[key]) for key in ("tcp_gbit_per_s", "tcp_streams_gbit_per_s", "gloo_gbit_per_s")),
            f"{format_time(1e3 * pair['alpha_us'])} + {format_time(1e6 * pair['beta_ns_per_byte'])}/MB",
        ]
        for pair in found["pairs"]
    ]
    streams = found["pairs"][0]["streams"]
    common.print_table(
        rows, ["ranks", "one way", "TCP, 1 stream", f"{streams} streams", "Gloo", "Gloo message"], "lrrrrr"
    )
    print()
    collective = found["collective"]
    rows = [[format_size(sample["bytes"]), format_time(1e6 * sample["ms"])] for sample in collective["samples"]]
    common.print_table(rows, ["all-reduce of", "time"], "rr")
    slope = format_time(1e6 * collective["beta_ns_per_byte"])
    print(f"\nAn all-reduce takes {format_time(1e3 * collective['alpha_us'])} + {slope} per MB.")
    for finding in found["findings"]:
        print(f"\n{finding['key']}: {finding['sentence']}.")


def _rate(gbit_per_s: float | None) -> str:
    return "-" if gbit_per_s is None else format_bandwidth(1e9 * gbit_per_s)
