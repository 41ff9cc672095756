"""The commands of the command line, one module each, with ``add_parser(commands)``."""

from gradcast.commands import lab, link, networks, plan, plot, policies, profile, simulate, sweep

# In the order in which --help lists them: what a newcomer wants first.
ALL = (simulate, plan, plot, sweep, profile, policies, networks, link, lab)
