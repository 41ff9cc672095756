"""Turns measurements into the diagnosis: where time goes, what would help, what is misconfigured. Pure; needs no
torch.
"""
