"""Runs a module as a program, with gradcast attached to every DDP module that it makes.

torchrun ... -m peers.run_with_gradcast MODE MODULE      MODE: plain, hook or overlap
"""

import runpy
import sys

from peers import everywhere

if __name__ == "__main__":
    mode, module = sys.argv[1:3]
    if mode != "plain":
        everywhere.install(mode)
    sys.argv = [module, *sys.argv[3:]]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
