"""The commands of the command line, one module each, with ``add_parser(commands)``."""

from gradcast.commands import info, lab, link, networks, plan, plot, policies, profile, report, simulate, sweep

# In the order in which --help lists them: what a newcomer wants first.
ALL = (simulate, plan, plot, sweep, profile, policies, networks, link, lab, report, info)
