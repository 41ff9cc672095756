"""``gradcast simulate``: compares policies on one profile and one network, on many networks, or with more workers."""

import argparse
from typing import Any

from gradcast import _core
from gradcast.cli import common, simulate_networks, simulate_scaling
from gradcast.cli.network_options import Network, add_network_options, given, networks_from
from gradcast.comparison import local_rounds, powersgd
from gradcast.comparison.compare import Comparison, PolicyResult, compare, parse_policies, same_bound
from gradcast.comparison.pipeline import Pipeline, step_of
from gradcast.comparison.verdict import verdict
from gradcast.disk import check_writable
from gradcast.errors import Error
from gradcast.units import format_size

_EXAMPLE = """gradcast simulate resnet50 --scale 0.5 --bandwidth 3gbit --workers 8
  gradcast simulate resnet50 --scale 0.5 --bandwidth 1gbit,3gbit,10gbit --workers 2,8,64 --csv networks.csv
  gradcast simulate gpt2 --bandwidth 23gbit --workers 8 --pipeline 4 --micro-batches 8
  gradcast simulate resnet50 --scale 0.5 --network 10gbe --workers 8,16,32,64,128,256 --scaling --plot scaling.png"""


def add_parser(commands: Any) -> None:
    parser = common.command(
        commands,
        "simulate",
        "predict a step under each policy, on any network",
        "Compares policies with the lower bound that no schedule can beat. Lists of bandwidths, workers or networks "
        "give a table with a line per network. --scaling shows what more workers bring.",
        _EXAMPLE,
    )
    common.add_profile_argument(parser, several=True)
    add_network_options(parser)
    simulate_scaling.add_options(parser)
    group = parser.add_argument_group(
        "model parallelism: the profile is that of one stage and micro-batch; workers are the stage's replicas"
    )
    count = common.whole_number(1, 1_000_000)
    common.option(group, "--tensor", "T", "ranks that share each layer", count, 1)
    common.option(group, "--pipeline", "P", "stages in a row, which follow 1F1B", count, 1)
    common.option(group, "--micro-batches", "M", "micro-batches per step", count, 1)
    common.option(group, "--chunks", "V", "parts of the model per rank, which are interleaved", count, 1)
    group = parser.add_argument_group("schedule")
    names = (
        "policies, separated by commas (default: all, or forecast with --scaling); `gradcast dev policies` lists them"
    )
    common.option(group, "--policy", "NAMES", names, common.argument(parse_policies))
    common.add_schedule_options(group)
    hook = "also predict DDP with torch's PowerSGD hook of this rank, which is lossy"
    common.option(group, "--powersgd", "RANK", hook, common.whole_number(1, 1_000_000))
    local = "also predict local steps that are averaged every H steps, which change the algorithm"
    common.option(group, "--sync-every", "H", local, common.whole_number(2, 1_000_000))
    group = parser.add_argument_group("output")
    pictures = "also draw the plans of one network, the speed-up on several, or with --scaling step time and efficiency"
    common.option(group, "--plot", "PNG", pictures, common.not_empty)
    table = "also write a line per network and policy to this file (-: print them only)"
    common.option(group, "--csv", "FILE", table, common.not_empty)
    common.add_json_option(group)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    if args.plot:
        common.check_picture(args.plot)
    if args.csv not in (None, "-"):
        check_writable(args.csv, "table")
    on_one_network = given(args, "powersgd", "sync_every")
    if on_one_network and args.scaling:
        raise Error(f"{on_one_network[0]} does not work with --scaling; omit one of them")
    if args.powersgd is not None and args.wire is not None:
        raise Error("--powersgd does not work with --wire; omit one of them")
    pipeline = Pipeline(args.tensor, args.pipeline, args.micro_batches, args.chunks)
    profiles = common.profiles_from(args)
    if pipeline != Pipeline():
        profiles = [_staged(profile, pipeline) for profile in profiles]
    if args.scaling:
        simulate_scaling.run(args, profiles)
        return
    if only := given(args, *simulate_scaling.OPTIONS):
        raise Error(f"{only[0]} only works with --scaling; add that, or omit it")
    if len(args.profiles) > 1:
        raise Error("several profiles only work with --scaling; give one")
    (profile,) = profiles
    networks = networks_from(args, profile)
    names = args.policy or parse_policies("all")
    if len(networks) > 1:
        if on_one_network:
            raise Error(f"{on_one_network[0]} is predicted on one network; give one")
        simulate_networks.run(args, profile, networks, names)
        return
    comparison = compare(profile, networks[0].link, names, mode=args.mode, in_flight=args.in_flight)
    if not comparison.rows:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in comparison.skipped.items())
        raise Error(f"none of these policies can run here ({reasons}); try --policy all")
    if args.plot:
        from gradcast.plots import draw_comparison

        parts = [common.profile_name(profile, args.scale), networks[0].description]
        parts += ["hook mode"] if args.mode == "hook" else []
        parts += [f"{args.in_flight} blocks in flight"] if args.in_flight > 1 else []
        draw_comparison(args.plot, profile, networks[0].link, comparison, title=", ".join(parts))
    fields = simulate_networks.as_json(args, profile, networks, [comparison])
    if args.powersgd is not None:
        fields["networks"][0]["powersgd"] = _powersgd(args.powersgd, profile, networks[0].link)
    if args.sync_every is not None:
        fields["networks"][0]["local_steps"] = _local_steps(args.sync_every, profile, networks[0].link)
    if not simulate_networks.print_result(args, fields):
        _print(args, profile, networks[0], comparison, fields["networks"][0])


