"""Weights that another process on the same GPU reads where they lie; and, where there are two GPUs, by NCCL."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from multiprocessing.connection import Connection

import pytest
import torch
import torch.multiprocessing as mp
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from reroll.weights.buckets import (
    Channel,
    GroupRank,
    IpcHandle,
    IpcTensors,
    ProcessLocation,
    SameIpcTensors,
    WeightReceiver,
    location_of,
)
from reroll.weights.sender import WeightSender

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def model(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator("cuda").manual_seed(seed)
    sizes = [(300, 70), (7,), (), (1000, 33), (5, 5), (400, 90)]
    draw = {f"layer{i}": torch.randn(size, generator=generator, device="cuda") for i, size in enumerate(sizes)}
    return {name: tensor.bfloat16() if name == "layer3" else tensor for name, tensor in draw.items()}


def digests(tensors: dict[str, Tensor]) -> dict[str, str]:
    return {
        name: hashlib.sha256(tensor.contiguous().view(-1).view(torch.uint8).cpu().numpy().tobytes()).hexdigest()
        for name, tensor in tensors.items()
    }


def receive(channel: Channel, device: str, pipe: Connection) -> None:
    """An engine's process: takes buckets until None comes, and tells what it got."""
    torch.cuda.set_device(device)
    receiver = WeightReceiver(channel, device=torch.device(device))
    pipe.send(location_of(device))
    while pipe.recv() is not None:
        taken: dict[str, Tensor] = {}
        while (bucket := pipe.recv()) is not None:
            taken |= {name: tensor.clone() for name, tensor in receiver.open(bucket).items()}
            torch.cuda.synchronize()
            pipe.send("taken")
        receiver.confirm()
        pipe.send(digests(taken))


def push_three_versions(
    channel: Channel, *, group_rank: GroupRank | None, device: str, lasting: bool = False
) -> ProcessLocation:
    """Every version must come out as it went in; returns where the receiver was."""
    ours, theirs = mp.Pipe()
    theirs_channel = channel if group_rank is None else replace(channel, group_rank=replace(group_rank, rank=1))
    process = mp.get_context("spawn").Process(target=receive, args=(theirs_channel, device, theirs), daemon=True)
    process.start()
    theirs.close()
    sender = WeightSender(replace(channel, group_rank=group_rank), rank=0, device="cuda:0")
    place: ProcessLocation = ours.recv()
    weights = model(0)
    for version in range(3):
        ours.send(version)
        num_buckets = 0
        for name, tensor in model(version).items():
            weights[name].copy_(tensor)
        for bucket in sender.buckets(weights.items(), version=version, base_version=None, lasting=lasting):
            assert bucket is not None
            again = SameIpcTensors if version else IpcTensors
            assert channel.kind != "ipc" or isinstance(bucket.payload, again if lasting else IpcHandle)
            ours.send(bucket)
            assert ours.recv() == "taken"
            num_buckets += 1
        ours.send(None)
        assert num_buckets == 1 if lasting else num_buckets > 2
        assert ours.recv() == digests(model(version))
    ours.send(None)
    process.join(60)
    assert process.exitcode == 0
    return place


@pytest.mark.parametrize("lasting", [False, True])
def test_a_process_on_the_same_gpu_reads_what_the_sender_holds(lasting: bool) -> None:
    channel = Channel(kind="ipc", bucket_bytes=100_000, delta=False)
    place = push_three_versions(channel, group_rank=None, device="cuda:0", lasting=lasting)
    assert place.can_share_memory_with(location_of("cuda:0"))
    assert place != location_of("cuda:0")


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_a_process_on_another_gpu_gets_weights_by_nccl() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    group_rank = GroupRank(f"127.0.0.1:{store.port}", "weights/1", 0, 2)
    place = push_three_versions(
        Channel(kind="broadcast", bucket_bytes=100_000, delta=False), group_rank=group_rank, device="cuda:1"
    )
    assert not place.can_share_memory_with(location_of("cuda:0"))
