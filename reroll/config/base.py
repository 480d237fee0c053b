"""What every config node is: strict, frozen, documented under each field."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PlainSerializer, ValidatorFunctionWrapHandler, WrapValidator

from reroll.config.imports import ObjectPath


def _compiles(pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"not a regular expression: {error}") from None
    return pattern


def _importable(path: str) -> str:
    module, _, name = path.partition(":")
    if module == "__main__":
        raise ValueError(f"workers cannot import __main__: move {name} into a file of its own, and write FILE:{name}")
    if module.endswith(".py"):
        raise ValueError(f"a module is named without .py: write {module.removesuffix('.py')}:{name}")
    return path


def _or_object(value: Any, handler: ValidatorFunctionWrapHandler) -> str:
    if isinstance(value, ObjectPath):
        return value
    if callable(value):
        path = ObjectPath(value)
        try:
            path.pack()
        except TypeError as error:
            raise ValueError(f"{error}: make what it holds inside the function, or put it into a module") from None
        return path
    checked: str = handler(value)
    return checked


Pattern = Annotated[str, AfterValidator(_compiles)]
"""A regular expression."""
ImportPath = Annotated[
    str,
    Field(pattern=r"^[\w.]+:[\w.]+$", examples=["my_module:my_name"]),
    AfterValidator(_importable),
    WrapValidator(_or_object),
    PlainSerializer(str, when_used="json"),
]
"""`module:name`, where the folder of the YAML and the working directory are importable; or from Python the object itself."""


def _or_class(value: Any, handler: ValidatorFunctionWrapHandler) -> str:
    if isinstance(value, type):
        return ObjectPath(value, travels=False)
    return value if isinstance(value, ObjectPath) else str(handler(value))


PipelinePath = Annotated[
    str,
    Field(pattern=r"^[\w.]+:[\w.]+$", examples=["my_module:MyPipeline"]),
    WrapValidator(_or_class),
    PlainSerializer(str, when_used="json"),
]
"""`module:Class` of a pipeline of the user's own, or the class itself."""


class NotKnown(Exception):
    """A field was asked for whose value in the file is wrong or missing: nothing can be said about it."""


class Node(BaseModel):
    """A part of the config tree. Unknown keys are errors, numbers are finite and nothing changes after loading.

    A bound that may be left off is declared with `allow_inf_nan=True` and a lower limit, which NaN does not meet.
    """

    model_config = ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True, protected_namespaces=()
    )

    def given(self) -> dict[str, Any]:
        """The fields that were set, as a YAML would write them: with the `kind`, without defaults."""
        fields = self.model_dump(exclude_unset=True)
        return fields | {"kind": self.kind} if "kind" in type(self).model_fields else fields  # type: ignore[attr-defined]

    if not TYPE_CHECKING:  # Only nodes of a config with faults lack fields (`known_part`); to a type checker all are there.

        def __getattr__(self, name: str) -> Any:
            if name in type(self).model_fields:
                raise NotKnown(name)
            return super().__getattr__(name)
