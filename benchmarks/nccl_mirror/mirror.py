"""What a step takes beside ranks that are only mirrored: stock DDP, FSDP2 and gradcast, on one GPU.

    python -m benchmarks.nccl_mirror.mirror --library build-gpu/benchmarks/nccl_mirror/libnccl.so.2 [--gbit 10,25] \\
        [--compiled] [--optimizer foreach]

This process is rank 0 of 16; the others do what it does, inside of the library, which torch takes for NCCL. Compute,
kernels, launches, streams, Python, c10d, DDP, FSDP2 and gradcast are real; the wire is a link with a latency and a
rate. Not shown: ranks that differ, real algorithms and networks, and what they take from the GPU.

First it checks that DDP and gradcast train as one process alone does, bit for bit: 16 is a power of two. Then all ways
to train take turns, for each model and network. Printed are the median step and its range over the turns, for how long
of a step no kernel computed, the CPU time of the training thread (which includes waiting for the GPU where torch
spins), the step that gradcast has predicted, and how often its step goes into that of the best DDP, turn by turn. FSDP2
is there for its time only, since a mirrored gather replicates rank 0's shard. "gradcast overlap 2" has at most 2 blocks
in the GPU's queue at a time. "gradcast fallback" is overlap mode that has found nothing to gain, attached to the bare
module or to DDP, which then reduces by itself. From a trace of some steps come the kernels of a step, and the calls of
the host that record an event, let a stream wait for one, or ask whether it is over.

Goals are printed beside what was measured, and not asserted.

``--device cpu`` shows with small models that the rest works. There torch's "fake" group takes the place of NCCL: it
sends nothing, adds nothing up, takes no time, and does not serve DDP.
"""

import argparse
import contextlib
import ctypes
import functools
import gc
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from benchmarks.gpu_ranks import device_of
from benchmarks.gpu_training import traced
from benchmarks.on_hosts import in_turns
from tabulate import tabulate
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed import fake_pg  # noqa: F401, registers the group

import gradcast
from gradcast import _core
from gradcast.host_traffic import Hosts
from gradcast.intervals import busy_periods_ns
from gradcast.lab.models import load_example
from gradcast.training.plan.expectation import Expectation
from gradcast.training.ranks import hosts
from gradcast.training.ranks.store_gather import StoreGather

WORKERS = 16
_SETTLED = 28  # steps until gradcast follows its plan: 6 measure, twice 9 hold a plan against what it takes, and some
_CHECKED_STEPS = 24
_TRACED_STEPS = 3
_EDGE_STEPS = 2  # before and after those that are measured
_LEFT_OUT = 3  # exit status where not all was measured
_AS_PREDICTED, _GAIN = "measured / predicted", "x best DDP"  # columns
# Calls in a trace: what they begin with, and their column.
_CALLS = {"cudaEventRecord": "records", "cudaStreamWaitEvent": "waits", "cudaEventQuery": "queries"}


@contextlib.contextmanager
def rank_zero(world_size: int, backend: str) -> Iterator[None]:
    """This process is rank 0 of so many. What the others would say through torch's store is what this one says, and
    each has a host of its own. What they would say through the process group is the backend's matter."""
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    own_hosts = Hosts(tuple(range(world_size))), None
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=world_size)
    with (
        mock.patch.object(StoreGather, "gather", lambda _, value: [value] * world_size),
        mock.patch.object(hosts, "agreed", return_value=own_hosts),
    ):
        yield
    dist.destroy_process_group()


