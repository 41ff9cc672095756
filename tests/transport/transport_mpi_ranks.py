"""One rank of a world that mpirun has started: `transport_mpi_ranks.py PROGRAM [FOLDER]`.

The conformance suite writes a line for each case that went well into FOLDER/RANK: mpirun mixes what the ranks print.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "transport/mpi"))
import _mpi_world

import gradcast
from transport_conformance import Rank, everywhere


class MpiRank(Rank):
    def transport(self, buffers: Sequence[np.ndarray]) -> object:
        return _mpi_world.Transport(list(buffers))

    def barrier(self) -> None:
        _mpi_world.barrier()


def conformance() -> None:
    _mpi_world.init(_mpi_world.MULTIPLE)
    rank = MpiRank(*_mpi_world.place())
    for case in everywhere(rank.world_size):
        case(rank)
        rank.barrier()
        with Path(sys.argv[2], str(rank.rank)).open("a") as file:
            print(case.__name__, file=file)
    _mpi_world.finalize()


def uninitialized() -> None:
    try:
        _mpi_world.Transport([np.zeros(4, "float32")])
    except gradcast.Error as error:
        print(error)


def single_threaded() -> None:
    _mpi_world.init(_mpi_world.SERIALIZED)
    uninitialized()
    _mpi_world.finalize()


def finalized() -> None:
    _mpi_world.init(_mpi_world.MULTIPLE)
    _mpi_world.finalize()
    uninitialized()


if __name__ == "__main__":
    {each.__name__: each for each in (conformance, uninitialized, single_threaded, finalized)}[sys.argv[1]]()
