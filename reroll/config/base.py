"""What every config node is: strict, frozen, documented under each field."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field


def _compiles(pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"not a regular expression: {error}") from None
    return pattern


Pattern = Annotated[str, AfterValidator(_compiles)]
"""A regular expression."""
ImportPath = Annotated[str, Field(pattern=r"^[\w.]+:[\w.]+$")]
"""`module:name`; the folder of the YAML and the working directory are importable."""


class Node(BaseModel):
    """A part of the config tree. Unknown keys are errors and nothing changes after loading."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, protected_namespaces=())
