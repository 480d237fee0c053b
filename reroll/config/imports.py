"""User code that a config names as `module:name`."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from functools import reduce
from pathlib import Path
from typing import Any


def search_in(folders: Sequence[Path]) -> None:
    """Let modules in these folders be imported, here and in workers that follow this process's search path."""
    for folder in reversed([str(folder.resolve()) for folder in folders]):
        if folder not in sys.path:
            sys.path.insert(0, folder)


def import_object(path: str) -> Any:
    """What `module:name` means. Raises ImportError or AttributeError."""
    module, _, name = path.partition(":")
    return reduce(getattr, name.split("."), importlib.import_module(module))
