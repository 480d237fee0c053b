"""The WebShop environment."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from reroll.config.base import Node


class WebShopEnv(Node):
    """Search a synthetic shop for what a customer asks, choose the options and buy. The reward is the WebShop paper's."""

    kind: Literal["webshop"]
    num_products: int = Field(default=1000, ge=10)
    """Size of the catalogue. Its search index is built once: 100,000 products take some 15 s and 25 MB."""
    catalogue_seed: int = Field(default=0, ge=0)
    """Different seeds give different shops."""
    max_steps: int = Field(default=15, ge=1)
    """A visit that has bought nothing by then is truncated with reward 0."""
    first_held_out_seed: int = Field(default=1_000_000, ge=0)
    """Seeds from here on ask for the fifth of the products that no lower seed asks for: take held-out tasks from them."""
    show_actions: bool = True
    """Whether each page ends with a line of the actions it takes."""
    cache_dir: Path | None = None
    """Folder of the search indexes. Default: $XDG_CACHE_HOME/reroll, or ~/.cache/reroll."""
