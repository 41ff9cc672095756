"""Hosts as network namespaces, each joined to one switch by a link whose speed `tc` limits in both directions.

The switch is a bridge in a namespace of its own, so nothing in the machine's network changes, and removing the
namespaces removes everything. Their names say which process made them; the next run removes those of dead processes.
"""

import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from gradcast.lab.errors import LabError
from gradcast.lab.program import uninterrupted

_PREFIX = "gradcast-lab"
_SUBNET = "10.77.0"
# An idle link may send at once what it sends in this time; that also makes up for late wake-ups of the machine. With
# less, links of a busy machine are slower than requested; with more, blocks after a pause seem cheaper than they are.
_BURST_S = 2e-3
# Limits of the pieces that a host gives to its link. tc would cut a piece above the burst into packets, which two cores
# cannot do in time. Shorter pieces cost too much; the kernel does not make longer ones.
_PIECES_PER_BURST = 3
_PIECE_BYTES = (4 * 1024, 64_000)
# Every Linux has reno and lets a namespace choose it. On a link without loss it sends as fast as the link allows. bbr,
# the default of some machines, estimates the rate: operations of 256 KiB on 300 Mbit/s took 10 to 25 % longer.
_CONGESTION_CONTROL = "reno"
_CONGESTION_CONTROL_PATH = "/proc/sys/net/ipv4/tcp_congestion_control"
# Queue of a link. A full TCP window fits, so nothing is dropped: a loss would measure TCP's recovery.
_QUEUE_BYTES = 4 * 1024 * 1024
_COMMAND_TIMEOUT_S = 20
TUN_PATH = "/dev/net/tun"
_END_TIMEOUT_S = 5.0

_STATE, _START = 0, 19  # fields after the program's name in /proc/<pid>/stat

_serial = itertools.count()


def obstacle() -> str | None:
    """Returns a sentence about why no network can be made here; None if one can."""
    if not sys.platform.startswith("linux"):
        return "network namespaces need Linux"
    if os.geteuid() != 0:
        return "network namespaces need root; run this as root (sudo)"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"{' and '.join(missing)} not found; install the Debian package iproute2 (apt-get install iproute2)"
    return None


