"""``with gradcast.doctor(model, optimizer):`` around a training loop."""

import contextlib
from collections.abc import Iterator, Sequence

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from gradcast.diagnosis.doctor import LEFT_OUT_STEPS, Doctor, Settings
from gradcast.diagnosis.outcome import Outcome
from gradcast.errors import Error


@contextlib.contextmanager
def doctor(
    model: DistributedDataParallel,
    optimizer: Optimizer | Sequence[Optimizer],
    *,
    steps: int = 20,
    seconds: float = 60.0,
    network: bool = True,
    trial: bool = True,
    output: str = "gradcast-doctor",
) -> Iterator[Outcome]:
    """Diagnoses the training inside, once, and lets it go on: why is a step as slow as it is, and what would help?

    Every rank enters with its module, wrapped in DistributedDataParallel, and all optimizers that update it. After 5
    and ``steps`` steps the ranks run probes for about ``seconds``, try gradcast (``trial``) and check the network
    (``network``); then parameters, buffers, the optimizer and random generators are what they were, bit for bit. Rank 0
    prints the result and writes it into the folder ``output``; ``outcome.result`` is doctor.json's dict there, None on
    the others. Raises gradcast.Error for what cannot be diagnosed.
    """
    optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
    _check(model, optimizers)
    settings = Settings(steps=steps, seconds=seconds, network=network, trial=trial)
    outcome = Outcome(output)
    watching = Doctor(settings, outcome.arrived)
    watching.begin(model, optimizers)
    try:
        yield outcome
    finally:
        watching.close()
        if not watching.done:
            needed = LEFT_OUT_STEPS + settings.steps
            outcome.nothing(f"{watching.steps} steps were made of the {needed} that it watches")


def _check(model: DistributedDataParallel, optimizers: Sequence[Optimizer]) -> None:
    if not isinstance(model, DistributedDataParallel):
        raise Error("gradcast.doctor diagnoses a DistributedDataParallel module; wrap the model first", "invalid_use")
    if dist.get_world_size(model.process_group) == 1:
        raise Error("with one worker nothing travels and nobody waits; start two or more", "invalid_use")
    owned = {id(parameter) for parameter in model.module.parameters()}
    for each in optimizers:
        if not any(id(parameter) in owned for group in each.param_groups for parameter in group["params"]):
            raise Error(f"the {type(each).__name__} holds no parameter of the module", "invalid_use")
    if not optimizers:
        raise Error("gradcast.doctor needs the optimizer whose steps it counts", "invalid_use")
