"""The C++ core. Times are nanoseconds (``_ns``), sizes bytes. All but Engine and Monitor are values that do not change.

Profiles, plans and their parts are equal if all their fields are, and have no hash. Their ``extra`` holds the fields of
their JSON that gradcast does not know; ``replace(**changes)`` returns a copy with other arguments of the constructor.

Functions raise ``gradcast.Error``, for wrong use its subclass ``gradcast.UsageError``, with a sentence about what is
wrong and what to do.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, final

Op = Literal["all_reduce", "reduce_scatter", "all_gather"]
Mode = Literal["overlap", "hook"]

__version__: str
DEFAULT_POLICY: str

@final
class LinkPiece:
    """One line of a cost, ``alpha + beta * bytes``, up to a size (None: without end)."""

    def __init__(self, *, alpha_ns: float, beta_ns_per_byte: float, up_to_bytes: int | None = None) -> None: ...
    alpha_ns: Final[float]
    beta_ns_per_byte: Final[float]
    up_to_bytes: Final[int | None]

@final
class OpCost:
    """The cost of one kind of operation, by size."""

    pieces: Final[tuple[LinkPiece, ...]]
    available: Final[bool]
    def cost_ns(self, size_bytes: int) -> float: ...
    def capacity_bytes(self, duration_ns: float) -> int:
        """Returns the most bytes that an operation of this duration carries."""

@final
class LinkModel:
    """The cost of a block, by kind of operation. ``pack_ns_per_byte``: extra cost of a block of several ranges.

    Raises ``gradcast.Error`` if a cost falls with the size of the operation.
    """

    def __init__(
        self,
        *,
        all_reduce: Sequence[LinkPiece],
        reduce_scatter: Sequence[LinkPiece] = ...,
        all_gather: Sequence[LinkPiece] = ...,
        pack_ns_per_byte: float = 0.0,
    ) -> None: ...
    all_reduce: Final[OpCost]
    reduce_scatter: Final[OpCost]
    all_gather: Final[OpCost]
    pack_ns_per_byte: Final[float]
    def scaled(self, alpha_factor: float, beta_factor: float) -> LinkModel:
        """The link with every alpha and every beta multiplied."""

    @staticmethod
    def from_json(text: str) -> LinkModel: ...
    def to_json(self) -> str: ...

@final
class LinkFit:
    cost: Final[OpCost]
    relative_error_median: Final[float]
    relative_error_max: Final[float]

def fit_op_cost(
    samples: Sequence[tuple[int, float]],
    *,
    method: Literal["robust", "least_squares"] = "robust",
    max_pieces: int = 3,
) -> LinkFit:
    """A cost from (bytes, ns) samples of one kind of operation."""

@final
class Hop:
    """One connection, full duplex."""

    def __init__(self, *, latency_ns: float, bandwidth_bytes_per_s: float) -> None: ...
    latency_ns: Final[float]
    bandwidth_bytes_per_s: Final[float]

@final
class NamedNetwork:
    """A published cost of a real network."""

    name: Final[str]
    summary: Final[str]
    source: Final[str]
    world_size: Final[int]
    link: Final[LinkModel]

def ring_link(hop: Hop, worker_count: int) -> LinkModel: ...
def tree_link(hop: Hop, worker_count: int) -> LinkModel: ...
def hierarchical_link(*, intra_node: Hop, inter_node: Hop, node_count: int, workers_per_node: int) -> LinkModel: ...
def networks() -> tuple[NamedNetwork, ...]: ...
def network(name: str) -> NamedNetwork: ...

@final
class Tensor:
    """One parameter's gradient."""

    def __init__(
        self,
        *,
        name: str,
        bytes: int,
        ready_ns: float,
        need_ns: float,
        update_ns: float = 0.0,
        buffer: int = 0,
        element_bytes: int = 4,
        extra: dict[str, Any] = ...,
    ) -> None: ...
    name: Final[str]
    bytes: Final[int]
    buffer: Final[int]
    element_bytes: Final[int]
    ready_ns: Final[float]
    need_ns: Final[float]
    update_ns: Final[float]
    extra: Final[dict[str, Any]]
    def replace(self, **changes: Any) -> Tensor: ...

