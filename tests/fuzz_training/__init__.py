"""Random training programs, each run with stock DDP and with gradcast in both modes: the results are equal, or
gradcast raises its Error before a wrong number can be used.

    python -m fuzz_training --count 1000            from the folder tests; prints what was found and the shares
    python -m fuzz_training --seed 17 --count 1 --print    one program as code

A program is made from its seed (generate.py) out of parts of models and of loops (models.py, loops.py), written as code
(program.py), run on the ranks of the tests' pool (rank.py), and made smaller where it fails (shrink.py).
"""
