"""A comparison in sentences: what limits this training, and what scheduling can gain."""

from gradcast import _core
from gradcast.comparison.compare import BASELINE, NOTICEABLE_GAIN, Comparison, ratio
from gradcast.units import format_ms, format_percent

# A bound this close to compute alone leaves no visible cost of communication.
_HIDDEN_SHARE = 0.005
# If communication takes this many times as long as compute, little of it can be hidden behind compute.
_DOMINANT_RATIO = 3


def verdict(comparison: Comparison) -> str:
    sentences = [_limit(comparison), *_gain(comparison), *_overlap_mode(comparison)]
    return " ".join(sentences)


def _limit(comparison: Comparison) -> str:
    bound_ns, compute_ns = comparison.bound.best_ns, comparison.compute_ns
    if bound_ns <= compute_ns * (1 + _HIDDEN_SHARE):
        limit = f"Compute is the limit: it takes {format_ms(compute_ns)} alone, and all traffic can hide behind it"
    else:
        limit = f"The network is the limit: no schedule can go below {format_ms(bound_ns)}"
        all_reduce_ns = comparison.all_reduce_bound.best_ns
        if all_reduce_ns > (1 + NOTICEABLE_GAIN) * bound_ns:
            limit += f" ({format_ms(all_reduce_ns)} with all-reduces alone)"
    return f"{limit}; {_reached(comparison)}."


def _reached(comparison: Comparison) -> str:
    ddp = f"DDP {format_ms(comparison.ddp.predicted_ns)}"
    best = comparison.rows[0]
    if best.policy == BASELINE:
        return f"{ddp} is the best of these"
    # forecast also tries the other policies' plans, so it is the best or shares the first place.
    shown = next((row for row in comparison.rows if row.policy == _core.DEFAULT_POLICY), best)
    return f"{shown.policy} reaches {format_ms(shown.plan.predicted_ns)}, {ddp}"


def _gain(comparison: Comparison) -> list[str]:
    """Sentences about the largest saving of any schedule over DDP, and about what saves more."""
    gain = 1 - ratio(comparison.bound.best_ns, comparison.ddp.predicted_ns)
    traffic_ratio = ratio(comparison.link_ns, comparison.compute_ns)
    if gain < NOTICEABLE_GAIN:
        sentences = [f"Scheduling cannot help here: DDP is within {format_percent(max(gain, 0))} of the best possible."]
        if traffic_ratio > 1:
            sentences.append("Fewer bytes (a smaller wire format) or a faster network would help.")
        return sentences
    sentence = f"Scheduling saves at most {format_percent(gain)} of DDP's time"
    if traffic_ratio > _DOMINANT_RATIO:
        return [
            f"{sentence}, because the traffic alone takes {traffic_ratio:.1f} times as long as compute: "
            "fewer bytes or a faster network would save more."
        ]
    return [f"{sentence}."]


def _overlap_mode(comparison: Comparison) -> list[str]:
    """A sentence about the gain of overlap mode over hook mode, if it is noticeable."""
    overlap_ns = comparison.overlap_bound_ns
    if overlap_ns > (1 - NOTICEABLE_GAIN) * comparison.bound.best_ns:
        return []
    return [f"In overlap mode a schedule could come down to {format_ms(overlap_ns)}."]
