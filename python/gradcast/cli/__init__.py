"""The commands of the command line. Each is a module, named as the user types it, with ``add_parser(commands)``."""

from gradcast.cli import (
    advise,
    compare,
    doctor,
    info,
    lab,
    link,
    network,
    networks,
    plan,
    plot,
    policies,
    profile,
    report,
    scaling,
    simulate,
    sweep,
)

# In the order in which --help lists them: what a newcomer needs first.
ALL = (
    doctor,
    simulate,
    plan,
    plot,
    sweep,
    scaling,
    advise,
    profile,
    policies,
    networks,
    link,
    network,
    lab,
    report,
    compare,
    info,
)
