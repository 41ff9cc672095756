"""The commands of the command line. Each is a module, named as the user types it, with ``add_parser(commands)``."""

from gradcast.cli import advise, compare, dev, doctor, info, network, report, simulate, watch

# In the order in which --help lists them: what a newcomer needs first.
GROUPS = {
    "for your training": (doctor, network, compare, report, watch, info),
    "for studying schedules": (simulate, advise, dev),
}
