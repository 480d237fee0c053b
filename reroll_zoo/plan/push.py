"""How long a push takes: the bytes that the run's own plan of slices puts on each link, over what the link can carry.

Assumed: a node's network carries `network_gb_s` each way at once, to whichever node; a message takes as long as its bytes; and
while one bucket travels the next is filled and the last is taken in. So the busiest link says how long a push takes.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from reroll.config.weights import WeightsKind
from reroll.weights.slices import plan_slices
from reroll_zoo.fsdp2.layout import RankLayout
from reroll_zoo.plan.cluster import ClusterConfig
from reroll_zoo.plan.shape import ModelShape
from reroll_zoo.push_ring.order import Ring

Way = Literal["beside", "ring", "store"]
"""How an engine has the weights: from the rank on its GPU, in the process group's ring, or through the runtime's store."""

_DTYPES = {4: "float32", 2: "bfloat16"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Push:
    """A push as it is planned."""

    sent: tuple[int, ...]
    """Bytes that leave each rank of the policy, by the plan of slices; of a policy that is gathered, the first sends all."""
    senders: tuple[str, ...]
    """Their devices."""
    engines: tuple[str, ...]
    """The device of each engine's worker: the first of its GPUs."""

    @property
    def num_bytes(self) -> int:
        return sum(self.sent)


def push_way(push: Push, kind: WeightsKind) -> Way:
    """The way that a run takes, as `weight_sync.choose_transport` finds it when the processes are there."""
    ranks, engines = set(push.senders), set(push.engines)
    if "cpu" in ranks | engines:
        return "store"
    if engines <= ranks and kind in ("auto", "ipc"):
        return "beside"
    is_apart = not engines & ranks and len(engines) == len(push.engines)
    return "ring" if is_apart and kind in ("auto", "broadcast") else "store"


@lru_cache(maxsize=256)
def sent_bytes(shape: ModelShape, layout: RankLayout, *, value_bytes: int) -> tuple[int, ...]:
    """What each rank sends of this model: by the plan of one layer of each kind, as often as there are such layers."""
    sent = [0] * layout.num_ranks
    for shapes, num_layers in _layers(shape):
        held = [
            {name: layout.slice_of(rank, name, dims, dtype=_DTYPES[value_bytes]) for name, dims in shapes.items()}
            for rank in range(layout.num_ranks)
        ]
        plan = plan_slices(held, bucket_bytes=2**62)
        sent = [num_bytes + num_layers * plan.bytes_of(rank) for rank, num_bytes in enumerate(sent)]
    return tuple(sent)


def _layers(shape: ModelShape) -> list[tuple[dict[str, tuple[int, ...]], int]]:
    """The weights of each kind of layer, and how many such layers there are; last what no layer has."""
    attention: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj.weight": (shape.query_width, shape.hidden),
        "self_attn.k_proj.weight": (shape.kv_width, shape.hidden),
        "self_attn.v_proj.weight": (shape.kv_width, shape.hidden),
        "self_attn.o_proj.weight": (shape.hidden, shape.query_width),
        "norms.weight": (shape.norm_parameters,),
    }
    matrices = sum(math.prod(dims) for dims in attention.values()) - shape.norm_parameters
    if small := shape.attention_parameters - matrices:
        attention["self_attn.biases_and_norms"] = (small,)
    dense: dict[str, tuple[int, ...]] = {
        "mlp.gate_proj.weight": (shape.intermediate, shape.hidden),
        "mlp.up_proj.weight": (shape.intermediate, shape.hidden),
        "mlp.down_proj.weight": (shape.hidden, shape.intermediate),
    }
    if biases := shape.dense_mlp_parameters - 3 * shape.hidden * shape.intermediate:
        dense["mlp.biases"] = (biases,)
    sparse: dict[str, tuple[int, ...]] = {
        "mlp.gate.weight": (shape.num_experts, shape.hidden),
        "mlp.experts.gate_up_proj": (shape.num_experts, 2 * shape.expert_intermediate, shape.hidden),
        "mlp.experts.down_proj": (shape.num_experts, shape.hidden, shape.expert_intermediate),
    }
    ends: dict[str, tuple[int, ...]] = {"embed_tokens.weight": (shape.vocabulary, shape.hidden), "norm.weight": (shape.hidden,)}
    if not shape.is_tied:
        ends["lm_head.weight"] = (shape.vocabulary, shape.hidden)
    return [
        (attention | dense, shape.num_layers - shape.num_sparse_layers),
        (attention | sparse, shape.num_sparse_layers),
        (ends, 1),
    ]


