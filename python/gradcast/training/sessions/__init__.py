"""Sessions: each trains a set of parameters until that set changes.

kinds.py lists the kinds of session, session.py follows one gradient through a session of several workers.
"""
