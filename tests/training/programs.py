"""Whole programs of one rank, started as torchrun starts them: python -m training.programs <name> <arguments>.

Each prints one line of JSON that begins with what it has to tell; how it leaves is what the tests look at.
gradcast is imported where a program uses it: what it does at exit then runs before what the program registered earlier.
"""

import atexit
import contextlib
import json
import os
import random
import signal
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import torch
from torch import distributed, nn

from training import compare
from training.bomb import Bomb
from training.models import TASKS
from training.threads import threads_named

RANK = int(os.environ["RANK"])
TIMEOUT_S = float(os.environ.get("TEST_TIMEOUT_S", "5"))


def tell(**values) -> None:
    print(json.dumps(values), flush=True)


class Training:
    """``side`` is "ours" (attached, not flushed) or "theirs" (stock DDP)."""

    def __init__(self, side: str, mode: str = "overlap", task: str = "plain", **options) -> None:
        # A store of the test's own, where it gives one: then no rank is its host.
        port = os.environ.get("TEST_STORE_PORT")
        store = None
        if port:
            store = distributed.TCPStore("127.0.0.1", int(port), is_master=False)
            store = distributed.PrefixStore(os.environ["MASTER_PORT"], store)  # another one for each launch
        ranks = {"store": store, "rank": RANK, "world_size": int(os.environ["WORLD_SIZE"])} if store else {}
        distributed.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT_S), **ranks)
        self.task = TASKS[task]
        self.module = self.task.module(seed=RANK)
        self.forward = self.module
        self.handle = None
        if side == "theirs":
            self.forward = nn.parallel.DistributedDataParallel(self.module)
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=0.1, momentum=0.9)
        if side == "ours":
            from training.attached import attach  # imports gradcast, which the other side does without

            self.handle = attach(self.module, self.optimizer, mode, **options)

    def loss(self, number: int) -> torch.Tensor:
        self.optimizer.zero_grad()
        return self.task.loss(self.forward, self.task.batch(RANK, number))

    def step(self, number: int) -> None:
        self.loss(number).backward()
        self.optimizer.step()

    def steps(self, count: int, first: int = 0) -> None:
        for number in range(first, first + count):
            self.step(number)

    def finish(self) -> None:
        """Four steps after the first four."""
        self.steps(4, first=4)
        self.handle.flush()


def falls_off_the_end(side: str, mode: str) -> None:
    """Nothing is read after the last step, and nothing is destroyed."""
    Training(side, mode).steps(6)
    tell(done=True)


def reads_at_exit(side: str, registered: str) -> None:
    """A handler that was registered before or after attach, as savers and loggers do."""
    trained = []

    def read() -> None:
        tell(digest=compare.digest(trained[0].module))

    if registered == "first":
        atexit.register(read)
    trained.append(Training(side))
    if registered == "last":
        atexit.register(read)
    trained[0].steps(6)


def destroys_group(side: str, mode: str) -> None:
    """The usual end of a script; then the model is saved."""
    training = Training(side, mode)
    training.steps(6)
    distributed.destroy_process_group()
    tell(digest=compare.digest(training.module))


def leaves_groups_open(way: str) -> None:
    """Leaves groups open as the doctor does, and tells how many threads of Gloo there are in use and at the end."""

    def tell_threads() -> None:
        time.sleep(0.5)  # for that long the system may still list one that was joined
        tell(threads=len(threads_named("gloo")))

    atexit.register(tell_threads)  # runs after what is registered later
    from gradcast.training.ranks.group import Group
    from gradcast.training.ranks.group_pool import lasting_group

    distributed.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT_S))
    for name in ("one", "another"):
        own = lasting_group([0, 1], timedelta(seconds=TIMEOUT_S), "gloo", name)
        tell(sum=sum(Group(RANK, 2, own=own).gather(RANK + 1)))
    tell_threads()
    if way == "destroys":
        distributed.destroy_process_group()


def exits(side: str, how: str) -> None:
    training = Training(side)
    training.steps(6)
    tell(done=True)
    if how == "sys.exit":
        sys.exit(7)
    if how == "os._exit":
        os._exit(7)
    raise RuntimeError("the user's own error")