def ring_seconds(push: Push, cluster: ClusterConfig) -> float:
    """From the senders, and round the ring of engines: until the busiest network of a node or link of a device has done."""
    senders = [(device, count) for device, count in zip(push.senders, push.sent, strict=True) if count] or [
        (push.senders[0], 0)
    ]
    engines = sorted(push.engines, key=lambda device: (cluster.node_of(device), int(device)))
    ring = Ring(len(senders), len(engines))
    entering = [0] * len(engines)
    out, into, over_link = Counter[int](), Counter[int](), Counter[str]()

    def carry(source: str, target: str, num_bytes: int) -> None:
        if cluster.node_of(source) == cluster.node_of(target):
            over_link[source] += num_bytes
        else:
            out[cluster.node_of(source)] += num_bytes
            into[cluster.node_of(target)] += num_bytes

    for sender, (device, num_bytes) in enumerate(senders):
        for chunk in range(ring.num_chunks):
            part = ring.part(num_bytes, chunk)
            entering[ring.entry_of(sender, chunk)] += part.stop - part.start
            carry(device, engines[ring.entry_of(sender, chunk)], part.stop - part.start)
    for position, engine in enumerate(engines):
        behind = (position + 1) % len(engines)
        if behind != position:  # All but what the engine behind had first; in a row of two, the last passes nothing on.
            passed = push.num_bytes - entering[behind] if len(engines) > 2 or position == 0 else 0
            carry(engine, engines[behind], passed)
    speed, efficiency = cluster.network_gb_s * 1e9, cluster.efficiency.link
    crossing_s = max([*out.values(), *into.values(), 0]) / (speed * efficiency)
    link_s = max([*over_link.values(), 0]) / (cluster.spec.link_gb_s * 1e9 * efficiency)
    num_chunks = ring.num_senders * ring.num_chunks
    # With fewer senders than engines the first chunks leave one after the other, and the ring fills as they come.
    filling = (num_chunks + ring.num_engines - 1) / num_chunks if ring.num_senders < ring.num_engines else 1.0
    return max(crossing_s, link_s) * filling


def gather_seconds(num_bytes: int, devices: Sequence[str], cluster: ClusterConfig) -> float:
    """Every rank puts the whole weights together: each node takes them in once and hands them on inside."""
    if len(devices) == 1:
        return 0.0
    crosses = len({cluster.node_of(device) for device in devices}) > 1
    speed = cluster.network_gb_s if crosses else cluster.spec.link_gb_s
    return num_bytes / (speed * 1e9 * cluster.efficiency.link)


def store_seconds(push: Push, cluster: ClusterConfig, machines: ClusterConfig) -> float:
    """Through the host's memory, twice; and to other nodes from the controller's, to one after the other. `cluster`: what the
    devices at work can do; `machines`: where they are."""
    nodes = {machines.node_of(device) for device in push.engines}
    crosses = nodes != {machines.node_of(push.senders[0])}
    over_network = len(nodes) * push.num_bytes / (cluster.network_gb_s * 1e9 * cluster.efficiency.link) if crosses else 0.0
    return 2 * _host_seconds(push.num_bytes, cluster) + over_network


def taken_seconds(travel_s: float, num_bytes: int, cluster: ClusterConfig, *, tp: int, waits_on_host: bool) -> float:
    """Until an engine uses what travels so long: it copies each bucket into place while the next travels. One that has to
    have all of it first puts it by on its host, and its `tp` devices then load a share each."""
    if waits_on_host:
        return max(travel_s, _host_seconds(num_bytes, cluster)) + _host_seconds(num_bytes / tp, cluster)
    return max(travel_s, 2 * num_bytes / (cluster.spec.bandwidth_gb_s * 1e9))


def _host_seconds(num_bytes: float, cluster: ClusterConfig) -> float:
    return num_bytes / (cluster.spec.host_gb_s * 1e9 * cluster.efficiency.link)
