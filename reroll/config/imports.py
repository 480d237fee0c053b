"""User code: named in a config as `module:name`, or handed over as a Python object."""

from __future__ import annotations

import importlib
import pickle
import sys
from collections.abc import Sequence
from functools import reduce
from pathlib import Path
from typing import Any


def search_in(folders: Sequence[Path]) -> None:
    """Let modules in these folders be imported, here and in workers that follow this process's search path.

    They come before all others: a second project in the same process may have a module of the same name.
    """
    first = list(dict.fromkeys(str(folder.resolve()) for folder in folders))
    sys.path[:] = first + [path for path in sys.path if path not in first]


def import_object(path: str) -> Any:
    """What `module:name` means. Raises ImportError or AttributeError, or for an object that was sent what unpickling raises."""
    if isinstance(path, ObjectPath):
        return path.load()
    module, _, name = path.partition(":")
    return reduce(getattr, name.split("."), importlib.import_module(module))


class ObjectPath(str):
    """A Python object in the place of its address: reads as `module:name`, and brings the object along.

    Pickled, it carries the object by cloudpickle: what is defined in a notebook or a script travels by value, what lies in
    a module by its name. In the process that receives it the object is unpacked when it is first asked for. One that is for
    this process only (`travels=False`) leaves the address alone in other ones.
    """

    _object: Any
    _packed: bytes | None
    _travels: bool

    def __new__(cls, value: Any, *, travels: bool = True) -> ObjectPath:
        self = super().__new__(cls, _address(value))
        self._object, self._packed, self._travels = value, None, travels
        return self

    def load(self) -> Any:
        """The object."""
        if self._object is None and self._packed is not None:
            self._object = pickle.loads(self._packed)
        return self._object

    def pack(self) -> bytes:
        """The object for another process. Raises TypeError that says what in it cannot travel."""
        if self._packed is None:
            import cloudpickle

            try:
                self._packed = cloudpickle.dumps(self._object)
            except Exception as error:  # Objects of any library may raise anything here.
                raise TypeError(f"{self} cannot be sent to another process: {error}") from error
        return self._packed

    def __reduce__(self) -> tuple[Any, ...]:
        return (_unpacked, (str(self), self.pack())) if self._travels else (str, (str(self),))

    def __str__(self) -> str:
        return str.__str__(self)[:]

    def __copy__(self) -> ObjectPath:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> ObjectPath:
        return self


def _unpacked(address: str, packed: bytes) -> ObjectPath:
    self = str.__new__(ObjectPath, address)
    self._object, self._packed, self._travels = None, packed, True
    return self


def _address(value: Any) -> str:
    named = value if hasattr(value, "__qualname__") else type(value)
    return f"{named.__module__}:{named.__qualname__}"
