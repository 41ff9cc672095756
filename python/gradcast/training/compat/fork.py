"""Forks of the process, for instance for workers of a data loader.

A child process has a copy of everything but the threads, and must not use the network. Before a fork everything in
flight is completed, so that the child sees finished values. In the child gradcast releases everything.
"""

import contextlib
import ctypes
import os
import weakref
from typing import Any

from gradcast.errors import Error

attachments: "weakref.WeakSet[Any]" = weakref.WeakSet()


def watch(attachment: Any) -> None:
    """Handles this attachment at each fork from now on."""
    attachments.add(attachment)


def _before() -> None:
    for attachment in list(attachments):
        if not attachment.session.released:
            # The error is raised again where the training needs the values.
            with contextlib.suppress(Error):
                attachment.session.flush()


def _in_child() -> None:
    for attachment in list(attachments):
        attachment.session.abandon()
        # The destructor of the exchange would wait for a thread that this process does not have.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(attachment.session.exchange))


os.register_at_fork(before=_before, after_in_child=_in_child)
