"""``with gradcast.doctor(model, optimizer):`` around a training loop."""

import contextlib
from collections.abc import Iterator, Sequence

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from gradcast.diagnosis.doctor import Doctor, Settings, holds_any_of, obstacle
from gradcast.diagnosis.outcome import Outcome
from gradcast.errors import Error
from gradcast.training.acceptance import unwrapped_optimizer


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
    the others; ``outcome.why_nothing`` is a sentence where there is no diagnosis. Raises gradcast.Error for what cannot
    be diagnosed.
    """
    given = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
    optimizers = [unwrapped_optimizer(each) for each in given]
    settings = Settings(steps=steps, seconds=seconds, network=network, trial=trial)
    _check(model, optimizers)
    outcome = Outcome(output, rank=dist.get_rank())
    watching = Doctor(settings, outcome)
    watching.begin(model, optimizers)
    try:
        yield outcome
    finally:
        watching.close()
        if not watching.done:
            outcome.nothing(f"{watching.steps} steps were made of the {watching.needed_steps} that it watches")


def _check(model: DistributedDataParallel, optimizers: Sequence[Optimizer]) -> None:
    if not isinstance(model, DistributedDataParallel):
        raise Error("gradcast.doctor diagnoses a DistributedDataParallel module; wrap the model first", "invalid_use")
    for each in optimizers:
        if not holds_any_of(each, model.module):
            raise Error(f"the {type(each).__name__} holds no parameter of the module", "invalid_use")
    if not optimizers:
        raise Error("gradcast.doctor needs the optimizer whose steps it counts", "invalid_use")
    why = obstacle(model, optimizers)
    if why is not None:
        raise Error(why, "invalid_use")
