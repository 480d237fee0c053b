"""An outbox and an inbox in one process: what goes in comes out, in order and whole, or not at all."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import Tensor

from reroll.weights.inbox import Inbox
from reroll.weights.outbox import Outbox
from reroll.weights.parcel import Carriage, Channel, Parcel, PushBroken, Stored

KINDS: list[Carriage] = ["store", "ipc", "disk"]
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


def channel(kind: Carriage, folder: Path, *, delta: bool = False, bucket_bytes: int = 3000) -> Channel:
    return Channel(kind=kind, bucket_bytes=bucket_bytes, delta=delta, folder=folder)


def send(outbox: Outbox, inbox: Inbox, tensors: dict[str, Tensor], *, version: int, base: int | None = None) -> list[Parcel]:
    """One whole push; what came out is compared with what went in."""
    parcels, taken = [], dict[str, Tensor]()
    for parcel in outbox.parcels(fleeting(tensors), version=version, base_version=base):
        assert parcel is not None
        taken |= {name: tensor.clone() for name, tensor in inbox.open(parcel).items()}
        parcels.append(parcel)
    assert [parcel.is_last for parcel in parcels] == [False] * (len(parcels) - 1) + [True]
    inbox.confirm()
    assert taken.keys() == tensors.keys()
    assert all(torch.equal(taken[name], tensor) and taken[name].dtype == tensor.dtype for name, tensor in tensors.items())
    return parcels


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("delta", [False, True])
def test_what_goes_in_comes_out_push_after_push(kind: Carriage, delta: bool, tmp_path: Path) -> None:
    way = channel(kind, tmp_path, delta=delta)
    outbox, inbox = Outbox(way, rank=0, device="cpu"), Inbox(way, device=CPU)
    for version in range(4):
        send(outbox, inbox, model(seed=version), version=version, base=version - 1 if delta and version else None)
    outbox.close()


def test_buckets_are_filled_up_to_their_size_and_a_larger_tensor_travels_alone(tmp_path: Path) -> None:
    way = channel("store", tmp_path)
    parcels = send(Outbox(way, rank=0, device="cpu"), Inbox(way, device=CPU), model(0), version=1)
    assert [[entry.name for entry in parcel.entries] for parcel in parcels] == [
        ["embed", "norm", "scale"],
        ["large"],
        ["odd", "last", "half", "turned"],
    ]


def test_a_rank_that_only_helps_goes_through_the_same_buckets_and_holds_nothing(tmp_path: Path) -> None:
    for kind in KINDS:
        sender, helper = (Outbox(channel(kind, tmp_path / kind), rank=rank, device="cpu") for rank in (0, 1))
        seen: dict[Outbox, list[int]] = {sender: [], helper: []}
        for outbox, counts in seen.items():
            gathered = []
            tensors = ((name, gathered.append(name) or tensor) for name, tensor in model(0).items())  # type: ignore[func-returns-value]
            for parcel in outbox.parcels(tensors, version=1, base_version=None):
                assert (parcel is None) == (outbox is helper)
                counts.append(len(gathered))
        assert seen[sender] == seen[helper], "ranks that gather different layers wait for each other for ever"


def test_only_the_changes_travel_when_the_engine_has_the_version_before(tmp_path: Path) -> None:
    way = channel("store", tmp_path, delta=True)
    outbox, inbox, weights = Outbox(way, rank=0, device="cpu"), Inbox(way, device=CPU), model(0)
    whole = send(outbox, inbox, weights, version=1)
    changed = send(outbox, inbox, weights | {"norm": weights["norm"] + 1}, version=2, base=1)
    assert sum(parcel.num_bytes for parcel in changed) < sum(parcel.num_bytes for parcel in whole) / 10
    assert [parcel.base_version for parcel in changed] == [1] * len(changed)


def test_a_sender_that_knows_another_version_sends_whole_weights(tmp_path: Path) -> None:
    way = channel("store", tmp_path, delta=True)
    outbox, inbox = Outbox(way, rank=0, device="cpu"), Inbox(way, device=CPU)
    send(outbox, inbox, model(0), version=1)
    assert {parcel.base_version for parcel in send(outbox, inbox, model(1), version=3, base=2)} == {None}


def test_changes_to_a_version_that_is_not_here_are_refused(tmp_path: Path) -> None:
    way = channel("store", tmp_path, delta=True)
    outbox, inbox, late = Outbox(way, rank=0, device="cpu"), Inbox(way, device=CPU), Inbox(way, device=CPU)
    send(outbox, inbox, model(0), version=1)
    with pytest.raises(PushBroken, match="changes since version 1 came, but version None is what is here"):
        late.open(next(outbox.parcels(model(1).items(), version=2, base_version=1)))  # type: ignore[arg-type]


def test_damaged_changes_are_refused(tmp_path: Path) -> None:
    way = channel("store", tmp_path, delta=True)
    outbox, inbox = Outbox(way, rank=0, device="cpu"), Inbox(way, device=CPU)
    send(outbox, inbox, model(0), version=1)
    parcel = next(outbox.parcels(model(1).items(), version=2, base_version=1))
    assert parcel is not None
    assert isinstance(parcel.payload, Stored)
    data = parcel.payload.data.copy()
    data[20] ^= 1
    with pytest.raises(PushBroken, match="damaged"):
        inbox.open(replace(parcel, payload=Stored(data)))


def test_a_push_without_weights_still_says_that_it_is_whole(tmp_path: Path) -> None:
    way = channel("store", tmp_path)
    [parcel] = send(Outbox(way, rank=0, device="cpu"), Inbox(way, device=CPU), {}, version=1)
    assert parcel.entries == ()


def test_a_lost_a_repeated_and_a_foreign_parcel_break_the_push(tmp_path: Path) -> None:
    way = channel("store", tmp_path)
    outbox, inbox = Outbox(way, rank=0, device="cpu"), Inbox(way, device=CPU)
    first, second, third = (parcel for parcel in outbox.parcels(model(0).items(), version=5, base_version=None) if parcel)
    with pytest.raises(PushBroken, match="was due"):
        inbox.open(second)
    for before, bad in [([first], third), ([first, second], second), ([first], replace(second, version=4))]:
        for parcel in before:
            inbox.open(parcel)
        with pytest.raises(PushBroken, match="was due"):
            inbox.open(bad)


def test_the_first_parcel_of_a_push_voids_what_is_left_of_another(tmp_path: Path) -> None:
    way = channel("store", tmp_path)
    outbox, inbox = Outbox(way, rank=0, device="cpu"), Inbox(way, device=CPU)
    half = next(outbox.parcels(model(0).items(), version=5, base_version=None))
    assert half is not None
    inbox.open(half)
    send(outbox, inbox, model(1), version=6)


def test_a_version_on_disk_gets_its_name_when_it_is_whole_and_older_ones_go(tmp_path: Path) -> None:
    way = channel("disk", tmp_path)
    outbox = Outbox(way, rank=0, device="cpu")
    broken = outbox.parcels(interrupted(model(0)), version=1, base_version=None)
    with pytest.raises(KeyboardInterrupt):
        next(broken)
    assert [folder.name for folder in tmp_path.iterdir()] == ["version-00000001.partial"]
    for version in (1, 2):
        send(outbox, Inbox(way, device=CPU), model(version), version=version)
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
    outbox, gathered = Outbox(channel("disk", tmp_path / "file"), rank=0, device="cpu"), []
    tensors = ((name, gathered.append(name) or tensor) for name, tensor in model(0).items())  # type: ignore[func-returns-value]
    with pytest.raises(OSError, match=r"cannot write weights into .*set weights.folder"):
        next(outbox.parcels(tensors, version=1, base_version=None))
    assert gathered == list(model(0))
