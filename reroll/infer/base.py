"""The engine seam: what a generator of tokens must do to serve a rollout."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from reroll.types import Completion, Request, TokenBlock


@dataclass(frozen=True, slots=True)
class Finished:
    """A request has ended (or was aborted: then with the tokens it had)."""

    request_id: str
    completion: Completion


@dataclass(slots=True)
class EngineCounts:
    """What an engine did since it was made."""

    num_steps: int = 0
    num_tokens: int = 0
    """Tokens written."""
    num_prefill_tokens: int = 0
    """Context tokens read; a prompt that siblings share counts once."""
    num_reused_tokens: int = 0
    """Context tokens not read, because another request had read them."""
    num_gave_way: int = 0
    """Times that a running request was put back, because the cache was full."""
    num_drafted: int = 0
    """Tokens guessed and read with a step, before it was known whether they would be drawn."""
    num_accepted: int = 0
    """Those of them that were."""

    def add_step(self, *, num_tokens: int) -> None:
        self.num_steps += 1
        self.num_tokens += num_tokens


class Engine(ABC):
    """Generates. Driven by one thread that calls `step` in a loop; every other call comes between two steps."""

    counts: EngineCounts
    """Running totals, for throughput."""
    adopts_weights: bool = False
    """Whether `load_weights` may keep the very tensors it is given, and so changes with them; else it copies them."""
    block_tokens: int = 1
    """Contexts are reused in whole blocks of so many tokens: what goes beyond the last is read again."""

    @abstractmethod
    def submit(self, request: Request) -> None:
        """Queue a request. Siblings (equal `prompt_ids`) submitted together share one prefill.

        What it says is `written` is read as context; its tokens are neither drawn again nor counted as generated.

        Raises ValueError, naming the request, if it can never run (an empty prompt, or one longer than the model takes).
        """

    @abstractmethod
    def abort(self, request_id: str) -> None:
        """End a request now; it is reported by the next `step` with finish reason `abort`. Unknown ids are ignored."""

    @abstractmethod
    def step(self) -> list[Finished]:
        """Write one token for every running request; report those that ended."""

    @abstractmethod
    def new_tokens(self) -> TokenBlock | None:
        """What was written since the last call for requests that have not ended; None if nothing was."""

    @property
    @abstractmethod
    def num_unfinished(self) -> int:
        """Requests waiting or running."""

    @abstractmethod
    def load_weights(self, weights: Mapping[str, Tensor], *, version: int) -> None:
        """Use these weights (Hugging Face names) from the next step on; requests in flight go on under them.

        What older weights have read is never reused for another request.
        """

    def load_part(self, weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Take some of the weights that the next `load_weights` completes, and return those that it must still be given.

        The tensors given are valid during this call. No step comes before `load_weights`: until then the engine may hold
        a mix. An engine that cannot take parts has them wait on the host, where there is room for a second copy.
        """
        return {name: tensor.to("cpu", copy=True) for name, tensor in weights.items()}

    @abstractmethod
    def sleep(self) -> None:
        """Free the cache memory, kept contexts included. Requests in flight are kept and re-prefilled on `wake`."""

    @abstractmethod
    def wake(self) -> None: ...

    def close(self) -> None:  # noqa: B027  # Most engines hold nothing that outlives them.
        """Let go of processes and memory. Nothing is called after it."""
