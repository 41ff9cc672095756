"""What snapshots cost a training, beside torch.save and DCP's async_save as often.

    python -m benchmarks.snapshots [--model resnet50 | char_gpt] [--rate 400mbit] [--write-mb-per-s 200]
    python -m benchmarks.snapshots --over-network --every 10 --kinds none,gradcast

Hosts with slow links (root, iproute2) train a stand-in for an accelerator, or char_gpt on the CPU, in overlap mode.
gradcast first chooses how often; then the kinds take turns, each for whole intervals between snapshots, and the time of
a step is compared with that without snapshots in the same round. The hosts share this machine's cores and disk. With
--over-network each piece is synced by the next host, which gets it over the slow link; as a file system on the network.
"""

import argparse
import logging
import os
import shutil
import socket
import statistics
import sys
import threading
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from tabulate import tabulate

import gradcast
from benchmarks.on_hosts import in_turns, measured, parser_of
from benchmarks.pages import run_program
from gradcast.lab.models import make_task
from gradcast.lab.settings import Settings
from gradcast.lab.trainer import Training, attached

KINDS = ("none", "gradcast", "torch.save", "async_save")
_STEPS_MIN = 12  # of a turn; and two intervals, as what later snapshots cost is told with the third


def started(model: str, scale_size: float) -> Training:
    profile = None if model == "char_gpt" else gradcast.load_profile(model).to_json()
    training = attached(make_task(Settings(model, profile, scale_size=scale_size), dist.get_rank()))
    training.turn(30)  # the warm-up, and the plan's first steps
    return training


def state(training: Training) -> dict[str, Any]:
    return {"model": training.called.state_dict(), "optimizer": training.optimizer.state_dict()}


def sync_over_network() -> None:
    """From now on each file that is synced sends what was added to it to the next rank, and waits for its answer."""
    server = socket.create_server(("", 0))
    with socket.create_connection((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))) as probe:
        own = (probe.getsockname()[0], server.getsockname()[1])
    addresses: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(addresses, own)

    def serve() -> None:
        with server.accept()[0] as peer:
            while head := peer.recv(8, socket.MSG_WAITALL):
                left = int.from_bytes(head)
                while left:
                    left -= len(peer.recv(min(left, 1 << 20)))
                peer.sendall(b"1")

    threading.Thread(target=serve, daemon=True).start()
    link = socket.create_connection(addresses[(dist.get_rank() + 1) % len(addresses)])
    synced: dict[str, int] = {}

    def fdatasync(descriptor: int) -> None:
        name, size = os.readlink(f"/proc/self/fd/{descriptor}"), os.fstat(descriptor).st_size
        added, synced[name] = size - synced.get(name, 0), size
        link.sendall(added.to_bytes(8) + bytes(added))
        link.recv(1)

    os.fdatasync = fdatasync


def chosen_every(training: Training, folder: Path, steps: int, options: dict[str, Any]) -> dict[str, Any]:
    """The statistics after so many steps with snapshots as often as gradcast chooses."""
    taking = training.handle.snapshots(folder / "chosen", **options)
    training.turn(steps)
    taking.close()
    return taking.stats()


def timed(
    training: Training, kind: str, every: int, folder: Path, options: dict[str, Any]
) -> tuple[float, float | None]:
    """Seconds per step over whole intervals, from behind the first save, and the share of them that gradcast has told
    of the turn's snapshots."""
    if dist.get_rank() == 0:
        shutil.rmtree(folder, ignore_errors=True)
    dist.barrier()
    pending: list[Any] = []
    made = 0

    def save() -> None:
        nonlocal made
        made += 1
        if made % every:
            return
        if kind == "torch.save" and dist.get_rank() == 0:
            folder.mkdir(parents=True, exist_ok=True)
            with open(folder / f"{made}.pt", "wb") as file:
                torch.save(state(training), file)
                os.fsync(file.fileno())
        elif kind == "async_save":
            while pending:
                pending.pop().result()
            pending.append(dcp.async_save(state(training), checkpoint_id=folder / str(made)))

    taking = training.handle.snapshots(folder, every=every, **options) if kind == "gradcast" else None
    count = every * max(2, -(-_STEPS_MIN // every))
    training.after_step = save
    training.turn(every + 1)
    step_s = training.duration_s(count) / count
    while pending:
        pending.pop().result()
    if taking is None:
        return step_s, None
    taking.close()
    assert taking.stats()["failed"] == 0
    return step_s, taking.stats()["overhead"]


def train(args: argparse.Namespace) -> dict[str, Any]:
    """One rank."""
    logging.disable(logging.INFO)
    folder = args.folder / str(os.getppid())
    options = {"write_bytes_per_s": args.write_mb_per_s and 1e6 * args.write_mb_per_s}
    if args.over_network:
        sync_over_network()
        options["over_network"] = True
    training = started(args.model, args.scale_size)
    told = chosen_every(training, folder, args.settle_steps, options)
    rounds: dict[str, list[tuple[float, float | None]]] = {kind: [] for kind in args.kinds}
    for kind in in_turns(args.kinds, args.rounds):
        rounds[kind].append(timed(training, kind, args.every or told["every"], folder / kind, options))
    training.detach()
    if dist.get_rank() == 0:
        shutil.rmtree(folder)
    return {"told": told, "rounds": rounds}


def table(rounds: dict[str, list[tuple[float, float | None]]]) -> str:
    rows = []
    for kind, turns in rounds.items():
        longer = [100 * (each / none - 1) for (each, _), (none, _) in zip(turns, rounds["none"], strict=True)]
        told = ", ".join(f"{100 * each:.1f}" for _, each in turns if each is not None)
        spread = ", ".join(f"{each:.1f}" for each in longer)
        rows.append([kind, statistics.median(each for each, _ in turns) * 1e3, statistics.median(longer), spread, told])
    head = ["", "ms per step", "longer by %", "by round", "told in the round, %"]
    return tabulate(rows, headers=head, tablefmt="github", floatfmt=".1f", disable_numparse=[3, 4])


def main() -> None:
    parser = parser_of(__doc__, rate="400mbit")
    parser.add_argument("--model", default="resnet50", help="a profile, or char_gpt (default: resnet50)")
    parser.add_argument("--scale-size", type=float, default=1.0, help="of the stand-in's tensors (default: 1)")
    parser.add_argument("--folder", type=Path, default=Path("/tmp/gradcast-snapshots"))
    parser.add_argument("--write-mb-per-s", type=float, help="the most that each rank writes")
    parser.add_argument("--over-network", action="store_true", help="the folder is reached over the slow links")
    parser.add_argument("--every", type=int, help="steps between snapshots, in place of what is chosen")
    parser.add_argument("--kinds", type=lambda text: text.split(","), default=[*KINDS], help=f"of {', '.join(KINDS)}")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each kind (default: 5)")
    parser.add_argument("--settle-steps", type=int, default=60, help="until the number of steps is taken as chosen")
    args = parser.parse_args()
    found = measured(train, args.hosts, args.rate, args, promptly=True)
    print(f"{args.model}: {' '.join(f'{k}={v}' for k, v in found['told'].items())}")
    print(table(found["rounds"]))


if __name__ == "__main__":
    sys.exit(run_program(main, "snapshots"))
