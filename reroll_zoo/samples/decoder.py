"""The run's tokenizer, loaded when the first sample is opened."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial

from reroll.errors import RerollError, RunFolderError
from reroll.observe.run_folder import RunFolder

Decode = Callable[[Sequence[int]], str]


def spelled(ids: Sequence[int]) -> str:
    """Ids for want of a tokenizer."""
    return "".join(f"⟨{id}⟩" for id in ids)


class RunDecoder:
    """Turns ids into text by the tokenizer of the run's newest checkpoint or model; without one, into numbers."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._loaded: tuple[Decode, Decode] | None = None
        self._is_warm = False
        self.problem = ""
        """Why there is no tokenizer."""

    def warm_up(self) -> None:
        """Begin to load it: whoever looks at samples will open one."""
        if self._loaded is None and not self._is_warm:
            self._is_warm = True
            threading.Thread(target=self._decoders, name="page tokenizer", daemon=True).start()

    def text(self, ids: Sequence[int]) -> str:
        """As rewards and environments read it."""
        return self._decoders()[0](ids)

    def with_special(self, ids: Sequence[int]) -> str:
        """With special tokens by their names."""
        return self._decoders()[1](ids)

    def _decoders(self) -> tuple[Decode, Decode]:
        with self._lock:
            if self._loaded is None:
                self._loaded = self._load()
            return self._loaded

    def _load(self) -> tuple[Decode, Decode]:
        # Only here: a page that opens no sample does without torch.
        from reroll.models.load import load_tokenizer
        from reroll.tokens.renderer import Renderer

        for name in self._sources():
            try:
                renderer = Renderer(load_tokenizer(name))
            except RerollError as error:
                self.problem = f"no tokenizer could be loaded, so tokens are shown as numbers: {error}"
            else:
                self.problem = ""
                return renderer.decode, partial(renderer.decode, with_special=True)
        return spelled, spelled

    def _sources(self) -> list[str]:
        latest = self._folder.latest_checkpoint()
        try:
            model = self._folder.earlier_config().get("policy", {}).get("model")
        except (RunFolderError, AttributeError):
            model = None
        return [name for name in (str(latest.path) if latest else None, model) if name]
