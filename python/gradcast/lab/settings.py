"""Settings of ``gradcast dev lab train``: model, hosts and duration."""

import dataclasses

# Programs of examples/ whose models are trained as they are, without a stand-in.
REAL_MODELS = ("digits", "char_gpt")


@dataclasses.dataclass(frozen=True)
class Settings:
    model: str  # a real model's name, or that of the stand-in's profile
    profile: str | None = None  # the stand-in's profile as JSON; None for a real model
    rates_bits_per_s: tuple[float, ...] = ()  # of each host's link
    names: tuple[str, ...] = ()  # of the variants, see variants.py
    scale_size: float = 1.0  # of the stand-in's tensors
    width: int | None = None  # of a real model; None for its example's
    batch: int = 8  # of a real model, per rank and step
    rounds: int = 5
    steps: int = 4  # per round and variant; the first one is not counted
    in_flight: int = 1
    latency_s: float = 0.0  # of each host's link, each way, in addition to the time that its rate gives a packet
    ranks_per_host: int = 1

    @property
    def hosts(self) -> int:
        return len(self.rates_bits_per_s)

    @property
    def world_size(self) -> int:
        return self.hosts * self.ranks_per_host

    @property
    def stand_in(self) -> bool:
        return self.profile is not None