class Network:
    """``host_count`` hosts that each send and receive at most ``rate_bits_per_s``, with ``latency_s`` more each way.

    Remove it with ``close()``, or use it as a context manager. It first removes the networks of dead processes. Raises
    LabError if no network can be made.
    """

    def __init__(self, host_count: int, rate_bits_per_s: float, latency_s: float = 0.0) -> None:
        if reason := obstacle():
            raise LabError(reason)
        if not 1 <= host_count <= 250:
            raise LabError(f"{host_count} hosts cannot be made; ask for 1 to 250")
        remove_leftovers()
        self.host_count = host_count
        self.interface = "eth0"
        self._delays: list[subprocess.Popen[str]] = []
        self._name = f"{_PREFIX}-{own_name()}-{next(_serial)}"
        try:
            self._make(rate_bits_per_s)
            if latency_s > 0:
                for host in range(host_count):
                    self.set_latency(host, latency_s)
        except BaseException:
            self.close()
            raise

    def address(self, host: int) -> str:
        return f"{_SUBNET}.{host + 1}"

    def command(self, host: int, arguments: Sequence[str]) -> list[str]:
        """Returns the command that runs ``arguments`` on a host; its process becomes that program."""
        return ["ip", "netns", "exec", self._namespace(host), *arguments]

    def set_rate(self, host: int, rate_bits_per_s: float) -> None:
        """Sets the rate of the host's link in both directions."""
        # One shaper at each end: what arrives cannot be shaped, only what is sent.
        self.limit_device(self._namespace(host), self.interface, rate_bits_per_s)
        self.limit_device(self.switch_name, f"host{host}", rate_bits_per_s)

    def set_link(self, host: int, *, up: bool) -> None:
        """Cuts the host off, or connects it again. TCP sends again what was lost meanwhile."""
        _run("ip", "-n", self.switch_name, "link", "set", f"host{host}", "up" if up else "down")

    def set_latency(self, host: int, latency_s: float) -> None:
        """Adds latency to the host's link, in each direction. Call it once for each host."""
        if not os.path.exists(TUN_PATH):
            raise LabError(f"latency needs {TUN_PATH}, which this system does not have; omit it")
        port, tap = f"host{host}", f"late{host}"
        _run("ip", "-n", self.switch_name, "link", "set", port, "nomaster")
        command = [sys.executable, "-m", "gradcast.lab.delay", port, tap, f"{latency_s:g}"]
        # With a session of its own, Ctrl-C reaches only the program that uses the network, which removes it last.
        delay = subprocess.Popen(
            ["ip", "netns", "exec", self.switch_name, *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._delays.append(delay)
        if not delay.stdout.readline():
            raise LabError(f"no latency on the link of host {host}: gradcast.lab.delay ended, see above")
        _run("ip", "-n", self.switch_name, "link", "set", tap, "master", "switch", "up")

    def close(self) -> None:
        """Ends all processes on the hosts and removes the hosts. Idempotent."""
        while self._delays:
            delay = self._delays.pop()
            delay.kill()
            delay.wait(_END_TIMEOUT_S)
            delay.stdout.close()
        _remove([name for name in _namespaces() if name.startswith(f"{self._name}-")])

    def __enter__(self) -> "Network":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def switch_name(self) -> str:
        return f"{self._name}-switch"

    def _namespace(self, host: int) -> str:
        return f"{self._name}-host{host}"

    def _make(self, rate_bits_per_s: float) -> None:
        _run("ip", "netns", "add", self.switch_name)
        _run("ip", "-n", self.switch_name, "link", "add", "switch", "type", "bridge")
        _run("ip", "-n", self.switch_name, "link", "set", "switch", "up")
        for host in range(self.host_count):
            name, port = self._namespace(host), f"host{host}"
            _run("ip", "netns", "add", name)
            ends = ("name", port, "type", "veth", "peer", "name", self.interface, "netns", name)
            _run("ip", "-n", self.switch_name, "link", "add", *ends)
            _run("ip", "-n", self.switch_name, "link", "set", port, "master", "switch", "up")
            _run("ip", "-n", name, "address", "add", f"{self.address(host)}/24", "dev", self.interface)
            _run("ip", "-n", name, "link", "set", "lo", "up")
            _run("ip", "netns", "exec", name, "sh", "-c", f"echo {_CONGESTION_CONTROL} > {_CONGESTION_CONTROL_PATH}")
            _run("ip", "-n", name, "link", "set", self.interface, "up")
            self._keep_order(name, self.interface, host)
            self._keep_order(self.switch_name, port, host)
            self.set_rate(host, rate_bits_per_s)

    @staticmethod
    def _keep_order(namespace: str, device: str, host: int) -> None:
        """Lets one core receive all packets of a device. The core depends on the host alone.

        Packets of a link come from the core on which its timer fires. If several cores receive them, they overtake each
        other, and TCP takes that for loss: a retransmission for every fourth operation of 150 kB, and pauses.
        """
        core = host % (os.cpu_count() or 1)
        path = f"/sys/class/net/{device}/queues/rx-0/rps_cpus"
        words, bit = divmod(core, 32)  # a mask in words of 32 bits, the highest first
        mask = ",".join([f"{1 << bit:x}", *["0" * 8] * words])
        _run("ip", "netns", "exec", namespace, "sh", "-c", f"echo {mask} > {path}")

    @staticmethod
    def limit_device(namespace: str, device: str, rate_bits_per_s: float) -> None:
        burst = _BURST_S * rate_bits_per_s / 8
        least, most = _PIECE_BYTES
        piece = min(max(round(burst / _PIECES_PER_BURST), least), most)
        _run("ip", "-n", namespace, "link", "set", "dev", device, "gso_max_size", str(piece))
        burst = round(max(burst, 2 * piece))
        shape = ("tbf", "rate", f"{round(rate_bits_per_s)}bit", "burst", str(burst), "limit", str(_QUEUE_BYTES))
        _run("tc", "-n", namespace, "qdisc", "replace", "dev", device, "root", *shape)


def remove_leftovers() -> None:
    """Removes every network whose process has ended, with all processes on its hosts."""
    pattern = re.compile(rf"{_PREFIX}-(\d+-\d+)-\d+-\w+")
    matches = [pattern.fullmatch(name) for name in _namespaces()]
    _remove([match[0] for match in matches if match and is_gone(match[1])])


def _namespaces() -> list[str]:
    lines = _run("ip", "netns", "list").splitlines()
    return [line.split()[0] for line in lines if line.strip()]  # an "(id: 0)" may follow the name


def _remove(namespaces: list[str]) -> None:
    with uninterrupted():
        for name in namespaces:
            try:
                _end_processes(name)
                _run("ip", "netns", "delete", name)
            except LabError:
                if name in _namespaces():  # otherwise another process has just removed it
                    raise


def _end_processes(namespace: str) -> None:
    """Ends all processes in a namespace. It exists as long as they do, even without a name."""
    deadline = time.monotonic() + _END_TIMEOUT_S
    while pids := _run("ip", "netns", "pids", namespace).split():
        if time.monotonic() > deadline:
            raise LabError(f"processes {', '.join(pids)} on {namespace} do not end; kill them, then run again")
        for pid in pids:
            try:
                os.kill(int(pid), signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.01)


def _run(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_COMMAND_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise LabError(f"`{' '.join(command)}` did not end within {_COMMAND_TIMEOUT_S} s") from None
    if done.returncode != 0:
        raise LabError(
            f"`{' '.join(command)}` failed: {done.stderr.strip() or done.stdout.strip()}; does this machine let root "
            "make network namespaces and limit their links? Many containers do not"
        )
    return done.stdout


def own_name() -> str:
    """Returns ``<pid>-<start time>``: a later process with the same number has another name."""
    pid = os.getpid()
    return f"{pid}-{_process_fields(pid)[_START]}"


def is_gone(name: str) -> bool:
    """Returns True if the process with this ``own_name()`` has ended."""
    pid, _, start = name.partition("-")
    try:
        fields = _process_fields(int(pid))
    except (FileNotFoundError, ProcessLookupError):
        return True
    return fields[_STATE] in "ZX" or fields[_START] != start


def _process_fields(pid: int) -> list[str]:
    # The program's name may contain spaces and brackets, so the fields start after the last bracket.
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
