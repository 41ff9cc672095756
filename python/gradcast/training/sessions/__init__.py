"""What trains a set of parameters from one change of them to the next.

kinds.py lists the kinds of session, session.py follows one gradient through that of several workers.
"""
