"""A framework's cases run one after another in one pair of processes: importing the framework takes longest."""

from collections.abc import Iterable

import pytest


class Told(dict):
    """By case, what both ranks told."""

    def digests(self, case: str) -> set[str]:
        """The digests of the ranks' parameters: a single one if the ranks agree."""
        return {rank["digest"] for rank in self[case]}

    def check_way(self, kind: str, way: str, deferred: int) -> None:
        """The numbers are those of the framework's own DDP, and so many updates were left to the next forward pass."""
        assert len(self.digests(f"{kind} stock")) == 1
        assert self.digests(f"{kind} {way}") == self.digests(f"{kind} stock")
        for rank in self[f"{kind} {way}"]:
            assert rank.get("mode") == {"registered": None, "inner": "overlap"}.get(way, way)
            assert rank["deferred"] == (deferred if rank.get("mode") == "overlap" else 0)

    def check_kinds_differ(self, kinds: Iterable[str]) -> None:
        """Otherwise clipping, for instance, would have nothing to clip."""
        assert len(set().union(*(self.digests(f"{kind} stock") for kind in kinds))) == len(list(kinds))


@pytest.fixture(scope="session", autouse=True)
def _offline(native_part):
    """Nothing here may ask the network for a model."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setenv("ACCELERATE_USE_CPU", "1")
        yield


@pytest.fixture(scope="session")
def trainings(tmp_path_factory):
    """trainings("frameworks.lightning_cases") -> what both ranks told, by case."""
    from training.launch import launch  # needs torch, without which all of this is skipped

    told: dict[str, Told] = {}

    def run(module: str) -> Told:
        if module not in told:
            ranks = launch(2, str(tmp_path_factory.mktemp("run")), module=module, limit_s=150.0)
            said = "\n".join(ended.errors[-4000:] for ended in ranks)
            assert [ended.code for ended in ranks] == [0, 0], said
            told[module] = Told({line["case"]: [line] for line in ranks[0].told})
            for line in ranks[1].told:
                told[module][line["case"]].append(line)
        return told[module]

    return run


@pytest.fixture(scope="module")
def told(request, trainings):
    """What the cases of this file's MODULE told."""
    return trainings(request.module.MODULE)
