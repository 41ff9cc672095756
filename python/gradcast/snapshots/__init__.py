"""Snapshots of a training, and resuming from one with the same bits and without using a sample twice."""

from gradcast.snapshots.balanced import BalancedBatchSampler
from gradcast.snapshots.resuming import resume
from gradcast.snapshots.sampler import ResumableLoader, ResumableSampler
from gradcast.snapshots.snapshots import Snapshots

__all__ = ["BalancedBatchSampler", "ResumableLoader", "ResumableSampler", "Snapshots", "resume"]