class Bottleneck(nn.Module):
    """He et al. 2015, "Deep residual learning for image recognition", figure 5."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for before, after, size, step in ((inputs, width, 1, 1), (width, width, 3, stride), (width, 4 * width, 1, 1)):
            layers += [nn.Conv2d(before, after, size, step, size // 2, bias=False), nn.BatchNorm2d(after), nn.ReLU()]
        self.layers = nn.Sequential(*layers[:-1])
        is_same = stride == 1 and inputs == 4 * width
        self.shortcut: nn.Module = nn.Identity()
        if not is_same:
            convolution = nn.Conv2d(inputs, 4 * width, 1, stride, bias=False)
            self.shortcut = nn.Sequential(convolution, nn.BatchNorm2d(4 * width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.layers(x) + self.shortcut(x))


def resnet(
    depths: tuple[int, ...] = (3, 4, 6, 3), width: int = 64, classes: int = 1000, pool: type[nn.Module] = nn.MaxPool2d
) -> nn.Module:
    """ResNet-50 by default."""
    first = nn.Sequential(nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU())
    blocks: list[nn.Module] = []
    inputs = width
    for stage, depth in enumerate(depths):
        for number in range(depth):
            blocks.append(Bottleneck(inputs, width << stage, 2 if number == 0 and stage > 0 else 1))
            inputs = 4 * width << stage
    last = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes))
    return nn.Sequential(first, pool(3, 2, 1), *blocks, *last)


def gpt(width: int = 768, depth: int = 12, words: int = 50257, context: int = 1024) -> nn.Module:
    """GPT-2 with 124 M parameters by default."""
    example = load_example("char_gpt")
    example.CONTEXT = context
    model = example.GPT(width, depth, heads=width // 64)
    model.bytes, model.head = nn.Embedding(words, width), nn.Linear(width, words, bias=False)
    nn.init.normal_(model.bytes.weight, std=0.02)
    model.head.weight = model.bytes.weight
    return model


def _images(count: int, size: int, classes: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(count, 3, size, size), torch.randint(classes, (count,))


def _texts(count: int, words: int, context: int) -> tuple[torch.Tensor, torch.Tensor]:
    texts = torch.randint(words, (count, context + 1))
    return texts[:, :-1], texts[:, 1:]


class Task(NamedTuple):
    model: Callable[[], nn.Module]
    batch: Callable[[int], tuple[torch.Tensor, torch.Tensor]]  # of so many samples
    size: int


TASKS = {
    "ResNet-50": Task(resnet, lambda size: _images(size, 224, 1000), 128),
    "GPT-2 124M": Task(gpt, lambda size: _texts(size, 50257, 1024), 8),
}
# On a GPU, the gradient of MaxPool2d differs from call to call.
SMALL_TASKS = {
    "small ResNet": Task(lambda: resnet((1, 1), 8, 10, nn.AvgPool2d), lambda size: _images(size, 32, 10), 4),
    "small GPT": Task(lambda: gpt(64, 2, 50, 16), lambda size: _texts(size, 50, 16), 4),
}
FALLBACK = "gradcast fallback"
WAYS = (
    *("alone", "DDP 4 MiB", "DDP 25 MiB", "DDP 100 MiB", "FSDP2", "gradcast hook", "gradcast overlap"),
    *(f"gradcast overlap {window}" for window in (1, 2, 16)),
    *(FALLBACK, f"{FALLBACK} DDP"),
)
_CHECKED = ("alone", "DDP 4 MiB", "gradcast hook", "gradcast overlap")
OPTIMIZERS = ("fused", "foreach")


def ways_on(device: torch.device, *ways: str) -> list[str]:
    return [way for way in ways if device.type == "cuda" or "DDP" not in way]


def begin_compiling() -> None:
    """Before another model's blocks are compiled. They share their code, and what is compiled of one piece of code more
    often than torch allows runs uncompiled, which is an error here."""
    torch._dynamo.reset()
    torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit
    torch._dynamo.config.fail_on_recompile_limit_hit = True


class Training:
    """``way``: one of WAYS. ``compiled``: the model's blocks."""

    def __init__(
        self,
        task: Task,
        way: str,
        device: torch.device,
        optimizer: Callable[..., torch.optim.Optimizer],
        *,
        compiled: bool = False,
    ) -> None:
        torch.manual_seed(0)
        self.module = task.model().to(device)
        self._inputs, self._targets = (each.to(device) for each in task.batch(task.size))
        self._device, self.handle, self._model, self._falls_back = device, None, self.module, False
        blocks = [each for each in self.module.modules() if type(each).__name__ in ("Block", "Bottleneck")]
        for block in blocks if compiled else ():
            block.compile(backend="inductor" if device.type == "cuda" else "aot_eager", dynamic=False)
        if way == "FSDP2":
            for block in blocks:
                fully_shard(block, reshard_after_forward=False)
            fully_shard(self.module, reshard_after_forward=False)
        self._optimizer = optimizer(self.module.parameters())
        name, *size = way.split()
        if name == "DDP":
            self._model = DistributedDataParallel(self.module, bucket_cap_mb=int(size[0]), gradient_as_bucket_view=True)
        elif name == "gradcast":
            mode, *window = size
            self._falls_back = mode == "fallback"
            if window == ["DDP"]:
                self._model = DistributedDataParallel(self.module, gradient_as_bucket_view=True)
                window = []
            limited = dict(zip(["queue_window"], map(int, window), strict=False))
            with mock.patch.object(_core, "Engine", functools.partial(_core.Engine, **limited)):
                self.handle = gradcast.attach(self._model, self._optimizer if mode != "hook" else None)

    def step(self) -> None:
        self._optimizer.zero_grad()
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self._device.type == "cuda"):
            outputs = self._model(self._inputs)
            loss = cross_entropy(outputs.flatten(0, -2), self._targets.flatten())
        loss.backward()
        self._optimizer.step()

    def settle(self) -> None:
        """Steps until gradcast follows its plan, or DDP reduces by itself."""
        self.spend(_SETTLED if self.handle is not None else 1)
        if self._falls_back and self._model is not self.module:
            for _ in range(_SETTLED):
                if self.handle.stats()["reduced_by_ddp"]:
                    return
                self.spend(4)
            print("DDP does not reduce by itself: the log says why", file=sys.stderr)

    def spend(self, steps: int) -> tuple[float, float]:
        """ms per step, and ms of the training thread's CPU, of so many steps in the middle of some."""
        moments = []
        no_gain = mock.patch.object(Expectation, "is_worth_trying", False)
        with no_gain if self._falls_back else contextlib.nullcontext():
            for number in range(steps + 2 * _EDGE_STEPS):
                if number in (_EDGE_STEPS, _EDGE_STEPS + steps):
                    moments.append((self._now(), time.thread_time()))
                self.step()
        self.complete()
        (begin, cpu_begin_s), (end, cpu_end_s) = moments
        return self._elapsed_ms(begin, end) / steps, 1e3 * (cpu_end_s - cpu_begin_s) / steps

    def complete(self) -> None:
        if self.handle is not None:
            self.handle.flush()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _now(self) -> Any:
        """Where the device is, which need not be where the host is."""
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _elapsed_ms(self, begin: Any, end: Any) -> float:
        return begin.elapsed_time(end) if self._device.type == "cuda" else 1e3 * (end - begin)

    def end(self) -> dict[str, Any]:
        """Returns what gradcast says of the steps."""
        if self.handle is None:
            return {}
        self.handle.flush()
        stats = self.handle.stats()
        self.handle.detach()
        return stats


