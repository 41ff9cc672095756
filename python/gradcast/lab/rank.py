"""One rank of ``workers.run_for_result``: ``python -m gradcast.lab.rank CALL RESULT`` with torchrun's variables.

Calls the function that the file CALL names. Rank 0 writes the return value to the file RESULT.
"""

import importlib
import json
import pickle
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from gradcast.lab.cores import wake_promptly


def main(call: Path, result: Path) -> None:
    function, arguments, promptly = pickle.loads(call.read_bytes())
    module, _, name = function.partition(":")
    torch.set_num_threads(1)
    if promptly:
        wake_promptly()
    dist.init_process_group("gloo")
    found = getattr(importlib.import_module(module), name)(*arguments)
    if dist.get_rank() == 0:
        result.write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
