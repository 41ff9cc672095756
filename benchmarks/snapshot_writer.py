"""One process's work for a snapshot: how fast it copies beside memcpy, writes and reads, and how long it holds the GIL.

    python -m benchmarks.snapshot_writer [--mb 1500] [--tensors 148] [--folder /tmp/snapshots]

The state is of parameters of different sizes with Adam. Another thread asks for the GIL all the time; its longest wait
is what the training thread could wait for at most.
"""

import argparse
import ctypes
import shutil
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
from tabulate import tabulate
from torch import nn

from gradcast.snapshots.files import Pace
from gradcast.snapshots.reading import Reading
from gradcast.snapshots.state import Copies
from gradcast.snapshots.store import COMMON, file_of, place_of
from gradcast.snapshots.writing import Layout, Writing


def state_of(mb: float, tensors: int) -> tuple[nn.ParameterList, torch.optim.Adam]:
    """Parameters with Adam, ``mb`` in all: every second one is 100 times as large as the others."""
    sizes = [1.0 if index % 2 else 0.01 for index in range(tensors)]
    elements = [round(mb * 1e6 / 12 * size / sum(sizes)) for size in sizes]
    module = nn.ParameterList([nn.Parameter(torch.rand(count)) for count in elements])
    optimizer = torch.optim.Adam(module.parameters(), lr=0.0)
    for parameter in module:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    return module, optimizer


def copy_rates(module: nn.Module, optimizer: torch.optim.Optimizer, rounds: int) -> tuple[list[float], list[float]]:
    """GB/s of our copies and of memcpy for the same pieces, in turns."""
    copies = Copies(module, [optimizer], 0, 1)
    names = [name for name, _ in module.named_parameters()]
    sources = [*module.parameters(), *(v for e in optimizer.state.values() for v in e.values() if v.numel() > 1)]
    into = [torch.empty_like(each) for each in sources]
    size, ours, theirs = sum(each.nbytes for each in sources), [], []
    for _ in range(rounds + 1):
        start_s = time.perf_counter()
        copies.begin()
        copies.copy(names)
        middle_s = time.perf_counter()
        for source, target in zip(sources, into, strict=True):
            ctypes.memmove(target.data_ptr(), source.data_ptr(), source.nbytes)
        ours.append(size / (middle_s - start_s) / 1e9)
        theirs.append(size / (time.perf_counter() - middle_s) / 1e9)
    return ours[1:], theirs[1:]  # the first round allocates


def longest_waits_ms(action: Callable[[], object], rounds: int) -> tuple[list[float], float]:
    """The longest wait for the GIL in each round, in ms, and the median duration of ``action`` in s."""
    found, durations = [], []
    for _ in range(rounds):
        ended, longest = threading.Event(), 0.0

        def ask(ended: threading.Event = ended) -> None:
            nonlocal longest
            while not ended.is_set():
                start_s = time.perf_counter()
                time.sleep(0)  # gives the GIL away, and wants it back
                longest = max(longest, time.perf_counter() - start_s)

        thread = threading.Thread(target=ask)
        thread.start()
        start_s = time.perf_counter()
        action()
        durations.append(time.perf_counter() - start_s)
        ended.set()
        thread.join()
        found.append(longest * 1e3)
    return found, statistics.median(durations)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=float, default=1500.0, help="of the state (default: 1500, that of GPT-2)")
    parser.add_argument("--tensors", type=int, default=148, help="parameters (default: 148)")
    parser.add_argument("--folder", type=Path, default=Path("/tmp/gradcast-snapshot-writer"))
    parser.add_argument("--rounds", type=int, default=5, help="how often each is measured (default: 5)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    module, optimizer = state_of(args.mb, args.tensors)
    ours, theirs = copy_rates(module, optimizer, args.rounds)
    shares = [mine / other for mine, other in zip(ours, theirs, strict=True)]
    print(f"copies {statistics.median(ours):.2f} GB/s, memcpy {statistics.median(theirs):.2f} GB/s, "
          f"{statistics.median(shares):.2f} of it ({min(shares):.2f} to {max(shares):.2f})")  # fmt: skip
    copies, layout = Copies(module, [optimizer], 0, 1), Layout()
    copies.begin()
    copies.copy_rest()
    values = copies.values()

    def write() -> None:
        shutil.rmtree(args.folder, ignore_errors=True)
        writing = Writing(args.folder, 1, 0, layout, Pace())
        part = writing.write_part(values, {file_of(0): b"", COMMON: b""})
        layout.take_in([part])
        writing.complete([part], list(values), world_size=1, is_local=False)

    def read() -> None:
        reading = Reading(place_of(args.folder, 1))
        assert not reading.load(reading.files)

    def save() -> None:
        shutil.rmtree(args.folder)
        args.folder.mkdir()
        torch.save({".".join(path): value for path, value in values.items()}, args.folder / "whole.pt")

    rows = []
    actions = {"nothing": lambda: time.sleep(1), "the writer": write, "reading": read, "torch.save": save}
    for name, action in actions.items():
        waits, duration_s = longest_waits_ms(action, args.rounds)
        rows.append([name, duration_s, statistics.median(waits), max(waits)])
    head = ["", "s", "longest wait for the GIL, median ms", "most"]
    print(tabulate(rows, headers=head, tablefmt="github", floatfmt=".2f"))
    shutil.rmtree(args.folder)


if __name__ == "__main__":
    main()
