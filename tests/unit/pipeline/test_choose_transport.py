"""Which way weights take, by who sits where."""

from __future__ import annotations

import pytest

from reroll.config.weights import WeightsKind
from reroll.errors import WeightsError
from reroll.pipeline.weight_sync import choose_transport, colocated_rank
from reroll.weights.buckets import ProcessLocation, TransportKind


def at(*locations: str) -> list[ProcessLocation]:
    """`host/device` each."""
    return [ProcessLocation(*place.split("/"), process=number) for number, place in enumerate(locations)]  # type: ignore[misc]


@pytest.mark.parametrize(
    ("trainers", "engines", "way"),
    [
        (["a/cpu"], ["a/cpu", "a/cpu"], "ipc"),
        (["a/cpu"], ["a/cpu", "b/cpu"], "store"),
        (["a/gpu0", "a/gpu1"], ["a/gpu0", "a/gpu1"], "ipc"),
        (["a/gpu0", "b/gpu1"], ["b/gpu1"], "ipc"),
        (["a/gpu0"], ["a/gpu1", "b/gpu2"], "broadcast"),
        (["a/gpu0"], ["a/gpu0", "b/gpu2"], "store"),
        (["a/gpu0"], ["b/gpu2", "b/gpu2"], "store"),
        (["a/gpu0"], ["a/cpu"], "store"),
    ],
)
def test_auto_takes_the_fastest_way_that_can_work(trainers: list[str], engines: list[str], way: TransportKind) -> None:
    assert choose_transport("auto", at(*trainers), dict(enumerate(at(*engines)))) == way


@pytest.mark.parametrize(
    ("wanted", "trainers", "engines"),
    [
        ("ipc", ["a/cpu"], ["b/cpu"]),
        ("ipc", ["a/gpu0"], ["a/gpu1"]),
        ("broadcast", ["a/gpu0"], ["a/gpu0"]),
        ("broadcast", ["a/gpu0"], ["b/gpu1", "b/gpu1"]),
        ("broadcast", ["a/gpu0"], ["a/cpu"]),
    ],
)
def test_a_way_that_cannot_work_is_refused_with_the_fix(wanted: WeightsKind, trainers: list[str], engines: list[str]) -> None:
    with pytest.raises(WeightsError, match=r"set weights\.kind to auto"):
        choose_transport(wanted, at(*trainers), dict(enumerate(at(*engines))))


@pytest.mark.parametrize("wanted", ["broadcast", "disk", "store"])
def test_a_way_that_can_work_is_taken_though_another_is_faster(wanted: TransportKind) -> None:
    assert choose_transport(wanted, at("a/cpu"), {0: at("a/cpu")[0]}) == wanted


def test_an_engine_gets_its_weights_from_the_trainer_on_its_gpu() -> None:
    trainers, engines = at("a/gpu0", "a/gpu1"), at("a/gpu1", "a/gpu0", "a/gpu2")
    assert [colocated_rank(trainers, engine) for engine in engines] == [1, 0, None]
