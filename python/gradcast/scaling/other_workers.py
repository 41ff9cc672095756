"""A measured profile for another number of workers. Pure.

More or fewer workers change only the link, as growth.py predicts: each worker computes as before, on its own batch. For
ranks that sum their gradients inside each host first, the number of hosts counts.
"""

from gradcast import _core
from gradcast.comparison.measured_exchange import MeasuredExchange, exchange_of, with_exchange
from gradcast.host_traffic import RING
from gradcast.scaling.growth import Growth, Network


def why_not(profile: _core.Profile, now: MeasuredExchange) -> str | None:
    """Returns the reason why the profile does not hold for the workers of ``now``; None if it does."""
    before = exchange_of(profile)
    if before is None:
        return "it does not say on which hosts its network was measured"
    if 1 in (before.hosts.count, now.hosts.count):
        return "one of the two trainings is on one host, without a network"
    kinds = [(each.hosts.ranks_per_host, each.form, each.wire, each.backend) for each in (before, now)]
    if kinds[0] != kinds[1]:
        return f"it was measured on {before.describe()}, this training is on {now.describe()}"
    if before.hosts.ranks_per_host is None:
        return "its hosts have different numbers of ranks"
    return None


def for_workers(profile: _core.Profile, now: MeasuredExchange) -> _core.Profile:
    """Returns the profile that the workers of ``now`` would measure. REQUIRES: why_not is None."""
    before = exchange_of(profile)
    counts = [len(each.hosts.host_of) if each.form == RING else each.hosts.count for each in (before, now)]
    link = Growth(Network("measured", ((counts[0], profile.link),))).estimate("ring", counts[1]).link
    changed = profile.replace(link=link, world_size=len(now.hosts.host_of))
    return with_exchange(changed, now)