def differing(task: Task, device: torch.device, mean: float, *, compiled: bool = False) -> list[str]:
    """The ways whose parameters are not those of a training alone, in any bit. ``mean``: what the group makes of the
    mean of equal gradients, as a multiple of one; a power of two, which the learning rate makes up for."""
    found = {}
    if compiled:
        begin_compiling()
    for way in ways_on(device, *_CHECKED):
        rate = 1 / 64 if way == "alone" else 1 / 64 / mean
        sgd = functools.partial(torch.optim.SGD, lr=rate, momentum=0.9)
        training = Training(task, way, device, sgd, compiled=compiled)
        for _ in range(_CHECKED_STEPS):
            training.step()
        training.end()
        found[way] = [each.detach().clone() for each in training.module.parameters()]
    return [way for way in found if not all(map(torch.equal, found[way], found["alone"]))]


class Measured:
    """A way to train, and what its turns took."""

    def __init__(self, training: Training) -> None:
        self.training = training
        self.step_ms: list[float] = []
        self.cpu_ms: list[float] = []
        self.traced: dict[str, float] = {}  # of a step

    def take_turn(self, steps: int) -> None:
        step_ms, cpu_ms = self.training.spend(steps)
        self.step_ms.append(step_ms)
        self.cpu_ms.append(cpu_ms)

    def trace(self, path: str) -> None:
        """A Chrome trace of some steps, which take longer then."""
        events = traced(lambda: [self.training.step() for _ in range(_TRACED_STEPS)], path)
        self.training.complete()
        counts = {"idle, ms": idle_ms(events)} | counted(events)
        self.traced = {name: count / _TRACED_STEPS for name, count in counts.items()}

    def row(self, ddp: "Measured | None") -> dict[str, Any]:
        """Columns of the table. ``ddp``: what this is compared with."""
        ratios = [] if ddp is None else [theirs / own for theirs, own in zip(ddp.step_ms, self.step_ms, strict=True)]
        median_ms, predicted_ms = statistics.median(self.step_ms), self.training.end().get("predicted_ms")
        is_predicted = None if predicted_ms is None else median_ms / predicted_ms
        return {
            **dict(zip(("step, ms", "range"), spread(self.step_ms, ".1f"), strict=True)),
            "CPU, ms": statistics.median(self.cpu_ms),
            "predicted, ms": predicted_ms,
            _AS_PREDICTED: is_predicted,
            **dict(zip((_GAIN, "its range"), spread(ratios, ".3f"), strict=True)),
            **self.traced,
        }