def _staged(profile: _core.Profile, pipeline: Pipeline) -> _core.Profile:
    parts = [profile.name, str(pipeline)] + ([common.ESTIMATED] if common.is_estimate(profile) else [])
    return step_of(profile, pipeline).replace(name=", ".join(parts))


def _powersgd(rank: int, profile: _core.Profile, link: _core.LinkModel) -> dict[str, Any]:
    step_ns = powersgd.step_ns(profile, link, rank)
    return {"rank": rank, "step_ms": step_ns / 1e6, "sent_bytes": sum(powersgd.sent_bytes(profile, rank))}


def _local_steps(every: int, profile: _core.Profile, link: _core.LinkModel) -> dict[str, Any]:
    forms = {"step_ms": True, "blocking_step_ms": False}
    times = {name: local_rounds.step_ns(profile, link, every, is_streamed=form) / 1e6 for name, form in forms.items()}
    sent_bytes = sum(tensor.bytes for tensor in profile.tensors) / every
    return {"sync_every": every, **times, "bytes_per_step": sent_bytes, "known": local_rounds.KNOWN}


def _row_cells(row: PolicyResult) -> list[str]:
    return [
        row.policy + (" *" if row.other_ops else ""),
        str(len(row.plan.blocks)),
        f"{row.plan.predicted_ns / 1e6:.1f}",
        f"{row.ratio_to_bound:.3f}",
        f"{row.ratio_to_plain_bound:.3f}",
        f"{row.speedup_over_ddp:.2f} x",
    ]


def _print(
    args: argparse.Namespace,
    profile: _core.Profile,
    network: Network,
    comparison: Comparison,
    fields: dict[str, Any],
) -> None:
    print(common.describe_profile(profile, args.scale))
    common.print_step_time(args)
    print(f"{network.description}: {common.describe_traffic(profile, network.link, network.worker_count)}")
    if args.mode == "hook":
        print("hook mode: the next forward pass starts when all gradients have arrived")
    if args.in_flight > 1:
        print(f"up to {args.in_flight} blocks in flight")
    print()
    headers = ["policy", "blocks", "step ms", "time / bound", "time / plain bound", "speed-up over ddp"]
    common.print_table([_row_cells(row) for row in comparison.rows], headers, "lrrrrr")
    print()
    for row in comparison.rows:
        if row.other_ops:
            print(_footnote(row, comparison))
    for name, reason in comparison.skipped.items():
        print(f"{name} is omitted: {reason}.")
    print(verdict(comparison))
    if (low_rank := fields.get("powersgd")) is not None:
        gain = comparison.ddp.predicted_ns / 1e6 / low_rank["step_ms"]
        print(
            f"DDP with PowerSGD of rank {low_rank['rank']}, lossy: {low_rank['step_ms']:.1f} ms ({gain:.2f} x), with "
            f"{format_size(low_rank['sent_bytes'])} per step and without the time of its arithmetic."
        )
    if (local := fields.get("local_steps")) is not None:
        gain = comparison.ddp.predicted_ns / 1e6 / local["step_ms"]
        print(
            f"Changes the algorithm: local steps, averaged every {local['sync_every']}: {local['step_ms']:.1f} ms "
            f"({gain:.2f} x), blocking {local['blocking_step_ms']:.1f} ms, with "
            f"{format_size(round(local['bytes_per_step']))} per step; {local['known']}."
        )
    simulate_networks.print_paths(args)


def _footnote(row: PolicyResult, comparison: Comparison) -> str:
    text = f"* {row.policy} sends reduce-scatters and all-gathers here"
    own_ns, all_reduce_ns = row.plan.bound_ns, comparison.all_reduce_bound.best_ns
    if same_bound(own_ns, all_reduce_ns):
        return f"{text}."
    return f"{text}; its own bound is {own_ns / 1e6:.1f} ms, that of all-reduces {all_reduce_ns / 1e6:.1f} ms."
