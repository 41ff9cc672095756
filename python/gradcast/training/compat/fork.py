"""fork(): a child has a copy of everything but the threads, and nothing of the network is its business.

Before a fork what is in flight is finished, so that the child, a worker of a data loader, say, sees finished values. In
the child gradcast lets go of everything.
"""

import contextlib
import ctypes
import os
import weakref
from typing import Any

from gradcast.errors import Error

_attached: "weakref.WeakSet[Any]" = weakref.WeakSet()


def watch(attachment: Any) -> None:
    """From now on forks take care of this one."""
    _attached.add(attachment)


def _before() -> None:
    for attachment in list(_attached):
        if not attachment.session.released:
            # What has failed is raised where the training needs it.
            with contextlib.suppress(Error):
                attachment.session.flush()


def _in_child() -> None:
    for attachment in list(_attached):
        attachment.session.abandon()
        # Its destructor would wait for a thread that this process does not have.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(attachment.session.exchange))


os.register_at_fork(before=_before, after_in_child=_in_child)
