"""The lab: hosts come and go, links are as slow as asked, workers never stay behind.

What makes hosts needs root and Linux, and is skipped elsewhere; running workers on loopback is tested everywhere.
"""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from conftest import lab_network
from gradcast.cli import main
from gradcast.lab import LabError, Network, delay, hosts, run_workers
from gradcast.lab.settings import Settings
from gradcast.lab.workers import run_for_result

WAIT_S = 30


@pytest.fixture
def network():
    """Two hosts joined by 20 Mbit/s."""
    with lab_network(2, 20e6) as made:
        yield made


def namespaces() -> list[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return [line.split()[0] for line in listed.splitlines()]


def run_on(network, host, code, *arguments) -> subprocess.Popen:
    command = network.command(host, [sys.executable, "-c", code, *map(str, arguments)])
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def wait_until(condition) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, "it did not come about in time"
        time.sleep(0.02)


def is_running(pid: int) -> bool:
    """A dead process that nobody has waited for yet is not running."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


# --- Hosts ---

# Says how long it took from the first byte to the last.
RECEIVE = """
import socket, time
server = socket.create_server(("0.0.0.0", 5000))
print("ready", flush=True)
connection, _ = server.accept()
count, start = len(connection.recv(1)), time.perf_counter()
while data := connection.recv(65536):
    count += len(data)
print(count, time.perf_counter() - start)
"""
SEND = """
import socket, sys
connection = socket.create_connection((sys.argv[1], 5000), timeout=10)
connection.sendall(bytes(int(sys.argv[2])))
connection.close()
"""


def test_a_link_is_not_faster_than_asked_for_in_either_direction(network):
    size_bytes = 1_500_000
    for receiver in (0, 1):
        receiving = run_on(network, receiver, RECEIVE)
        assert receiving.stdout.readline() == "ready\n"
        sending = run_on(network, 1 - receiver, SEND, network.address(receiver), size_bytes)
        count, seconds = receiving.communicate(timeout=WAIT_S)[0].split()
        assert sending.wait(WAIT_S) == 0
        assert int(count) == size_bytes
        assert 8 * size_bytes / float(seconds) < 1.5 * 20e6


ANSWER = """
import socket
server = socket.create_server(("0.0.0.0", 5000))
print("ready", flush=True)
connection, _ = server.accept()
while data := connection.recv(65536):
    connection.sendall(data)
"""
ASK = """
import random, socket, sys, time
connection = socket.create_connection((sys.argv[1], 5000), timeout=10)
connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
for size in (1, 1, 200_000):
    sent, start, answer = random.Random(size).randbytes(size), time.perf_counter(), b""
    connection.sendall(sent)
    while len(answer) < size:
        answer += connection.recv(65536)
    print(time.perf_counter() - start, answer == sent)
"""


def test_where_there_is_no_tun_it_says_so(network, monkeypatch, tmp_path):
    monkeypatch.setattr(hosts, "TUN_PATH", str(tmp_path / "tun"))
    with pytest.raises(LabError, match="tun, which this system does not have; omit it"):
        network.set_latency(0, 0.001)


def test_a_link_takes_as_long_as_asked_for_in_both_directions_and_loses_nothing():
    if not os.path.exists(hosts.TUN_PATH):
        pytest.skip(f"latency needs {hosts.TUN_PATH}")
    with lab_network(2, 200e6) as network:
        # Of one host each, so that between the two it is both of them, there and back.
        network.set_latency(0, 0.03)
        network.set_latency(1, 0.01)
        answering = run_on(network, 1, ANSWER)
        assert answering.stdout.readline() == "ready\n"
        asking = run_on(network, 0, ASK, network.address(1))
        lines = [line.split() for line in asking.communicate(timeout=WAIT_S)[0].splitlines()]
        answering.wait(WAIT_S)
    assert [equal for _, equal in lines] == ["True"] * 3
    taken_s = [float(seconds) for seconds, _ in lines]
    assert min(taken_s) >= 0.08


def test_pieces_come_out_in_order_each_a_while_after_it_came():
    arriving, given = [b"one", b"two"], []

    def take():
        if not arriving:
            raise BlockingIOError
        return arriving.pop(0)

    late = delay.Delayed(take, given.append, 0.5)
    assert late.pass_on(9.0) is None
    late.arrived(10.0)
    arriving.append(b"three")
    late.arrived(10.25)
    assert (late.pass_on(10.375), given) == (10.5, [])
    assert (late.pass_on(10.5), given) == (10.75, [b"one", b"two"])
    assert (late.pass_on(11.0), given) == (None, [b"one", b"two", b"three"])


def test_a_link_that_is_cut_loses_what_is_on_its_way():
    def cut(*_):
        raise OSError(errno.ENETDOWN, "Network is down")

    given, pieces = [], iter([b"one"])
    late = delay.Delayed(lambda: next(pieces, None) or cut(), cut, 0.0)
    late.arrived(1.0)
    assert (late.pass_on(1.0), given) == (None, [])

    def broken():
        raise OSError(errno.EBADF, "Bad file descriptor")

    with pytest.raises(OSError, match="Bad file descriptor"):
        delay.Delayed(broken, given.append, 0.0).arrived(1.0)


def test_a_network_comes_and_goes():
    """Closing it ends what runs on its hosts; a second network beside it is none too many."""
    before = set(namespaces()) if shutil.which("ip") else set()
    with lab_network(2, 1e9) as network:
        made = set(namespaces()) - before
        process = run_on(network, 0, "import time; print('on', flush=True); time.sleep(600)")
        assert process.stdout.readline() == "on\n"
        assert len(made) == 3  # two hosts and the switch
        with Network(2, 1e9) as other:
            assert other.address(1) == network.address(1)
        assert made <= set(namespaces())
    assert not made & set(namespaces())
    assert process.wait(WAIT_S) == -signal.SIGKILL
    network.close()  # a second time does no harm


OWNER = """
import subprocess, sys, time
from gradcast.lab import Network
network = Network(2, 1e9)
worker = subprocess.Popen(network.command(0, [sys.executable, "-c", "import time; time.sleep(600)"]))
print(worker.pid, network.command(0, [])[3], flush=True)
time.sleep(600)
"""


def test_what_a_killed_run_left_is_removed_by_the_next():
    lab_network(2, 1e9).close()
    owner = subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True)
    worker_pid, namespace = owner.stdout.readline().split()
    hosts.remove_leftovers()
    assert namespace in namespaces(), "its owner is alive"
    owner.kill()
    owner.wait(WAIT_S)
    assert namespace in namespaces()
    Network(1, 1e9).close()
    assert namespace not in namespaces()
    wait_until(lambda: not is_running(int(worker_pid)))


def test_a_later_process_with_the_same_number_is_not_the_owner():
    pid, start = hosts.own_name().split("-")
    assert not hosts.is_gone(hosts.own_name())
    assert hosts.is_gone(f"{pid}-{int(start) - 1}")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_run_that_is_told_to_end_leaves_nothing(tmp_path, number, code):
    lab_network(2, 1e9).close()
    before = namespaces()
    script = tmp_path / "script.py"
    script.write_text("import os, time\nprint(os.getpid(), flush=True)\ntime.sleep(600)\n")
    command = [sys.executable, "-m", "gradcast", "dev", "lab", "run", "--bandwidth", "1gbit", "--", str(script)]
    program = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    worker_pid = int(program.stdout.readline())
    assert namespaces() != before
    program.send_signal(number)
    assert program.wait(WAIT_S) == code
    assert namespaces() == before
    assert not is_running(worker_pid)


@pytest.mark.parametrize(
    ("patched", "value", "sentence"),
    [
        ("os.geteuid", lambda: 1000, "need root"),
        ("shutil.which", lambda _: None, "apt-get install iproute2"),
        ("sys.platform", "darwin", "need Linux"),
    ],
)
def test_where_no_network_can_be_made_it_says_why(monkeypatch, patched, value, sentence):
    for name, usual in {"os.geteuid": lambda: 0, "shutil.which": lambda name: name, "sys.platform": "linux"}.items():
        monkeypatch.setattr(name, usual)
    monkeypatch.setattr(patched, value)
    with pytest.raises(LabError, match=sentence):
        Network(2, 1e9)


def test_a_script_runs_on_every_host(tmp_path, capfd):
    lab_network(2, 1e9).close()
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys\nfrom pathlib import Path\n"
        "own = [os.environ[name] for name in ('GROUP_RANK', 'LOCAL_RANK', 'LOCAL_WORLD_SIZE')]\n"
        "(Path(__file__).parent / os.environ['RANK']).write_text(' '.join([os.readlink('/proc/self/ns/net'), *own]))\n"
        "print(os.environ['WORLD_SIZE'], *sys.argv[1:], flush=True)\n"
    )
    command = ["dev", "lab", "run", "--hosts", "2", "--ranks-per-host", "2", "--bandwidth", "1gbit", "--"]
    assert main.main([*command, str(script), "--shift", "-1"]) == 0
    assert capfd.readouterr().out == "4 --shift -1\n"
    places = [(tmp_path / str(rank)).read_text().split(" ", 1) for rank in range(4)]
    assert [own for _, own in places] == ["0 0 2", "0 1 2", "1 0 2", "1 1 2"]
    networks = [network for network, _ in places]
    assert networks[0] == networks[1] != networks[2] == networks[3]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--bandwidth", "fast", "--", "script.py"], "'fast' is not a bandwidth"),
        (["--hosts", "0", "--", "script.py"], "--hosts"),
        (["--hosts", "2"], "SCRIPT"),
        (["--", "/no/such/script"], "does not exist"),
    ],
)
def test_the_command_fails_with_a_sentence(refused, arguments, words):
    refused(["dev", "lab", "run", *arguments], words)


# --- Workers ---


def test_workers_get_what_torchrun_would_give_them(tmp_path):
    code = "import os, json, sys; json.dump(dict(os.environ), open(sys.argv[1] + os.environ['RANK'], 'w'))"
    run_workers(["-c", code, str(tmp_path / "rank")], 2, timeout_s=WAIT_S, output=sys.__stderr__)
    first, second = (json.loads((tmp_path / f"rank{rank}").read_text()) for rank in range(2))
    assert (first["RANK"], second["RANK"]) == ("0", "1")
    assert (first["LOCAL_RANK"], second["LOCAL_RANK"]) == ("0", "1")
    assert (second["GROUP_RANK"], second["LOCAL_WORLD_SIZE"]) == ("0", "2")
    for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GLOO_SOCKET_IFNAME"):
        assert first[name] == second[name]
    assert first["WORLD_SIZE"] == "2"


def test_a_function_gets_its_arguments_on_every_rank_and_rank_0_returns_its_result(tmp_path, monkeypatch):
    pytest.importorskip("torch")
    lines = [
        "import torch.distributed as dist",
        "def told(*arguments):",
        "    found = [None] * dist.get_world_size()",
        "    dist.all_gather_object(found, (dist.get_rank(), repr(arguments)))",
        "    return {'from': dist.get_rank(), 'found': found}",
    ]
    (tmp_path / "program.py").write_text("\n".join(lines))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    arguments = (Settings("m", "{}", (1e9, 2e9), ("ddp",)), 3)
    result = run_for_result("program:told", arguments, 2, timeout_s=WAIT_S)
    assert result == {"from": 0, "found": [[rank, repr(arguments)] for rank in range(2)]}


def test_a_failing_worker_is_named_and_the_others_are_ended(tmp_path):
    code = (
        "import os, pathlib, sys, time\n"
        "pathlib.Path(sys.argv[1] + os.environ['RANK']).write_text(str(os.getpid()))\n"
        "while not os.path.exists(sys.argv[1] + '0'): time.sleep(0.01)\n"
        "if os.environ['RANK'] == '1': raise RuntimeError('the disk is on fire')\n"
        "time.sleep(600)"
    )
    with pytest.raises(LabError, match=r"rank 1 failed with exit code 1.*\n(.*\n)*.*the disk is on fire"):
        run_workers(["-c", code, str(tmp_path / "rank")], 2, timeout_s=WAIT_S)
    assert not is_running(int((tmp_path / "rank0").read_text()))


def test_a_worker_that_a_signal_ended_is_named_and_a_run_is_bounded_in_time(tmp_path):
    with pytest.raises(LabError, match=r"rank 0 was killed by SIGKILL"):
        run_workers(["-c", "import os; os.kill(os.getpid(), 9)"], 1, timeout_s=WAIT_S)
    code = "import os, pathlib, sys, time; pathlib.Path(sys.argv[1]).write_text(str(os.getpid())); time.sleep(600)"
    with pytest.raises(LabError, match=r"did not end within 2 s; still running: rank 0"):
        run_workers(["-c", code, str(tmp_path / "pid")], 1, timeout_s=2)
    assert not is_running(int((tmp_path / "pid").read_text()))


PARENT = """
from gradcast.lab import run_workers
run_workers(["-c", "import os, time; print(os.getpid(), flush=True); time.sleep(600)"], 1, timeout_s=600)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a process with its parent")
def test_workers_end_with_a_killed_parent():
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    worker_pid = int(parent.stdout.readline())
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait(WAIT_S)
    wait_until(lambda: not is_running(worker_pid))