def spread(values: Sequence[float], digits: str) -> list[str | None]:
    """The median, and the range."""
    if not values:
        return [None, None]
    return [format(statistics.median(values), digits), f"{min(values):{digits}} to {max(values):{digits}}"]


def compared(
    task: Task, ways: Sequence[str], device: torch.device, args: argparse.Namespace, name: str, end_s: float
) -> tuple[list[dict[str, Any]], int]:
    """Rows of the table, and how many turns each way has had. ``name``: that of the traces. ``end_s``: when no further
    round of turns begins."""
    if args.compiled:
        begin_compiling()
    adamw = functools.partial(torch.optim.AdamW, lr=1e-4, **{args.optimizer: True})
    found = {way: Measured(Training(task, way, device, adamw, compiled=args.compiled)) for way in ways}
    for each in found.values():
        each.training.settle()
    turns = 0
    for number, way in enumerate(in_turns(ways, args.turns)):
        if number % len(ways) == 0:
            if number > 0 and time.monotonic() > end_s:
                break
            turns += 1
        found[way].take_turn(args.steps)
    with tempfile.TemporaryDirectory() as folder:
        for way in ways if device.type == "cuda" else ():
            found[way].trace(os.path.join(args.traces or folder, f"{name}, {way}.json".replace(" ", "-")))
    stock = [each for way, each in found.items() if way.startswith("DDP")]
    ddp = min(stock, key=lambda each: statistics.median(each.step_ms), default=None)
    return [{"": way, **each.row(None if way == "alone" else ddp)} for way, each in found.items()], turns


def idle_ms(events: Iterable[dict[str, Any]]) -> float:
    """ms for which, between the first and the last kernel of a Chrome trace, none computes. NCCL's do not compute."""
    spans = [
        (event["ts"], event["ts"] + event["dur"])
        for event in events
        if event.get("ph") == "X" and event.get("cat") == "kernel" and "nccl" not in event["name"].lower()
    ]
    whole_us = max(end for _, end in spans) - min(begin for begin, _ in spans)
    return (whole_us - sum(busy_periods_ns(spans))) / 1e3


def counted(events: Iterable[dict[str, Any]]) -> dict[str, int]:
    """Kernels in a Chrome trace, and the host's calls about events of CUDA."""
    found = dict.fromkeys(("kernels", *_CALLS.values()), 0)
    for event in events:
        if event.get("cat") == "kernel":
            found["kernels"] += 1
        elif event.get("cat") == "cuda_runtime":
            for begin, column in _CALLS.items():
                found[column] += event["name"].startswith(begin)
    return found


def goals(row: dict[str, Any], task: str, gbit: float, *, compiled: bool) -> Iterator[str]:
    """For the reader: a mirrored run on another GPU may miss them."""
    way, gain, as_predicted = row[""], row[_GAIN], row[_AS_PREDICTED]
    if gain is not None and way.startswith(FALLBACK):
        yield f"goal: {way} at least 0.99 x best DDP, measured {gain} ({task}, {gbit:g} Gbit/s)"
    if gain is not None and not compiled and (task, way, gbit) == ("ResNet-50", "gradcast overlap", 25):
        yield f"goal: {way} at least 1.3 x best DDP, measured {gain} ({task}, {gbit:g} Gbit/s)"
    if as_predicted is not None and compiled:
        yield f"goal: {way} within 5 % of the prediction, measured {as_predicted:.3f} of it ({task}, {gbit:g} Gbit/s)"


def has_any(name: str, words: Sequence[str]) -> bool:
    """A word that is a whole name stands for this one only."""
    return any(word == name or (word in name and word not in WAYS) for word in words)


