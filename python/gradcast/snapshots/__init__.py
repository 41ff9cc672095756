"""Resuming a training exactly once."""

from gradcast.snapshots.sampler import ResumableLoader, ResumableSampler

__all__ = ["ResumableLoader", "ResumableSampler"]
