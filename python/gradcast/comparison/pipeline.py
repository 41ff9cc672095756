"""One rank of a pipeline as the profile of a step: what its replicas send each other, and when.

The schedules are 1F1B and interleaved 1F1B, with the bubbles of PTD-P (Narayanan et al., "Efficient Large-Scale
Language Model Training on GPU Clusters Using Megatron-LM", SC 2021, sections 2.2.1 and 2.2.2): a step of m
micro-batches in p stages, with v chunks of the model per rank, takes m + (p - 1) / v times as long as a rank's share
of one.

The rank is the first of the pipeline. Its first chunk begins every step and ends it, so the traffic of no other rank
has less time. With interleaving the last pass of chunk k ends k p passes of a chunk earlier, and its first one begins
k p later.
"""

from dataclasses import dataclass

from gradcast import _core
from gradcast.errors import Error
from gradcast.units import format_percent


@dataclass(frozen=True)
class Pipeline:
    """``tensor``: ranks that share each layer. ``stages``: ranks in a row. ``chunks``: of the model, per rank."""

    tensor: int = 1
    stages: int = 1
    micro_batches: int = 1
    chunks: int = 1

    def __post_init__(self) -> None:
        if self.chunks > 1 and self.stages == 1:
            raise Error("a pipeline of one stage has nothing to interleave; give more stages, or omit the chunks")
        if self.micro_batches < self.stages:
            raise Error(
                f"{self.micro_batches} micro-batches do not fill a pipeline of {self.stages} stages; 1F1B needs at "
                "least as many micro-batches as stages"
            )
        if self.chunks > 1 and self.micro_batches % self.stages:
            raise Error(
                f"interleaved 1F1B needs a multiple of {self.stages} micro-batches in {self.stages} stages; got "
                f"{self.micro_batches}"
            )

    @property
    def bubble(self) -> float:
        """The time that a rank waits for others, of the time that it computes."""
        return (self.stages - 1) / (self.chunks * self.micro_batches)

    def __str__(self) -> str:
        chunks = f" of {self.chunks} chunks" if self.chunks > 1 else ""
        parts = [f"tensor parallelism {self.tensor}"] if self.tensor > 1 else []
        parts += [f"{self.stages} stages{chunks}, bubble {format_percent(self.bubble)}"] if self.stages > 1 else []
        return ", ".join([*parts, f"{self.micro_batches} micro-batch{'es' if self.micro_batches > 1 else ''}"])


def step_of(profile: _core.Profile, pipeline: Pipeline) -> _core.Profile:
    """Returns the profile of a step of the pipeline's first rank.

    ``profile``: what one rank would have without tensor parallelism, computing one micro-batch. Its backward pass in
    the result begins with the first pass of which gradients are sent; all before that belongs to forward. Tensor
    parallelism divides bytes and compute; its own traffic is omitted.
    """
    share = 1 / pipeline.tensor
    forward_ns, backward_ns = (each * share / pipeline.chunks for each in (profile.forward_ns, profile.backward_ns))
    passes = pipeline.chunks * pipeline.micro_batches + pipeline.stages - 1
    last_ns = ((pipeline.chunks - 1) * pipeline.stages + 1) * backward_ns

    def moved(tensor: _core.Tensor) -> _core.Tensor:
        need_ns, ready_ns = tensor.need_ns * share, tensor.ready_ns * share
        chunk = min(int(need_ns / forward_ns), pipeline.chunks - 1) if forward_ns > 0 else 0
        in_chunk_ns = ready_ns - (pipeline.chunks - 1 - chunk) * backward_ns
        began_ns = last_ns - (chunk * pipeline.stages + 1) * backward_ns
        return tensor.replace(
            bytes=-(-tensor.bytes // (pipeline.tensor * tensor.element_bytes)) * tensor.element_bytes,
            need_ns=need_ns + chunk * (pipeline.stages - 1) * forward_ns,
            ready_ns=began_ns + min(max(in_chunk_ns, 0.0), backward_ns),
            update_ns=tensor.update_ns * share,
        )

    return profile.replace(
        forward_ns=passes * (forward_ns + backward_ns) - last_ns,
        backward_ns=last_ns,
        tensors=[moved(each) for each in profile.tensors],
    )
