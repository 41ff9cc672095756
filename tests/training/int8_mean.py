"""What the wire format int8 makes of the gradients of all ranks, in plain torch and in one process.

It knows nothing of blocks, layouts or plans. ``test_wire`` shows that gradcast gives these bits on 2 to 4 ranks;
``benchmarks/int8_training.py`` trains with it.
"""

import functools

import torch

GROUP_ELEMENTS = 128


class Int8Mean:
    """The mean of the ranks' gradients of one model, with error feedback unless told otherwise.

    On two levels, the rank of a host that has the local number of a group's owner keeps what rounding takes from the
    host's sum of that group. So there is one residual per host and group.
    """

    def __init__(self, parameters, world_size, ranks_per_host=1, *, has_feedback=True):
        self.world_size, self.ranks_per_host, self.has_feedback = world_size, ranks_per_host, has_feedback
        hosts = world_size // ranks_per_host
        self.residuals = [groups_of(torch.zeros(hosts, each.numel(), device=each.device)) for each in parameters]

    def of(self, index, gradients):
        """The mean of one parameter's gradients, by rank; with the first one's layout in memory."""
        terms = [gradient * (1 / self.world_size) for gradient in gradients]
        if terms[0].dtype != torch.float32 or terms[0].dim() < 2:
            return added(self.sums_of_hosts(terms))
        # Groups are of numbers that are adjacent in memory.
        flat = torch.stack([term.as_strided((term.numel(),), (1,)) for term in terms])
        mean = torch.empty_like(terms[0])
        mean.as_strided((mean.numel(),), (1,)).copy_(self.in_groups(index, flat)[: mean.numel()])
        return mean

    def in_groups(self, index, terms):
        """``terms``: by rank and element."""
        residual = self.residuals[index]
        values = groups_of(torch.stack(self.sums_of_hosts(terms))) + residual
        sent = rounded(values)
        total = added(sent)
        result = rounded(total)
        if self.has_feedback:
            residual.copy_(values - sent)
            group = torch.arange(len(total), device=total.device)
            residual[(group + index) % self.world_size // self.ranks_per_host, group] += total - result
        return result.flatten()

    def sums_of_hosts(self, terms):
        per_host = self.ranks_per_host
        return [added(terms[first : first + per_host]) for first in range(0, len(terms), per_host)]


def added(terms):
    """In fp32 and in this order."""
    return functools.reduce(torch.add, terms)


def groups_of(rows):
    """By row, group and element."""
    return torch.nn.functional.pad(rows, (0, -rows.shape[1] % GROUP_ELEMENTS)).unflatten(1, (-1, GROUP_ELEMENTS))


def rounded(groups):
    """Each group as the nearest multiples, ties to even, of a 127th of its largest magnitude."""
    scale = groups.abs().amax(-1, keepdim=True) / 127
    return torch.where(scale > 0, torch.round(groups * (1 / scale)) * scale, torch.zeros_like(groups))
