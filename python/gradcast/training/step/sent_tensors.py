"""The tensors that the ranks send in a step: gradients, and the message and buffers beside them."""

from collections.abc import Sequence

import torch
from torch import nn

from gradcast.training.options import Options
from gradcast.training.step.module_buffers import BUFFERS_NAME, buffers_tensor
from gradcast.training.step.step_message import MESSAGE_NAME, message_tensor


def sent_tensors(
    parameters: dict[str, nn.Parameter], modules: Sequence[nn.Module], options: Options, device: torch.device
) -> dict[str, torch.Tensor]:
    """By name, each with the size and type of what is sent. ``modules``: those whose buffers are sent."""
    sent: dict[str, torch.Tensor] = dict(parameters)
    sent[MESSAGE_NAME] = message_tensor(list(parameters.values()), with_norms=options.clip.norm is not None)
    buffers = buffers_tensor(modules, device)
    if buffers is not None:
        sent[BUFFERS_NAME] = buffers
    return sent
