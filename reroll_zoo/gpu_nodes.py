"""GPUs chosen by what their nodes are, instead of by index."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from reroll.config.parts import DeviceSelectionConfig

TYPE_LABEL = "ray.io/accelerator-type"
"""Ray sets it to the kind of GPU that it finds on a node, e.g. `H100`."""
MEMORY_LABEL = "gpu-memory-gb"
"""Set it where the kind does not tell the memory: `ray start --labels gpu-memory-gb=40`."""


@dataclass(frozen=True, slots=True)
class GpuNode:
    """A machine as a selection sees it."""

    num_gpus: int
    labels: Mapping[str, str] = field(default_factory=dict)
    memory_gb: float | None = None
    """Memory of each GPU, as it is sold; None if it is not known."""

    def carries(self, selection: DeviceSelectionConfig) -> bool:
        """Whether its GPUs are of those that are asked for."""
        has_labels = all(self.labels.get(name) == value for name, value in selection.label.items())
        needed_gb = selection.min_memory_gb
        return has_labels and (needed_gb is None or (self.memory_gb is not None and self.memory_gb >= needed_gb))

    def __str__(self) -> str:
        labels = [f"{name}={value}" for name, value in sorted(self.labels.items()) if _is_telling(name)]
        memory = f"{self.memory_gb:g} GB each" if self.memory_gb is not None else "memory not known"
        return f"{self.num_gpus} GPU{'s' if self.num_gpus > 1 else ''} ({', '.join([*labels, memory])})"


class GpuNodes(tuple[GpuNode, ...]):
    """The machines of a cluster, in the order in which their GPUs are numbered."""

    def select(self, selection: DeviceSelectionConfig) -> tuple[str, ...]:
        """The first GPUs that match, as indices through all nodes. The same selection gives the same GPUs, so its roles
        share them.

        Raises ValueError, with what there is, if too few match.
        """
        matching: list[int] = []
        first = 0
        for node in self:
            if node.carries(selection):
                matching += range(first, first + node.num_gpus)
            first += node.num_gpus
        chosen = matching[selection.skip : selection.skip + selection.gpus]
        if len(chosen) < selection.gpus:
            raise ValueError(_too_few(selection, self, num_matching=len(matching)))
        return tuple(map(str, chosen))


def _too_few(selection: DeviceSelectionConfig, nodes: Sequence[GpuNode], *, num_matching: int) -> str:
    wanted = [f"carry {name}={value}" for name, value in selection.label.items()]
    if selection.min_memory_gb is not None:
        wanted.append(f"have {selection.min_memory_gb:g} GB")
    num = f"{selection.gpus} GPU{'s' if selection.gpus > 1 else ''}"
    after = f" after the first {selection.skip}" if selection.skip else ""
    counts = Counter(map(str, nodes))
    there = ", ".join(f"{count} × {node}" if count > 1 else node for node, count in counts.items()) or "no GPUs"
    found = f" ({num_matching} do)" if num_matching else ""
    text = f"no {num} {' and '.join(wanted) or 'are there'}{after}{found}: the cluster has {there}"
    if selection.min_memory_gb is not None and any(node.memory_gb is None for node in nodes):
        text += f". Where the memory is not known, say it: ray start --labels {MEMORY_LABEL}=80"
    return text


def _is_telling(label: str) -> bool:
    """Whether a user knows it: most of Ray's own labels name one machine."""
    return label == TYPE_LABEL or not (label.startswith("ray.io/") or label == MEMORY_LABEL)
