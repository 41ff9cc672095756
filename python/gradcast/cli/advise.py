"""``gradcast advise``: which machines to rent for a training, and how many."""

import argparse
import dataclasses
import math
from typing import Any

from gradcast.cli import common
from gradcast.cli.network_options import given
from gradcast.errors import Error
from gradcast.scaling.advise import Advice, ClusterOption, Request, advise
from gradcast.scaling.growth import ALGORITHMS, SPREAD
from gradcast.scaling.prices import Prices, load_prices, sample_path
from gradcast.units import parse_positive


def add_parser(commands: Any) -> None:
    parser = common.command(
        commands,
        "advise",
        "which machines to rent for a training, and how many",
        "Finds the cheapest cluster within a time, the fastest within a budget, and all between them that are worth "
        "their price. Steps are predicted, from measured costs of the network if there are any.",
        "gradcast advise resnet50 --samples 1.28M --epochs 90 --batch 128 --time-limit 4h --prices prices.toml",
    )
    common.add_profile_argument(parser, several=True)
    _add_training_options(parser)
    _add_limit_options(parser)
    _add_prediction_options(parser)
    parser.add_argument("--all", action="store_true", help="list every cluster, not only those worth their price")
    common.add_json_option(parser)
    parser.set_defaults(run=run)


def _add_training_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("length of the training (--samples and --batch, or --steps)")
    samples = "number of samples of one epoch: 50000, 1.28M"
    common.option(group, "--samples", "N", samples, common.argument(common.count))
    common.option(group, "--epochs", "N", "number of epochs (default: 1)", common.POSITIVE)
    batch = "number of samples per worker and step, as in the profile"
    common.option(group, "--batch", "N", batch, common.whole_number(1, 10**9))
    steps = "number of steps with as many workers as the first profile has; more workers take fewer"
    common.option(group, "--steps", "N", steps, common.whole_number(1, 10**12))


def _add_limit_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("limits")
    time_limit = "find the cheapest cluster that trains within this time: 4h, 2d"
    common.option(group, "--time-limit", "TIME", time_limit, common.DURATION)
    budget = "find the fastest cluster that costs at most this: 500, in the currency of the prices"
    common.option(group, "--budget", "MONEY", budget, common.argument(_money))
    sample = sample_path().replace("%", "%%")  # argparse fills in % marks
    prices = f"file with machines and prices (default: a bundled, outdated sample, {sample})"
    common.option(group, "--prices", "FILE", prices, common.not_empty)


def _add_prediction_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("prediction")
    machine = "machine of the price file on which the profiles were measured; ranks that fit into one are assumed to "
    common.option(group, "--measured-on", "NAME", f"{machine}share one", common.not_empty)
    common.add_uncertainty_options(group)
    algorithm = "algorithm of the all-reduce between machines"
    common.option(group, "--algorithm", None, algorithm, default="ring", choices=ALGORITHMS)
    policy = "policy; ddp means without gradcast"
    common.option(group, "--policy", None, policy, default="forecast", choices=["forecast", "ddp"])
    runs = "number of simulated trainings for each spot cluster"
    common.option(group, "--runs", "N", runs, common.whole_number(10, 1_000_000), str(Request.run_count))
    common.option(group, "--seed", "N", "seed of the simulations", common.whole_number(0, 2**63), "1")


def _money(text: str) -> float:
    try:
        return parse_positive(text)
    except Error:
        raise Error(
            f"'{text}' is not an amount of money; write for instance 500 (a time goes to --time-limit)"
        ) from None


def run(args: argparse.Namespace) -> None:
    profiles = common.profiles_from(args)
    prices = load_prices(args.prices or sample_path())
    request = Request(
        worker_steps=_worker_steps(args, profiles[0].world_size),
        measured_on=args.measured_on,
        measured_algorithm=args.measured_algorithm or Request.measured_algorithm,
        algorithm=args.algorithm,
        policy=args.policy,
        spread=SPREAD if args.uncertainty is None else args.uncertainty,
        run_count=args.runs,
        seed=args.seed,
    )
    found = advise(profiles, prices, request)
    if args.json:
        common.print_json(_as_json(args, prices, found))
    else:
        _print(args, prices, found)


def _worker_steps(args: argparse.Namespace, worker_count: int) -> float:
    if args.steps is not None:
        if others := given(args, "samples", "epochs", "batch"):
            raise Error(f"--steps gives the length of the training; omit {others[0]}")
        return float(args.steps) * worker_count
    if args.samples is None:
        raise Error(
            "the length of the training is missing; give --samples 1.28M --epochs 90 --batch 128, or --steps 450000"
        )
    if args.batch is None:
        raise Error("--batch is missing; give the number of samples per worker and step of the profile")
    return float(args.samples * (args.epochs or 1) / args.batch)


