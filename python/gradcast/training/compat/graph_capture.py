"""CUDA graphs: gradcast refuses to be captured in one."""

import torch

from gradcast.errors import refused


def refuse_capture(device: torch.device) -> None:
    """Where a training's pass begins, and before anything is waited for: a CUDA graph replays kernels, and what the
    host does in between, sending blocks, is no part of it. To make a stream that is captured wait for traffic would end
    the capture with an error of CUDA's that does not say why."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise refused(
            "this pass is being captured in a CUDA graph, which would leave gradcast's traffic out when it is "
            "replayed; capture forward and backward with torch.cuda.make_graphed_callables before attach, or train "
            "without a graph (what does not train can be captured: call handle.flush() before)"
        )