@final
class Profile:
    """The measured demand of one iteration. Its tensors are in urgency order: forward needs number 0 first."""

    def __init__(
        self,
        *,
        name: str,
        forward_ns: float,
        backward_ns: float,
        tensors: Sequence[Tensor],
        world_size: int = 1,
        link: LinkModel | None = None,
        part_ns: float = 0.0,
        host_step_ns: float = 0.0,
        host_part_ns: float = 0.0,
        host_block_ns: float = 0.0,
        extra: dict[str, Any] = ...,
    ) -> None: ...
    name: Final[str]
    world_size: Final[int]
    forward_ns: Final[float]
    backward_ns: Final[float]
    tensors: Final[tuple[Tensor, ...]]
    part_ns: Final[float]
    host_step_ns: Final[float]
    host_part_ns: Final[float]
    host_block_ns: Final[float]
    link: Final[LinkModel | None]
    extra: Final[dict[str, Any]]
    def replace(self, **changes: Any) -> Profile: ...
    @staticmethod
    def from_json(text: str) -> Profile: ...
    @staticmethod
    def from_layer_table(*, csv: str, name: str = "profile", scale: float = 1.0, world_size: int = 1) -> Profile:
        """A profile from a table of layers, as for ``gradcast dev profile import``. ``scale`` multiplies every time."""

    def to_json(self) -> str: ...

@final
class Block:
    """The content of one collective operation: byte ranges ``(low, high)`` of one buffer."""

    def __init__(
        self,
        *,
        ranges: Sequence[tuple[int, int]],
        op: Op = "all_reduce",
        buffer: int = 0,
        reason: str = "",
        start_ns: float = 0.0,
        finish_ns: float = 0.0,
        extra: dict[str, Any] = ...,
    ) -> None: ...
    op: Final[Op]
    buffer: Final[int]
    ranges: Final[tuple[tuple[int, int], ...]]
    size_bytes: Final[int]
    start_ns: Final[float]
    finish_ns: Final[float]
    reason: Final[str]
    extra: Final[dict[str, Any]]
    def replace(self, **changes: Any) -> Block: ...

@final
class Plan:
    """The blocks of one iteration, in the order in which every rank starts them."""

    def __init__(
        self,
        *,
        blocks: Sequence[Block],
        policy: str = "by hand",
        mode: str = "overlap",
        in_flight: int = 1,
        predicted_ns: float = 0.0,
        bound_ns: float = 0.0,
        plain_bound_ns: float = 0.0,
        extra: dict[str, Any] = ...,
    ) -> None: ...
    policy: Final[str]
    mode: Final[Mode]
    in_flight: Final[int]
    blocks: Final[tuple[Block, ...]]
    predicted_ns: Final[float]
    bound_ns: Final[float]
    plain_bound_ns: Final[float]
    extra: Final[dict[str, Any]]
    def replace(self, **changes: Any) -> Plan: ...
    @staticmethod
    def from_json(text: str) -> Plan: ...
    def to_json(self) -> str: ...
    def check(self, profile: Profile) -> None:
        """Raises unless the plan carries every byte of the profile exactly once and cuts no element."""

    def hash(self, profile: Profile) -> int:
        """Equal on two ranks exactly when they would send the same bytes in the same order."""

@final
class BlockTimes:
    ready_ns: Final[float]
    launch_ns: Final[float]
    finish_ns: Final[float]

@final
class TensorTimes:
    arrival_ns: Final[float]
    read_ns: Final[float]
    wait_ns: Final[float]

@final
class Timeline:
    """The predicted course of an iteration; times from the start of backward."""

    blocks: Final[tuple[BlockTimes, ...]]
    tensors: Final[tuple[TensorTimes, ...]]
    forward_start_ns: Final[float]
    iteration_ns: Final[float]
    exposed_ns: Final[float]
    host_ns: Final[float]
    parts: Final[int]

def play(profile: Profile, link: LinkModel, plan: Plan) -> Timeline:
    """Returns the launch and finish of each block, the waits of forward, and the iteration time under the plan.

    Raises if the plan does not fit the profile or the link lacks one of its operations.
    """

@final
class Bound:
    """Lower bounds of the iteration time over all plans."""

    plain_ns: Final[float]
    best_ns: Final[float]
    exact: Final[bool]

def bound(
    profile: Profile, link: LinkModel, *, mode: str = "overlap", in_flight: int = 1, any_op: bool = False
) -> Bound:
    """Iteration times that no plan of this mode and in_flight can beat. ``any_op``: over plans with every kind of
    operation that the link has, instead of plans of all-reduces alone."""

@final
class PolicyParameter:
    name: Final[str]
    default_value: Final[float]
    meaning: Final[str]

@final
class PolicyInfo:
    name: Final[str]
    summary: Final[str]
    source: Final[str]
    parameters: Final[tuple[PolicyParameter, ...]]
    overlap_only: Final[bool]
    needs_scatter_gather: Final[bool]

def policies() -> tuple[PolicyInfo, ...]:
    """Every policy with its source and parameters, the default one first."""

def make_plan(
    profile: Profile,
    link: LinkModel,
    *,
    policy: str = "forecast",
    mode: str = "overlap",
    in_flight: int = 1,
    parameters: Mapping[str, float] = ...,
) -> Plan:
    """Plans one iteration of the profile on the link; the plan is checked and has its predicted time and bounds.

    ``mode``: "overlap" (gradients are also sent during the next forward) or "hook" (all arrive before it).
    ``in_flight``: blocks between launch and finish at the same time. ``parameters``: of the policy, by name; see
    ``policies()``.
    """

