"""A sender and a receiver in one process: what goes in comes out, in order and whole, or not at all."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import Tensor

from reroll.weights.buckets import Bucket, Channel, PushBroken, Stored, TransportKind, WeightReceiver
from reroll.weights.sender import WeightSender

KINDS: list[TransportKind] = ["store", "ipc", "disk"]
CPU = torch.device("cpu")


def model(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    sizes = {"embed": (40, 8), "norm": (7,), "scale": (), "large": (300, 10), "odd": (3, 1, 5), "last": (40, 8)}
    tensors = {name: torch.randn(size, generator=generator) for name, size in sizes.items()}
    return tensors | {
        "half": torch.randn(33, generator=generator).bfloat16(),
        "turned": torch.randn(6, 9, generator=generator).T,
    }


def fleeting(tensors: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Each is valid until the next one is asked for, as gathered weights are."""
    for name, tensor in tensors.items():
        lent = tensor.clone()
        yield name, lent
        lent.fill_(float("nan"))


def channel(kind: TransportKind, folder: Path, *, delta: bool = False, bucket_bytes: int = 3000) -> Channel:
    return Channel(kind=kind, bucket_bytes=bucket_bytes, delta=delta, folder=folder)


def send(
    sender: WeightSender, receiver: WeightReceiver, tensors: dict[str, Tensor], *, version: int, base: int | None = None
) -> list[Bucket]:
    """One whole push; what came out is compared with what went in."""
    buckets, taken = [], dict[str, Tensor]()
    for bucket in sender.buckets(fleeting(tensors), version=version, base_version=base):
        assert bucket is not None
        taken |= {name: tensor.clone() for name, tensor in receiver.open(bucket).items()}
        buckets.append(bucket)
    assert [bucket.is_last for bucket in buckets] == [False] * (len(buckets) - 1) + [True]
    receiver.confirm()
    assert taken.keys() == tensors.keys()
    assert all(torch.equal(taken[name], tensor) and taken[name].dtype == tensor.dtype for name, tensor in tensors.items())
    return buckets


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("delta", [False, True])
def test_what_goes_in_comes_out_push_after_push(kind: TransportKind, delta: bool, tmp_path: Path) -> None:
    way = channel(kind, tmp_path, delta=delta)
    sender, receiver = WeightSender(way, rank=0, device="cpu"), WeightReceiver(way, device=CPU)
    for version in range(4):
        send(sender, receiver, model(seed=version), version=version, base=version - 1 if delta and version else None)
    sender.close()


def test_buckets_are_filled_up_to_their_size_and_a_larger_tensor_travels_alone(tmp_path: Path) -> None:
    way = channel("store", tmp_path)
    buckets = send(WeightSender(way, rank=0, device="cpu"), WeightReceiver(way, device=CPU), model(0), version=1)
    assert [[entry.name for entry in bucket.entries] for bucket in buckets] == [
        ["embed", "norm", "scale"],
        ["large"],
        ["odd", "last", "half", "turned"],
    ]


def test_a_rank_that_only_helps_goes_through_the_same_buckets_and_holds_nothing(tmp_path: Path) -> None:
    for kind in KINDS:
        sender, helper = (WeightSender(channel(kind, tmp_path / kind), rank=rank, device="cpu") for rank in (0, 1))
        seen: dict[WeightSender, list[int]] = {sender: [], helper: []}
        for sender, counts in seen.items():
            gathered = []
            tensors = ((name, gathered.append(name) or tensor) for name, tensor in model(0).items())  # type: ignore[func-returns-value]
            for bucket in sender.buckets(tensors, version=1, base_version=None):
                assert (bucket is None) == (sender is helper)
                counts.append(len(gathered))
        assert seen[sender] == seen[helper], "ranks that gather different layers wait for each other for ever"


def test_only_the_changes_travel_when_the_engine_has_the_version_before(tmp_path: Path) -> None:
    way = channel("store", tmp_path, delta=True)
    sender, receiver, weights = WeightSender(way, rank=0, device="cpu"), WeightReceiver(way, device=CPU), model(0)
    whole = send(sender, receiver, weights, version=1)
    changed = send(sender, receiver, weights | {"norm": weights["norm"] + 1}, version=2, base=1)
    assert sum(bucket.num_bytes for bucket in changed) < sum(bucket.num_bytes for bucket in whole) / 10
    assert [bucket.base_version for bucket in changed] == [1] * len(changed)


