"""Run by sglang's Python, as `python start.py SOCKET [--saves-memory]`. Of reroll it finds the source, and no packages."""

import importlib.util
import os
import sys
from pathlib import Path

_SAVES_MEMORY = "--saves-memory"


def _import_reroll() -> None:
    """By its place: on the path, the folder it is installed in would bring the packages of the other environment along."""
    for name in ("reroll", "reroll_zoo"):
        folder = Path(__file__).resolve().parents[2] / name
        spec = importlib.util.spec_from_file_location(name, folder / "__init__.py", submodule_search_locations=[str(folder)])
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = package = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(package)


def _start_over_saving_memory(arguments: list[str]) -> None:
    """The allocator that can give memory back and keep its addresses must be there before the process starts.

    It needs CUDA's runtime, which the loader finds only where it is told to look: where torch's is.
    """
    import torch  # noqa: F401  # Loads it.
    from torch_memory_saver import configure_subprocess

    files = [line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libcudart.so" in line]
    folders = [str(Path(file).parent) for file in files[:1]] + os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep)
    os.environ["LD_LIBRARY_PATH"] = os.pathsep.join(filter(None, folders))
    with configure_subprocess():
        os.execv(sys.executable, [sys.executable, *arguments])


# At the top, because the processes of other ranks import this file and nothing else.
sys.path = [entry for entry in sys.path if Path(entry).resolve() != Path(__file__).resolve().parent]
_import_reroll()

if __name__ == "__main__":
    if _SAVES_MEMORY in sys.argv:
        _start_over_saving_memory([argument for argument in sys.argv if argument != _SAVES_MEMORY])
    from reroll_zoo.sglang.server import main

    os.set_inheritable(int(sys.argv[1]), False)
    main(int(sys.argv[1]))
