"""The engine seam: what a generator of tokens must do to serve a rollout."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from reroll.types import Completion, Request


@dataclass(frozen=True, slots=True)
class Finished:
    """A request has ended (or was aborted: then with the tokens it had)."""

    request_id: str
    completion: Completion


class Engine(ABC):
    """Generates. Driven by one thread that calls `step` in a loop; every other call comes between two steps."""

    @abstractmethod
    def submit(self, request: Request) -> None:
        """Queue a request. Siblings (equal `prompt_ids`) submitted together share one prefill."""

    @abstractmethod
    def abort(self, request_id: str) -> None:
        """End a request now; it is reported by the next `step` with finish reason `abort`. Unknown ids are ignored."""

    @abstractmethod
    def step(self) -> list[Finished]:
        """Write one token for every running request; report those that ended."""

    @property
    @abstractmethod
    def num_unfinished(self) -> int:
        """Requests waiting or running."""

    @abstractmethod
    def load_weights(self, weights: Mapping[str, Tensor], *, version: int) -> None:
        """Use these weights (Hugging Face names) from the next step on; requests in flight go on under them."""

    @abstractmethod
    def sleep(self) -> None:
        """Free the cache memory. Requests in flight are kept and re-prefilled on `wake`."""

    @abstractmethod
    def wake(self) -> None: ...
