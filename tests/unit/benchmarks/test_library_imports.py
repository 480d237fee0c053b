"""What few tests run (benchmarks, examples, scripts, tests for GPUs) imports the library as it is today."""

import ast
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
FOLDERS = ("benchmarks", "examples", "scripts", "tests/gpu")


def imported(path: Path) -> set[tuple[str, str]]:
    """(module, name) of each `from reroll… import name` in a file."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] in ("reroll", "reroll_zoo"):
            found |= {(node.module, alias.name) for alias in node.names}
    return found


def exists(module: str, name: str) -> bool:
    try:
        return hasattr(importlib.import_module(module), name) or bool(importlib.import_module(f"{module}.{name}"))
    except ModuleNotFoundError as error:
        return not (error.name or "").startswith("reroll")  # A package that is not installed here, such as triton.


@pytest.mark.parametrize("folder", FOLDERS)
def test_what_is_imported_of_the_library_exists(folder: str) -> None:
    files = sorted((ROOT / folder).rglob("*.py"))
    assert files
    missing = {str(path): {pair for pair in imported(path) if not exists(*pair)} for path in files}
    assert not {path: pairs for path, pairs in missing.items() if pairs}