def report_error(work) -> None:
    """Tells of the error of gradcast, how long it took, and the threads that are left."""
    start_s = time.monotonic()
    try:
        work()
    except BaseException as error:
        waited_s = time.monotonic() - start_s
        tell(error=type(error).__name__, code=getattr(error, "code", None), message=str(error), waited_s=waited_s)
        raise
    tell(error=None)


def loads_data_in_processes(side: str) -> None:
    """Data comes from processes that are forked while gradients travel."""
    training = Training(side)
    training.steps(4)
    numbers = torch.utils.data.TensorDataset(torch.arange(8))
    for _ in range(2):
        for (number,) in torch.utils.data.DataLoader(numbers, batch_size=None, num_workers=2):
            training.step(int(number))
    tell(digest=compare.digest(training.module))


def forks(mode: str) -> None:
    """Children that read parameters whose update is pending, and leave as a program does, destructors and all."""
    training = Training("ours", mode)
    training.steps(6)
    for number in range(6, 9):
        training.step(number)
        child = os.fork()
        if child == 0:
            with torch.no_grad():
                training.module(training.task.batch(RANK, 0)[0])
            ordinary = all(type(parameter) is nn.Parameter for parameter in training.module.parameters())
            tell(child=compare.digest(training.module), ordinary=ordinary)
            sys.exit(0)
        deadline_s = time.monotonic() + 10
        while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0) and time.monotonic() < deadline_s:
            time.sleep(0.01)
        if ended == (0, 0):
            os.kill(child, signal.SIGKILL)
        tell(parent=compare.digest(training.module), code=ended[1] if ended[0] else "hangs")


def is_disturbed(mode: str, task: str, steps: str, marker: str) -> None:
    """Makes the file ``marker`` when the plan is in force; what happens from then on is the test's business."""
    training = Training("ours", mode, task)

    def go_on():
        for number in range(int(steps)):
            if number == 6 and RANK == 0:
                Path(marker).touch()
            training.step(number)
            time.sleep(0.02)
        training.handle.flush()
        tell(digest=compare.digest(training.module))

    report_error(go_on)


def runs_one_more(mode: str, other_rank: str) -> None:
    """One rank has a batch more than the others, which have ended in order."""
    training = Training("ours", mode)
    training.steps(6)
    training.handle.flush()

    def go_on():
        if int(other_rank) == RANK:
            training.step(6)
            training.handle.flush()
        else:
            time.sleep(TIMEOUT_S + 4)

    report_error(go_on)


def _held() -> dict[str, int]:
    """What a process must not have more and more of."""
    resident_pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "resident_kib": resident_pages * os.sysconf("SC_PAGE_SIZE") // 1024,
        "threads": len(os.listdir("/proc/self/task")),
        "files": len(os.listdir("/proc/self/fd")),
    }


def soaks(steps: str, folder: str) -> None:
    """Long training beside DDP, in double precision: stragglers, evaluation, checkpoints, plan changes."""
    distributed.init_process_group("gloo", timeout=timedelta(seconds=60))
    import gradcast
    from training.attached import planning

    task = TASKS["plain"]
    ours, theirs = task.module().double(), task.module().double()
    ddp = nn.parallel.DistributedDataParallel(theirs)
    sgds = [torch.optim.SGD(module.parameters(), lr=0.01, momentum=0.9) for module in (theirs, ours)]
    handle = gradcast.attach(ours, sgds[1], options=gradcast.Options(plan=planning(warmup_steps=5), compare_every=50))
    chance = random.Random(RANK)
    plans, held, largest = [], [], 0.0
    for number in range(int(steps)):
        inputs, targets = task.batch(RANK, number)
        for forward, sgd in ((ddp, sgds[0]), (ours, sgds[1])):
            if chance.random() < 0.03:
                time.sleep(chance.uniform(0.0, 0.1))
            sgd.zero_grad(set_to_none=number % 3 > 0)
            nn.functional.cross_entropy(forward(inputs.double()), targets).backward()
            sgd.step()
        if number % 100 == 20:
            # Between two plans by turns, and through a file, as a checkpoint.
            plans = [*plans[-1:], handle.state_dict()]
            path = Path(folder) / f"rank{RANK}.pt"
            torch.save({"module": ours.state_dict(), "optimizer": sgds[1].state_dict(), "gradcast": plans[0]}, path)
            state = torch.load(path)
            ours.load_state_dict(state["module"])
            sgds[1].load_state_dict(state["optimizer"])
            handle.load_state_dict(state["gradcast"])
        if number % 70 == 30:
            ours.eval()
            with torch.no_grad():
                ours(inputs.double())
            ours.train()
        if number == int(steps) // 8:
            # The model changes: measured again, early, before what is held is compared.
            for module, sgd in ((theirs, sgds[0]), (ours, sgds[1])):
                torch.manual_seed(5)
                module.append(nn.Linear(10, 10).double())
                sgd.add_param_group({"params": list(module[-1].parameters())})
            ddp = nn.parallel.DistributedDataParallel(theirs)
            plans = []
        if number % 100 == 99:
            handle.flush()
            largest = max(largest, compare.largest(ours, theirs))
            held.append(_held())
            if RANK == 0:
                Path(folder, "progress").write_text(str(number + 1))
    handle.flush()
    tell(largest=largest, held=held, digest=compare.digest(ours))