@final
class BlockRecord:
    """Times of the clock of ``Engine.now_ns``; 0 for what has not happened."""

    # When everything that it waits for existed: its gradients, or for an all-gather the sums of its reduce-scatter.
    ready_ns: Final[int]
    due_ns: Final[int]  # it was ready, and no earlier block was pending
    launch_ns: Final[int]
    finish_ns: Final[int]
    device_ns: Final[int]  # a duration, by the clock of the device that carried it; 0 where it was not timed

@final
class IterationRecord:
    """The record of one iteration: when each gradient existed, and the times of each block."""

    iteration: Final[int]
    plan_version: Final[int]
    ready_ns: Final[tuple[int, ...]]
    blocks: Final[tuple[BlockRecord, ...]]

@final
class EngineCounters:
    iterations: Final[int]
    blocks: Final[int]
    bytes: Final[int]
    link_ns: Final[int]  # during which at least one block was pending
    loop_ns: Final[int]  # the engine thread's own work: without waiting, and without the transport's part
    record_bytes: Final[int]

@final
class Engine:
    """Follows a plan: starts each block in plan order as soon as its gradients exist, and reports arrivals.

    ``transport`` is a capsule of a transport, or an object with an attribute ``capsule``; the engine keeps it until
    shutdown. Each call that begins, waits or follows raises the first failure again.
    """

    def __init__(
        self,
        transport: object,
        *,
        thread_name: str = "gradcast",
        timeline_iterations: int = 16,
        queue_window: int = 1024,
    ) -> None: ...
    def follow(self, profile: Profile, plan: Plan) -> int:
        """Follows the plan from the next iteration on; returns its version, from 1."""

    def begin(self) -> int:
        """Opens an iteration; returns its number, from 0."""

    def on_ready(self, tensor: int) -> None:
        """Reports that the gradient of this tensor exists; once per tensor and iteration."""

    @property
    def sink(self) -> object:
        """A capsule through which hooks of another module call ``on_ready`` without Python; it keeps the engine."""

    def wait(self, tensors: Sequence[int], timeout_ns: int = -1, *, queued: bool = False) -> bool:
        """Returns True once these tensors have arrived, False at the timeout; a negative timeout has no end.

        ``queued``: also returns True once a device delivers them without the host.
        """

    def wait_all(self, timeout_ns: int = -1, *, queued: bool = False) -> bool: ...
    def queued_no_later_than(self, tensors: Sequence[int], position: int = 0) -> list[int]:
        """Returns the tensors that a device delivers no later than these, in the order in which they were queued, from
        this position on; see ``wait`` with ``queued``."""

    def arrivals(self, position: int = 0) -> list[int]:
        """Returns the tensors that have arrived in this iteration, in order of arrival, from this position on."""

    @property
    def busy(self) -> bool: ...
    def waiting_for(self) -> str:
        """Describes what an unfinished iteration waits for; empty if none is open."""

    def timeline(self) -> tuple[IterationRecord, ...]:
        """Returns the last iterations, oldest first, the open one included."""

    def counters(self) -> EngineCounters: ...
    def shutdown(self) -> None: ...
    @staticmethod
    def now_ns() -> int: ...

@final
class RankFacts:
    """One rank's times in one iteration; ``busy_ns``: without the waits for gradients."""

    def __init__(self, *, step_ns: float, busy_ns: float, link_ns: float) -> None: ...
    step_ns: Final[float]
    busy_ns: Final[float]
    link_ns: Final[float]

@final
class Change:
    """``cause``: "compute" or "network"; ``rank``: whose compute has changed, -1 for most ranks' or the network."""

    cause: Final[str]
    rank: Final[int]
    before_ns: Final[float]
    after_ns: Final[float]

@final
class Decision:
    """``change``: the reason to measure again, or None."""

    on_baseline: Final[bool]
    stepped_aside: Final[bool]
    change: Final[Change | None]

@final
class Comparison:
    """Medians of iterations with the plan and with the baseline; ``noise`` of their ratio: two standard errors."""

    plan_ns: Final[float]
    baseline_ns: Final[float]
    baseline_count: Final[int]
    noise: Final[float]

@final
class Monitor:
    """Detects when a plan no longer fits, or no longer beats the baseline; see include/gradcast/monitor.h."""

    def __init__(
        self,
        rank_count: int,
        *,
        busy_ns: float = ...,
        link_ns: float = ...,
        has_baseline: bool = ...,
        begins_on_baseline: bool = ...,
        hold_iterations: int = ...,
    ) -> None: ...
    def on_iteration(self, on_baseline: bool, ranks: Sequence[RankFacts]) -> Decision: ...
    def comparison(self) -> Comparison: ...
    @property
    def slowest_rank(self) -> int: ...
