"""The profile that tests of the laboratory's stand-in train."""

import gradcast

MS = 1_000_000


def small_profile():
    """Three layers, the first of which has two tensors; backward goes on after the last gradient."""
    times = [("a", 4000, 24, 2), ("a.bias", 40, 23, 2), ("b", 20_000, 16, 4), ("c", 40_000, 8, 8)]
    tensors = [
        gradcast.Tensor(name=name, bytes=size, ready_ns=ready * MS, need_ns=need * MS)
        for name, size, ready, need in times
    ]
    return gradcast.Profile(name="small", forward_ns=12 * MS, backward_ns=25 * MS, tensors=tensors)