def test_a_sender_that_knows_another_version_sends_whole_weights(tmp_path: Path) -> None:
    way = channel("store", tmp_path, delta=True)
    sender, receiver = WeightSender(way, rank=0, device="cpu"), WeightReceiver(way, device=CPU)
    send(sender, receiver, model(0), version=1)
    assert {bucket.base_version for bucket in send(sender, receiver, model(1), version=3, base=2)} == {None}


def test_changes_to_a_version_that_is_not_here_are_refused(tmp_path: Path) -> None:
    way = channel("store", tmp_path, delta=True)
    sender, receiver, late = (
        WeightSender(way, rank=0, device="cpu"),
        WeightReceiver(way, device=CPU),
        WeightReceiver(way, device=CPU),
    )
    send(sender, receiver, model(0), version=1)
    with pytest.raises(PushBroken, match="changes since version 1 came, but version None is what is here"):
        late.open(next(sender.buckets(model(1).items(), version=2, base_version=1)))  # type: ignore[arg-type]


def test_damaged_changes_are_refused(tmp_path: Path) -> None:
    way = channel("store", tmp_path, delta=True)
    sender, receiver = WeightSender(way, rank=0, device="cpu"), WeightReceiver(way, device=CPU)
    send(sender, receiver, model(0), version=1)
    bucket = next(sender.buckets(model(1).items(), version=2, base_version=1))
    assert bucket is not None
    assert isinstance(bucket.payload, Stored)
    data = bucket.payload.data.copy()
    data[20] ^= 1
    with pytest.raises(PushBroken, match="damaged"):
        receiver.open(replace(bucket, payload=Stored(data)))


def test_a_push_without_weights_still_says_that_it_is_whole(tmp_path: Path) -> None:
    way = channel("store", tmp_path)
    [bucket] = send(WeightSender(way, rank=0, device="cpu"), WeightReceiver(way, device=CPU), {}, version=1)
    assert bucket.entries == ()


def test_a_lost_a_repeated_and_a_foreign_bucket_break_the_push(tmp_path: Path) -> None:
    way = channel("store", tmp_path)
    sender, receiver = WeightSender(way, rank=0, device="cpu"), WeightReceiver(way, device=CPU)
    first, second, third = (bucket for bucket in sender.buckets(model(0).items(), version=5, base_version=None) if bucket)
    with pytest.raises(PushBroken, match="was due"):
        receiver.open(second)
    for before, bad in [([first], third), ([first, second], second), ([first], replace(second, version=4))]:
        for bucket in before:
            receiver.open(bucket)
        with pytest.raises(PushBroken, match="was due"):
            receiver.open(bad)


def test_the_first_bucket_of_a_push_voids_what_is_left_of_another(tmp_path: Path) -> None:
    way = channel("store", tmp_path)
    sender, receiver = WeightSender(way, rank=0, device="cpu"), WeightReceiver(way, device=CPU)
    half = next(sender.buckets(model(0).items(), version=5, base_version=None))
    assert half is not None
    receiver.open(half)
    send(sender, receiver, model(1), version=6)


def test_a_version_on_disk_gets_its_name_when_it_is_whole_and_older_ones_go(tmp_path: Path) -> None:
    way = channel("disk", tmp_path)
    sender = WeightSender(way, rank=0, device="cpu")
    broken = sender.buckets(interrupted(model(0)), version=1, base_version=None)
    with pytest.raises(KeyboardInterrupt):
        next(broken)
    assert [folder.name for folder in tmp_path.iterdir()] == ["version-00000001.partial"]
    for version in (1, 2):
        send(sender, WeightReceiver(way, device=CPU), model(version), version=version)
    [folder] = tmp_path.iterdir()
    assert folder.name == "version-00000002"
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    for name, tensor in model(2).items():
        assert torch.equal(safetensors.torch.load_file(folder / index[name])[name], tensor)


def interrupted(tensors: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in tensors.items():
        if name == "last":
            raise KeyboardInterrupt
        yield name, tensor


def test_a_folder_that_cannot_be_written_is_told_after_all_ranks_have_gathered(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    sender, gathered = WeightSender(channel("disk", tmp_path / "file"), rank=0, device="cpu"), []
    tensors = ((name, gathered.append(name) or tensor) for name, tensor in model(0).items())  # type: ignore[func-returns-value]
    with pytest.raises(OSError, match=r"cannot write weights into .*set weights.folder"):
        next(sender.buckets(tensors, version=1, base_version=None))
    assert gathered == list(model(0))
