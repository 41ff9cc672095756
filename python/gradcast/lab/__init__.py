"""Several hosts on one machine: network namespaces joined by links of a chosen speed, with one worker process on each.

``hosts`` makes and removes the network; ``workers`` runs the processes, with or without such a network.
"""

from gradcast.lab.errors import LabError
from gradcast.lab.hosts import Network
from gradcast.lab.workers import run_workers

__all__ = ["LabError", "Network", "run_workers"]
