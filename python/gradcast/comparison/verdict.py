"""What a comparison means, in words: what limits this training, what scheduling can gain, and when it cannot help."""

from gradcast import _core
from gradcast.comparison.compare import BASELINE, Comparison, ratio
from gradcast.units import format_ms, format_percent

# Less than this is within what a cluster varies from one iteration to the next.
_WORTH_IT = 0.02
# A bound so close to compute alone leaves no visible cost of communication.
_HIDDEN = 0.005
# Traffic this many times as long as compute: what can be hidden behind compute is a small part of it.
_HOPELESS = 3


def verdict(comparison: Comparison) -> str:
    sentences = [_limit(comparison), *_gain(comparison), *_overlap_mode(comparison)]
    return " ".join(sentences)


def _limit(comparison: Comparison) -> str:
    bound_ns, compute_ns = comparison.bound.best_ns, comparison.compute_ns
    if bound_ns <= compute_ns * (1 + _HIDDEN):
        limit = f"Compute is the limit: it takes {format_ms(compute_ns)} alone, and all traffic can hide behind it"
    else:
        limit = f"The network is the limit: no schedule can go below {format_ms(bound_ns)}"
        all_reduce_ns = comparison.all_reduce_bound.best_ns
        if all_reduce_ns > (1 + _WORTH_IT) * bound_ns:
            limit += f" ({format_ms(all_reduce_ns)} with all-reduces alone)"
    return f"{limit}; {_reached(comparison)}."


def _reached(comparison: Comparison) -> str:
    ddp = f"DDP {format_ms(comparison.ddp.predicted_ns)}"
    best = comparison.rows[0]
    if best.policy == BASELINE:
        return f"{ddp} is the best of these"
    # forecast plays every other policy's plan too, so it is the best or shares the first place.
    shown = next((row for row in comparison.rows if row.policy == _core.DEFAULT_POLICY), best)
    return f"{shown.policy} reaches {format_ms(shown.plan.predicted_ns)}, {ddp}"


def _gain(comparison: Comparison) -> list[str]:
    """What the best possible schedule would save of a DDP iteration, and what would save more."""
    gain = 1 - ratio(comparison.bound.best_ns, comparison.ddp.predicted_ns)
    traffic_ratio = ratio(comparison.link_ns, comparison.compute_ns)
    if gain < _WORTH_IT:
        sentences = [f"Scheduling cannot help here: DDP is within {format_percent(max(gain, 0))} of the best possible."]
        if traffic_ratio > 1:
            sentences.append("Fewer bytes (a smaller wire format) or a faster network would help.")
        return sentences
    sentence = f"Scheduling saves at most {format_percent(gain)} of DDP's time"
    if traffic_ratio > _HOPELESS:
        return [
            f"{sentence}, because the traffic alone takes {traffic_ratio:.1f} times as long as compute: "
            "fewer bytes or a faster network would save more."
        ]
    return [f"{sentence}."]


def _overlap_mode(comparison: Comparison) -> list[str]:
    """What hook mode gives away, where that is worth a sentence."""
    overlap_ns = comparison.overlap_bound_ns
    if overlap_ns > (1 - _WORTH_IT) * comparison.bound.best_ns:
        return []
    return [f"In overlap mode a schedule could come down to {format_ms(overlap_ns)}."]
