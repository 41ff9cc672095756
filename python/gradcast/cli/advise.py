"""``gradcast advise``: which machines to rent for a training, and how many."""

import argparse
import math
from typing import Any

from gradcast.cli import common
from gradcast.cli.scaling_options import add_measured_algorithm
from gradcast.errors import Error
from gradcast.files import load_profile
from gradcast.scaling.advise import Advice, ClusterOption, Request, Training, advise
from gradcast.scaling.growth import ALGORITHMS, SPREAD
from gradcast.scaling.prices import Prices, load_prices, parse_duration_s, sample_path
from gradcast.units import parse_positive

_EXAMPLE = "gradcast advise resnet50 --samples 1.28M --epochs 90 --batch 128 --budget 4h --prices prices.toml"
_FACTORS = {"k": 1e3, "m": 1e6, "g": 1e9}


def add_parser(commands: Any) -> None:
    parser = common.new_parser(
        commands,
        "advise",
        "which machines to rent, and how many",
        "Finds the cheapest cluster within a time, the fastest within a cost, and all between them that are worth "
        "their price. Steps are predicted, from measured costs of the network if there are any.",
        _EXAMPLE,
    )
    common.add_profiles_argument(parser)
    _add_training_options(parser)
    _add_budget_options(parser)
    _add_prediction_options(parser)
    parser.add_argument("--all", action="store_true", help="list every cluster, not only those worth their price")
    common.add_json_option(parser)
    parser.set_defaults(run=run)


def _add_training_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("length of the training (--samples and --batch, or --steps)")
    group.add_argument(
        "--samples", type=common.argument(_count), metavar="N", help="number of samples of one epoch: 50000, 1.28M"
    )
    group.add_argument(
        "--epochs",
        type=common.POSITIVE,
        metavar="N",
        help="number of epochs (default: 1)",
    )
    group.add_argument(
        "--batch",
        type=common.whole_number(1, 10**9),
        metavar="N",
        help="number of samples per worker and step, as in the profile",
    )
    group.add_argument(
        "--steps",
        type=common.whole_number(1, 10**12),
        metavar="N",
        help="number of steps with as many workers as the first profile has; more workers take fewer",
    )


def _add_budget_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("limits")
    group.add_argument(
        "--budget",
        type=common.argument(_positive_duration_s),
        metavar="TIME",
        help="find the cheapest cluster within this time: 4h, 2d",
    )
    group.add_argument(
        "--cost", type=common.POSITIVE, metavar="MONEY", help="find the fastest cluster for this much money: 500"
    )
    group.add_argument(
        "--prices", metavar="FILE", help="file with machines and prices (default: a bundled, outdated sample)"
    )


def _add_prediction_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("prediction")
    group.add_argument(
        "--measured-on",
        metavar="NAME",
        help="machine of the price file on which the profiles were measured; ranks that fit into one are assumed to "
        "share one",
    )
    add_measured_algorithm(group)
    group.add_argument(
        "--algorithm",
        choices=ALGORITHMS,
        default="ring",
        help="algorithm of the all-reduce between machines (default: ring)",
    )
    group.add_argument(
        "--policy",
        choices=["forecast", "ddp"],
        default="forecast",
        help="policy; ddp means without gradcast (default: forecast)",
    )
    group.add_argument(
        "--spread",
        type=common.FRACTION,
        default=SPREAD,
        metavar="SHARE",
        help=f"share by which the costs of the network may be off (default: {SPREAD:.0%}%)",
    )
    group.add_argument(
        "--runs",
        type=common.whole_number(10, 1_000_000),
        default=Request.run_count,
        metavar="N",
        help=f"number of simulated trainings for each spot cluster (default: {Request.run_count})",
    )
    group.add_argument(
        "--seed",
        type=common.whole_number(0, 2**63),
        default=1,
        metavar="N",
        help="seed of the simulations (default: 1)",
    )


def _count(text: str) -> float:
    """Parses 50000, 20k, 1.28M or 3G."""
    factor = _FACTORS.get(text[-1:].lower(), 1)
    return parse_positive(text if factor == 1 else text[:-1]) * factor


def _positive_duration_s(text: str) -> float:
    duration_s = parse_duration_s(text)
    if duration_s == 0:
        raise Error("the time is 0; it must be longer, for instance 4h")
    return duration_s


def run(args: argparse.Namespace) -> None:
    profiles = [load_profile(name, args.scale) for name in args.profiles]
    prices = load_prices(args.prices or sample_path())
    request = Request(
        training=_training(args, profiles[0].world_size),
        measured_on=args.measured_on,
        measured_algorithm=args.measured_algorithm,
        algorithm=args.algorithm,
        policy=args.policy,
        # With DDP all gradients arrive before the next forward pass.
        mode="hook" if args.policy == "ddp" else "overlap",
        spread=args.spread,
        run_count=args.runs,
        seed=args.seed,
    )
    found = advise(profiles, prices, request)
    if args.json:
        common.print_json(_as_json(args, prices, found))
    else:
        _print(args, prices, found)