def _print(args: argparse.Namespace, prices: Prices, found: Advice) -> None:
    common.print_step_time(args)
    sample = (
        "" if args.prices else ", from the bundled sample; copy it, enter current prices, and name it with --prices"
    )
    print(f"Prices of {prices.date} in {prices.currency}{sample}.\n")
    shown = found.rows if args.all else found.frontier
    headers = ["cluster", "workers", "step ms", "hours", "range", f"cost, {prices.currency}", "step"]
    common.print_table([_cells(row, row in found.frontier and args.all) for row in shown], headers, "lrrrrrl")
    print()
    if args.all:
        print("* No other cluster is both faster and cheaper.")
    else:
        other_count = len(found.rows) - len(found.frontier)
        print(f"The other {other_count} clusters are slower or more expensive than one of these (--all lists them).")
    for reason in dict.fromkeys(found.skipped.values()):
        clusters = ", ".join(cluster for cluster, why in found.skipped.items() if why == reason)
        print(f"Omitted, because {reason}: {clusters}.")
    if any(row.spot for row in shown):
        print("Spot: hours are the mean over simulated revocations; a limit is kept in nine of ten simulations.")
    for sentence in _answers(args, prices, found):
        print(sentence)


def _cells(row: ClusterOption, marked: bool) -> list[str]:
    return [
        row.describe() + (" *" if marked else ""),
        str(row.workers),
        f"{row.step_ns / 1e6:.1f}",
        _hours(row.hours),
        f"{_hours(row.low_hours)} to {_hours(row.high_hours)}",
        f"{row.cost:.2f}",
        row.basis,
    ]


def _hours(hours: float) -> str:
    if hours == math.inf:
        return "never"
    return f"{hours:.0f}" if hours >= 100 else f"{hours:.3g}"


def _answers(args: argparse.Namespace, prices: Prices, found: Advice) -> list[str]:
    def described(row: ClusterOption) -> str:
        workers = "1 worker" if row.workers == 1 else f"{row.workers} workers"
        return f"{row.describe()}, {workers}: {_hours(row.hours)} h, {row.cost:.2f} {prices.currency}."

    sentences = []
    if args.time_limit is not None:
        hours = args.time_limit / 3600
        if row := found.cheapest_within(hours):
            text = f"The cheapest within {_hours(hours)} h: {described(row)}"
            if row.high_hours > hours:
                text += f" At the upper end of its range it takes {_hours(row.high_hours)} h, which is too long."
        else:
            fastest = min(found.rows, key=lambda row: row.sure_hours)
            text = f"No cluster of these trains within {_hours(hours)} h. The fastest: {described(fastest)}"
        sentences.append(text)
    if args.budget is not None:
        money = f"{args.budget:g} {prices.currency}"
        if row := found.fastest_within(args.budget):
            text = f"The fastest within {money}: {described(row)}"
            if row.high_hours * row.price_per_hour > args.budget:
                high = f"{row.high_hours * row.price_per_hour:.2f} {prices.currency}"
                text += f" At the upper end of its range it costs {high}, which is too much."
        else:
            cheapest = min(found.rows, key=lambda row: row.sure_cost)
            text = f"No cluster of these trains for {money}. The cheapest: {described(cheapest)}"
        sentences.append(text)
    return sentences


def _as_json(args: argparse.Namespace, prices: Prices, found: Advice) -> dict[str, Any]:
    result: dict[str, Any] = {
        "prices": {"date": prices.date, "currency": prices.currency, "sample": args.prices is None},
        "rows": [_row_json(row, found) for row in found.rows],
        "skipped": found.skipped,
        "step_time": args.step_time,
    }
    if args.time_limit is not None:
        result["cheapest_within_time_limit"] = _row_json(found.cheapest_within(args.time_limit / 3600), found)
    if args.budget is not None:
        result["fastest_within_budget"] = _row_json(found.fastest_within(args.budget), found)
    result["summary"] = " ".join(_answers(args, prices, found))
    return result


def _row_json(row: ClusterOption | None, found: Advice) -> dict[str, Any] | None:
    """Hours are null if a training is revoked so often that it never ends."""
    if row is None:
        return None
    fields: dict[str, Any] = {
        key: None if value == math.inf else value for key, value in dataclasses.asdict(row).items()
    }
    step_ms = fields.pop("step_ns") / 1e6
    return {**fields, "step_ms": step_ms, "cost": row.cost, "frontier": row in found.frontier}
