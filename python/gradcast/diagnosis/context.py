"""``with gradcast.doctor(model, optimizer):`` around a training loop."""

import contextlib
from collections.abc import Iterator, Sequence

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from gradcast.diagnosis.doctor import Doctor
from gradcast.diagnosis.outcome import Outcome
from gradcast.diagnosis.preconditions import obstacle, updates
from gradcast.errors import Error
from gradcast.training.compat.wrappers import unwrapped_optimizer


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
    """Diagnoses the training loop inside, once: explains the step time and predicts what helps.

    Every rank enters with its DistributedDataParallel module and all optimizers that update it. After 5 warm-up steps
    and ``steps`` ordinary steps, the ranks probe for about ``seconds``, try gradcast (``trial``) and check the network
    (``network``). Then parameters, buffers, optimizer state and random generators are restored bit for bit, and the
    training goes on. Rank 0 prints the result and writes it to the folder ``output``.

    Yields an outcome: ``outcome.result`` holds the fields of doctor.json on rank 0 and is None on the others;
    ``outcome.why_nothing`` says why there is no diagnosis. Raises gradcast.Error if the training cannot be diagnosed.
    """
    given = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
    optimizers = [unwrapped_optimizer(each) for each in given]
    if not isinstance(steps, int) or steps < 5:
        raise Error(f"steps is {steps!r}; it must be a whole number of at least 5", "invalid_option")
    if not seconds > 0:
        raise Error(f"seconds is {seconds!r}; it must be a number above 0", "invalid_option")
    _check(model, optimizers)
    outcome = Outcome(output, rank=dist.get_rank())
    running = Doctor(outcome, steps=steps, seconds=seconds, network=network, trial=trial)
    running.watch(model, optimizers)
    try:
        yield outcome
    finally:
        running.close()
        if not running.done:
            made = len(running.observer.steps)
            outcome.fail(f"the loop made {made} of the {running.needed_steps} steps that the doctor observes")


def _check(model: DistributedDataParallel, optimizers: Sequence[Optimizer]) -> None:
    if not isinstance(model, DistributedDataParallel):
        raise Error("gradcast.doctor diagnoses a DistributedDataParallel module; wrap the model first", "invalid_use")
    for each in optimizers:
        if not updates(each, model.module):
            raise Error(f"the {type(each).__name__} holds no parameter of the module", "invalid_use")
    if not optimizers:
        raise Error("gradcast.doctor needs the optimizers that update the module; pass them", "invalid_use")
    why = obstacle(model, optimizers)
    if why is not None:
        raise Error(why, "invalid_use")