def restarts(mode: str, folder: str, killed_step: str) -> None:
    """Started by torchrun. Writes a checkpoint with plan every other step; in its first life rank 1 kills itself."""
    life = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    training = Training("ours", mode, policy="fifo")
    path, first = Path(folder, "checkpoint.pt"), 0
    parts = {"module": training.module, "optimizer": training.optimizer, "gradcast": training.handle}
    if path.exists():
        state = torch.load(path)
        first = state["step"]
        for name, part in parts.items():
            part.load_state_dict(state[name])
    policy = training.handle.plan.policy
    for number in range(first, 16):
        if (life, RANK, number) == (0, 1, int(killed_step)):
            os.kill(os.getpid(), signal.SIGKILL)
        training.step(number)
        if number % 2 and RANK == 0:
            torch.save({name: part.state_dict() for name, part in parts.items()} | {"step": number + 1}, f"{path}.new")
            os.replace(f"{path}.new", path)
    training.handle.flush()
    if RANK == 0:
        tell(life=life, first=first, policy=policy, digest=compare.digest(training.module))
    distributed.destroy_process_group()


def fails_in_backward(mode: str, failing_rank: str) -> None:
    """One rank raises when half of its gradients exist."""
    training = Training("ours", mode)
    training.steps(4)
    if int(failing_rank) == RANK:
        training.module[4].register_forward_hook(lambda module, inputs, output: Bomb.apply(output))
    report_error(training.finish)


def is_killed(mode: str, killed_rank: str, moment: str) -> None:
    """One rank is gone from one moment to the next."""
    training = Training("ours", mode)
    training.steps(4)
    if int(killed_rank) == RANK:
        module = training.module
        register = module[4].register_full_backward_hook if moment == "backward" else module.register_forward_hook
        register(lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    report_error(training.finish)


def is_interrupted(mode: str, interrupted_rank: str) -> None:
    """Ctrl-C on a rank that waits for another one, which does not come."""
    training = Training("ours", mode)
    training.steps(4)

    def go_on():
        if int(interrupted_rank) != RANK:
            time.sleep(1.0)
            return
        threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        training.step(4)
        training.handle.flush()

    report_error(go_on)


def catches_and_leaves(mode: str, failing_rank: str) -> None:
    """A survivor that catches the error detaches, which tells the error again, and then has an ordinary module."""
    training = Training("ours", mode)
    training.steps(4)
    if int(failing_rank) == RANK:
        os._exit(3)
    try:
        training.step(4)
        training.handle.flush()
    except RuntimeError as error:
        tell(error=type(error).__name__, code=getattr(error, "code", None), message=str(error))
    with contextlib.suppress(RuntimeError):
        training.handle.detach()
    training.loss(5).backward()
    training.optimizer.step()
    finite = all(bool(torch.isfinite(parameter).all()) for parameter in training.module.parameters())
    ordinary = all(type(parameter) is nn.Parameter for parameter in training.module.parameters())
    tell(finite=finite, ordinary=ordinary)


if __name__ == "__main__":
    torch.set_num_threads(1)
    globals()[sys.argv[1]](*sys.argv[2:])
