"""``gradcast dev published-networks``: lists the published networks that ``--network`` knows."""

import argparse
import json
from typing import Any

from gradcast import _core
from gradcast.cli import common


def add_parser(commands: Any) -> None:
    parser = common.command(
        commands,
        "published-networks",
        "list networks with published costs, which --network knows",
        "",
        "gradcast dev published-networks",
    )
    common.add_json_option(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    if args.json:
        common.print_json({"networks": [_as_json(network) for network in _core.networks()]})
        return
    rows = [
        [network.name, network.world_size, common.describe_cost(network.link.all_reduce), network.summary]
        for network in _core.networks()
    ]
    common.print_table(rows, ["name", "workers", "all-reduce", "network"], "lrll")
    print("\nSources: `gradcast dev published-networks --json`.")


def _as_json(network: _core.NamedNetwork) -> dict[str, Any]:
    fields = {name: getattr(network, name) for name in ("name", "summary", "source", "world_size")}
    return fields | {"link": json.loads(network.link.to_json())}
