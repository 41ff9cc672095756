"""Local optimizer steps with an outer optimizer every few steps: differences of parameters are sent, in rounds.

session.py counts steps and owns the hooks, rounds.py sends and applies by the schedule (gradcast/local_steps.py),
fragments.py knows where each element lies, outer.py is the outer optimizer, header.py notices ranks that disagree.
"""
