"""CUDA graphs: gradcast refuses to be captured in one."""

import torch

from gradcast.errors import refused


def refuse_capture(device: torch.device) -> None:
    """Raises Error if the current stream of the device is being captured. Call it where a pass of the training begins,
    before anything is waited for.

    A CUDA graph replays kernels, and what the host does in between, such as sending blocks, is not part of it. Making a
    captured stream wait for blocks would end the capture with an error of CUDA that does not say why.
    """
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise refused(
            "this pass is being captured in a CUDA graph, and the graph would not send gradients when it is replayed; "
            "capture forward and backward with torch.cuda.make_graphed_callables before attach, or train without a "
            "graph (passes that do not train can be captured: call handle.flush() first)"
        )
