"""Replicas of a torchft job on this host, in processes of their own, in the environment with torchft.

``python -m tests.frameworks.torchft_cases CASE '{"how": "gradcast", ...}'`` prints what each step of each replica came
to, as a JSON object by replica and start: {"0.0": [...], "1.0": [...], "1.1": [...]}. The fields are those of Job.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo
from torchft.coordination import LighthouseServer
from torchft.manager import WorldSizeMode

import gradcast
from gradcast.frameworks.torchft import attach

TIMEOUT = timedelta(seconds=20)
MIN_REPLICAS = 2


@dataclasses.dataclass
class Job:
    """``how``: "gradcast", or "ddp" for torchft's own. ``pause_s``: before each step, so that a replica that starts
    again finds the others at work. ``dies_after``: so many steps with all replicas, replica 1 dies inside backward."""

    how: str = "gradcast"
    replicas: int = 2
    steps: int = 12
    width: int = 64
    layers: int = 6
    samples: int = 8
    mode: str = "DYNAMIC"
    least: int = 2  # replicas in a quorum
    waits: bool = False  # for the quorum before forward, so that a replica heals before it trains
    pause_s: float = 0.0
    dies_after: int = -1
    seed: int = 0
    folder: str = ""
    lighthouse: str = ""


# --- A replica ---


def make_manager(lighthouse, model, sgd, name, *, mode="DYNAMIC", least=MIN_REPLICAS, waits=False):
    def load(state):
        model.load_state_dict(state["model"])
        sgd.load_state_dict(state["sgd"])

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=TIMEOUT),
        use_async_quorum=not waits,
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "sgd": sgd.state_dict()},
        min_replica_size=least,
        world_size_mode=WorldSizeMode[mode],
        replica_id=f"r{name}",
        store_addr="127.0.0.1",
        store_port=store.port,
        rank=0,
        world_size=1,
        lighthouse_addr=lighthouse,
        timeout=TIMEOUT,
        hostname="127.0.0.1",
    )
    manager.store_of_test = store  # lives as long as the manager
    return manager


def make_model(job, seed=0):
    torch.manual_seed(seed)
    layers = [layer for _ in range(job.layers) for layer in (nn.Linear(job.width, job.width), nn.Tanh())]
    model = nn.Sequential(*layers)
    return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def batch(job, step, number):
    """Of this replica and step, so that a step that is made again has the same."""
    return torch.randn(job.samples, job.width, generator=torch.Generator().manual_seed(1000 * step + number))


def replica(job, number, start):
    """Trains until as many steps are committed as the file "last" says, once there is one."""
    torch.set_num_threads(1)
    # One that starts again has other weights until it has healed.
    model, sgd = make_model(job, seed=start)
    manager = make_manager(job.lighthouse, model, sgd, number, mode=job.mode, waits=job.waits)
    if job.how == "gradcast":
        options = gradcast.Options(plan=gradcast.Planning(warmup_steps=3))
        handle, trained = attach(manager, model, options=options), model
    else:
        handle, trained = None, DistributedDataParallel(manager, model)
    optimizer = Optimizer(manager, sgd)
    whole = 0  # steps with all replicas

    def die(_):
        if start == 0 and number == 1 and whole == job.dies_after:
            os.kill(os.getpid(), signal.SIGKILL)

    model[len(model) // 2].weight.register_hook(die)
    with open(log_of(job, number, start), "w") as file:
        # The lighthouse knows all replicas before the first quorum, which would not wait for others.
        while not all(log_of(job, each, 0).exists() for each in range(job.replicas)):
            time.sleep(0.01)
        while manager.current_step() < last_step(job):
            time.sleep(job.pause_s)
            before, start_s = manager.current_step(), time.perf_counter()
            optimizer.zero_grad()
            trained(batch(job, before, number)).square().mean().backward()
            optimizer.step()
            ms = 1e3 * (time.perf_counter() - start_s)
            whole += manager.num_participants() == job.replicas
            print(json.dumps(record(manager, model, handle, before) | {"ms": ms}), file=file, flush=True)
    if handle is not None:
        handle.detach()
    manager.shutdown()


def record(manager, model, handle, before):
    now = {
        "step": manager.current_step(),
        "committed": manager.current_step() > before,
        "participants": manager.num_participants(),
        "parameters": digest(model),
    }
    if handle is not None and handle.profile is not None and not handle.measuring:
        now |= {"plan": handle.plan.hash(handle.profile), "workers": handle.world_size}
    return now


def digest(model):
    numbers = hashlib.sha256()
    for each in model.parameters():
        numbers.update(each.detach().numpy().tobytes())
    return numbers.hexdigest()


def log_of(job, number, start):
    return Path(job.folder, f"{number}.{start}.jsonl")


def last_step(job):
    with contextlib.suppress(FileNotFoundError):
        return int(Path(job.folder, "last").read_text())
    return float("inf")


# --- The job ---


class Replicas:
    def __init__(self, job):
        self.job, self.starts, self.processes = job, {}, {}
        for number in range(job.replicas):
            self.start(number)

    def start(self, number):
        start = self.starts[number] = self.starts.get(number, -1) + 1
        arguments = ["replica", json.dumps(dataclasses.asdict(self.job)), str(number), str(start)]
        command = [sys.executable, "-m", "tests.frameworks.torchft_cases", *arguments]
        self.processes[number] = subprocess.Popen(command, stdout=sys.stderr)

    def kill(self, number):
        self.processes[number].send_signal(signal.SIGKILL)
        self.processes[number].wait()

    def records(self, number, start):
        with contextlib.suppress(FileNotFoundError):
            lines = log_of(self.job, number, start).read_text().splitlines(keepends=True)
            return [json.loads(line) for line in lines if line.endswith("\n")]
        return []

    def await_record(self, number, start, is_it):
        while not any(map(is_it, self.records(number, start))):
            if self.processes[number].poll() is not None:
                sys.exit(f"replica {number} has ended with {self.processes[number].returncode}")
            time.sleep(0.01)

    def step(self, number, start):
        return self.records(number, start)[-1]["step"]

    def result(self, steps):
        """Lets them train until so many steps are committed."""
        draft = Path(self.job.folder, "draft")
        draft.write_text(str(steps))
        draft.rename(draft.with_name("last"))  # whole at once
        for number, process in self.processes.items():
            if process.wait() != 0:
                sys.exit(f"replica {number} has ended with {process.returncode}")
        return {f"{n}.{start}": self.records(n, start) for n in self.starts for start in range(self.starts[n] + 1)}

    def end(self):
        for process in self.processes.values():
            process.kill()
            process.wait()


def killed(replicas):
    """Replica 1 dies inside backward and replica 0, from which others have healed, at a random moment; both start
    again. Returns the last step."""
    replicas.processes[1].wait()
    replicas.start(1)
    replicas.await_record(1, 1, lambda each: "plan" in each)
    after = replicas.step(2, 0) + 8
    replicas.await_record(2, 0, lambda each: each["step"] >= after)
    time.sleep(random.Random(replicas.job.seed).random() * replicas.job.pause_s)
    replicas.kill(0)
    replicas.start(0)
    replicas.await_record(0, 1, lambda each: "plan" in each)
    return replicas.step(2, 0) + 8


def run(case, job):
    # A replica that a busy machine holds up for longer leaves the quorum as if it were dead, and steps are lost without
    # any kill. One that is dead is waited for only as long as its last heartbeat counts.
    times = {"join_timeout_ms": 15_000, "quorum_tick_ms": 20, "heartbeat_timeout_ms": 3000}
    server = LighthouseServer(bind="127.0.0.1:0", min_replicas=job.least, **times)
    with tempfile.TemporaryDirectory() as folder:
        replicas = Replicas(dataclasses.replace(job, folder=folder, lighthouse=server.address()))
        try:
            print(json.dumps(replicas.result(killed(replicas) if case == "killed" else job.steps)))
        finally:
            replicas.end()
            server.shutdown()


# --- One replica alone, in this process ---


def alone(job):
    """What attach refuses, by what is wrong; and whether the only replica trains as without gradcast."""
    server = LighthouseServer(bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=100, quorum_tick_ms=20)
    model, sgd = make_model(job)
    manager = make_manager(server.address(), model, sgd, 0, least=1)
    said = {}

    def refused(what, function, *arguments, **named):
        try:
            function(*arguments, **named)
            said[what] = "nothing"
        except gradcast.Error as error:
            said[what] = str(error)

    refused("manager", attach, object(), model)
    refused("optimizer", attach, manager, model, sgd)
    refused("wire", attach, manager, model, options=gradcast.Options(wire="bf16"))
    refused("weight", attach, manager, model, options=gradcast.Options(weight="samples"))
    refused("clips", attach, manager, model, options=gradcast.Options(clip=gradcast.Clip(norm=1.0)))
    os.environ["GRADCAST_DISABLE"] = "1"
    refused("disabled", attach, manager, model)
    del os.environ["GRADCAST_DISABLE"]
    other, _ = make_model(job)
    ddp = DistributedDataParallel(manager, other)
    refused("ddp", attach, manager, ddp)
    refused("inside ddp", attach, manager, other)
    handle = attach(manager, model)
    refused("twice", attach, manager, make_model(job)[0])
    refused("no quorum", model, batch(job, 0, 0))
    refused("weighs", handle.weight, 2)
    optimizer = Optimizer(manager, sgd)
    plain, plain_sgd = make_model(job)
    for step in range(4):
        optimizer.zero_grad()
        model(batch(job, step, 0)).square().mean().backward()
        optimizer.step()
        plain_sgd.zero_grad()
        plain(batch(job, step, 0)).square().mean().backward()
        plain_sgd.step()
    model[0].weight = nn.Parameter(torch.zeros_like(model[0].weight))
    refused("changed", model, batch(job, 0, 0))
    handle.detach()
    again = attach(manager, plain)
    again.detach()
    model[0].weight = plain[0].weight
    trained = digest(model) == digest(plain)
    manager.shutdown()
    server.shutdown()
    print(json.dumps({"said": said, "steps": handle.stats()["step"], "trained": trained}))


def main():
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the replicas end, too
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    case, job, *place = sys.argv[1:]
    job = Job(**json.loads(job))
    if case == "replica":
        replica(job, *map(int, place))
    elif case == "alone":
        alone(job)
    else:
        run(case, job)


if __name__ == "__main__":
    main()
