"""gradcast plans the gradient traffic of data-parallel training.

>>> import gradcast
>>> profile = gradcast.load_profile("resnet50", scale=0.5)
>>> link = gradcast.LinkModel(all_reduce=[gradcast.LinkPiece(alpha_ns=700e3, beta_ns_per_byte=4.7)])
>>> plan = gradcast.make_plan(profile, link)
>>> plan.predicted_ns >= plan.bound_ns
True
"""

from gradcast._core import (
    Block,
    Bound,
    LinkModel,
    LinkPiece,
    Plan,
    Profile,
    Tensor,
    Timeline,
    __version__,
    bound,
    make_plan,
    play,
    policies,
)
from gradcast.errors import Error
from gradcast.files import load_profile

__all__ = [
    "Block",
    "Bound",
    "Error",
    "LinkModel",
    "LinkPiece",
    "Plan",
    "Profile",
    "Tensor",
    "Timeline",
    "__version__",
    "bound",
    "load_profile",
    "make_plan",
    "play",
    "policies",
]