def _training(args: argparse.Namespace, worker_count: int) -> Training:
    if args.steps is not None:
        for option in ("samples", "epochs", "batch"):
            if getattr(args, option) is not None:
                raise Error(f"--steps gives the length of the training; leave out --{option}")
        return Training.of_steps(args.steps, worker_count)
    if args.samples is None:
        raise Error(
            "the length of the training is missing; give --samples 1.28M --epochs 90 --batch 128, or --steps 450000"
        )
    if args.batch is None:
        raise Error("--batch is missing; give the number of samples per worker and step of the profile")
    return Training.of_samples(args.samples * (args.epochs or 1), args.batch)


def _print(args: argparse.Namespace, prices: Prices, found: Advice) -> None:
    print(f"Prices of {prices.date} in {prices.currency}{_sample_words(args)}.\n")
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
        print(f"Left out, because {reason}: {clusters}.")
    if any(row.spot for row in shown):
        print("Spot: hours are the mean over simulated revocations; a budget is kept in nine of ten simulations.")
    for sentence in _answers(args, prices, found):
        print(sentence)


def _sample_words(args: argparse.Namespace) -> str:
    return "" if args.prices else ", from the bundled sample; copy it, enter current prices, and name it with --prices"


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
    sentences = []
    if args.budget is not None:
        hours = args.budget / 3600
        row = found.cheapest_within(hours)
        sentences.append(_cheapest(row, hours, prices) if row else _too_slow(hours, prices, found))
    if args.cost is not None:
        row = found.fastest_within(args.cost)
        sentences.append(_fastest(row, args.cost, prices) if row else _too_expensive(args.cost, prices, found))
    return sentences


def _what(row: ClusterOption, prices: Prices) -> str:
    workers = "1 worker" if row.workers == 1 else f"{row.workers} workers"
    return f"{row.describe()}, {workers}: {_hours(row.hours)} h, {row.cost:.2f} {prices.currency}"


def _cheapest(row: ClusterOption, hours: float, prices: Prices) -> str:
    text = f"The cheapest within {_hours(hours)} h: {_what(row, prices)}."
    if row.high_hours > hours:
        text += f" At the upper end of its range it takes {_hours(row.high_hours)} h, which is too long."
    return text


def _fastest(row: ClusterOption, cost: float, prices: Prices) -> str:
    text = f"The fastest within {cost:g} {prices.currency}: {_what(row, prices)}."
    high_cost = row.high_hours * row.price_per_hour
    if high_cost > cost:
        text += f" At the upper end of its range it costs {high_cost:.2f} {prices.currency}, which is too much."
    return text


def _too_slow(hours: float, prices: Prices, found: Advice) -> str:
    row = min(found.rows, key=lambda each: each.sure_hours)
    return f"No cluster of these trains within {_hours(hours)} h. The fastest: {_what(row, prices)}."


def _too_expensive(cost: float, prices: Prices, found: Advice) -> str:
    row = min(found.rows, key=lambda each: each.sure_cost)
    return f"No cluster of these trains for {cost:g} {prices.currency}. The cheapest: {_what(row, prices)}."


def _as_json(args: argparse.Namespace, prices: Prices, found: Advice) -> dict[str, Any]:
    result: dict[str, Any] = {
        "version": 1,
        "prices": {"date": prices.date, "currency": prices.currency, "sample": args.prices is None},
        "rows": [_row_json(row, row in found.frontier) for row in found.rows],
        "skipped": found.skipped,
    }
    if args.budget is not None:
        row = found.cheapest_within(args.budget / 3600)
        result["cheapest_within_budget"] = row and _row_json(row, row in found.frontier)
    if args.cost is not None:
        row = found.fastest_within(args.cost)
        result["fastest_within_cost"] = row and _row_json(row, row in found.frontier)
    result["summary"] = " ".join(_answers(args, prices, found))
    return result


def _row_json(row: ClusterOption, on_frontier: bool) -> dict[str, Any]:
    return {
        "machine": row.machine,
        "machines": row.machines,
        "workers": row.workers,
        "spot": row.spot,
        "step_ms": row.step_ns / 1e6,
        "hours": row.hours,
        "low_hours": _finite(row.low_hours),
        "high_hours": _finite(row.high_hours),
        "sure_hours": _finite(row.sure_hours),
        "price_per_hour": row.price_per_hour,
        "cost": row.cost,
        "basis": row.basis,
        "frontier": on_frontier,
    }


def _finite(hours: float) -> float | None:
    """Returns None for a training that is revoked so often that it never ends."""
    return None if hours == math.inf else hours
