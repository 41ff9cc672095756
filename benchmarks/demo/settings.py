"""What the demo trains, and for how long."""

import dataclasses
import json


@dataclasses.dataclass(frozen=True)
class Settings:
    """Chosen so that a step takes long enough, tens of ms, for two cores to serve the sockets beside it."""

    workers: int = 2
    width: int = 64
    hidden: int = 256
    batch: int = 200  # images per worker and step
    learning_rate: float = 0.05
    rounds: int = 5
    steps: int = 15  # per round and mode; the first round holds gradcast's warm-up and is not timed
    traced_steps: int = 8

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @staticmethod
    def from_json(text: str) -> "Settings":
        return Settings(**json.loads(text))