def table(tasks: dict[str, Task], device: torch.device, args: argparse.Namespace, set_link: Any) -> list[str]:
    """Prints a table for each model and network, as long as there is time. Returns what was left out."""
    end_s = time.monotonic() + 60 * args.minutes
    left_out = []
    for name, task in tasks.items():
        for gbit in args.gbit if has_any(name, args.models) else ():
            set_link(ctypes.c_double(gbit), ctypes.c_double(args.latency_us))
            how = f"{'compiled blocks' if args.compiled else 'eager'}, AdamW {args.optimizer}"
            title = f"{name}, {how}, {args.workers} ranks, {gbit:g} Gbit/s, {args.latency_us:g} us"
            if time.monotonic() > end_s:
                left_out.append(title)
                continue
            ways = [each for each in ways_on(device, *WAYS) if has_any(each, args.ways)]
            rows, turns = compared(task, ways, device, args, f"{name}, {gbit:g}", end_s)
            if turns < args.turns:
                left_out.append(f"{args.turns - turns} of {args.turns} turns of {title}")
            print(f"\nmeasured: {title}")
            print(tabulate(rows, "keys", "github", floatfmt=".2f", disable_numparse=[1, 2, 6, 7]), flush=True)
            for each in rows:
                for line in goals(each, name, gbit, compiled=args.compiled):
                    print(line, flush=True)
            gc.collect()
    return left_out


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", help="the mirror of NCCL: libnccl.so.2 of this folder's build")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--workers", type=int, default=WORKERS, help=f"a power of two (default: {WORKERS})")
    rates = {"type": lambda text: [float(each) for each in text.split(",")], "default": [10.0, 25.0, 100.0, 400.0]}
    parser.add_argument("--gbit", **rates, help="of each rank's link (default: 10,25,100,400)")
    words = {"type": lambda text: text.split(","), "default": [""], "metavar": "WORD,..."}
    parser.add_argument("--models", **words, help="those with such a word in their name (default: all)")
    parser.add_argument("--ways", **words, help="to train: those with such a word in their name (default: all)")
    parser.add_argument("--compiled", action="store_true", help="the model's blocks are compiled")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="fused", help="AdamW's kernels (default: fused)")
    parser.add_argument("--latency-us", type=float, default=20, help="of each operation (default: 20)")
    parser.add_argument("--batch", type=int, help="samples a step (default: 128 images, 8 texts)")
    parser.add_argument("--turns", type=int, default=5, help="of each way to train (default: 5)")
    parser.add_argument("--steps", type=int, default=6, help="that are measured in a turn (default: 6)")
    parser.add_argument("--traces", metavar="FOLDER", help="keep the Chrome traces of some steps")
    parser.add_argument("--minutes", type=float, default=6, help="after which nothing more is begun (default: 6)")
    args = parser.parse_args()
    is_cuda = args.device == "cuda"
    tasks = TASKS if is_cuda else SMALL_TASKS
    if args.batch:
        tasks = {name: task._replace(size=args.batch) for name, task in tasks.items()}
    for word, names in [(each, tasks) for each in args.models] + [(each, WAYS) for each in args.ways]:
        if not any(word in name for name in names):
            parser.error(f"no name has {word!r}; there are: {', '.join(names)}")
    device = device_of(args.device)
    set_link = getattr(ctypes.CDLL(None), "nccl_mirror_set_link", None)
    if is_cuda and set_link is None:
        library = os.path.abspath(args.library or "")
        if not os.path.isfile(library) or os.environ.get("LD_PRELOAD") == library:
            print("--library has to name the mirror of NCCL (make all builds it where nvcc is)", file=sys.stderr)
            return 1
        # torch has loaded the real one: start again with the mirror in front of it.
        environment = os.environ | {"LD_PRELOAD": library}
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)
    with rank_zero(args.workers, "nccl" if is_cuda else "fake"):
        torch.use_deterministic_algorithms(True)
        wrong = [
            f"{way} ({name})"
            for name, task in SMALL_TASKS.items()
            for way in differing(task, device, 1.0 if is_cuda else 1 / args.workers, compiled=args.compiled)
        ]
        torch.use_deterministic_algorithms(False)
        if wrong:
            print(f"not the parameters of a training alone: {', '.join(wrong)}", file=sys.stderr)
            return 1
        print(f"{', '.join(ways_on(device, *_CHECKED))}: the same parameters after {_CHECKED_STEPS} steps, bit for bit")
        left_out = table(tasks, device, args, set_link or (lambda *_: None))
    for each in left_out:
        print(f"left out, because {args.minutes:g} minutes were over: {each}")
    return _LEFT_OUT if left_out else 0


if __name__ == "__main__":
    sys.exit(main())
