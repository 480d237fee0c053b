"""How a `kind` is found: through the entry points of installed packages, reroll's own among them.

A package adds a kind with one line of its `pyproject.toml`: the kind's name, and the config node that describes it.

    [project.entry-points."reroll.envs"]
    dice = "my_package.dice:DiceConfig"

Groups are `reroll.envs`, `reroll.rewards`, `reroll.data`, `reroll.strategies`, `reroll.engines`, `reroll.runtimes`,
`reroll.curricula`, `reroll.agents`, `reroll.advantages`, `reroll.losses` and `reroll.divergences`. A node's module is imported
when a config names its kind, and what the node `runs` when it is made: reading a config loads no library that it does not need.
"""

from __future__ import annotations

import importlib.util
import tomllib
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from importlib.metadata import EntryPoint, distributions
from pathlib import Path
from typing import Any, ClassVar, Self, get_args

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import CoreSchema, PydanticKnownError, core_schema

from reroll.config.base import Node
from reroll.config.imports import import_object
from reroll.errors import ConfigError, Violation

_CHECKOUT = Path(__file__).parents[2] / "pyproject.toml"


class KindConfig(Node):
    """A node that may be one of several classes: its `kind` says which.

    A class that states its `group` stands for all kinds of that group: as the type of a field it takes any of them.
    """

    group: ClassVar[str]
    """The entry points that name the kinds."""
    default_kind: ClassVar[str | None] = None
    """What a mapping is that names no kind; None: an error."""
    runs: ClassVar[str]
    """`module:name` of what a node describes. It is called with the node, and imported no sooner."""
    packages: ClassVar[Mapping[str, str]] = {}
    """Modules of other distributions that it cannot do without, each with what pip must install for it."""

    kind: str

    def model_post_init(self, context: Any) -> None:
        self.model_fields_set.add("kind")  # A dump of what was set still says which class it is.

    def make(self) -> Any:
        """What the node describes. Raises ConfigError if a package is missing, and what the class or function raises."""
        return self.implementation()(self)

    def implementation(self) -> Callable[..., Any]:
        """What the node `runs`, imported."""
        try:
            found: Callable[..., Any] = import_object(self.runs)
        except ModuleNotFoundError as error:
            if not self.packages:
                raise
            problem = f"{self.kind} needs a package that is not installed: {error}"
            raise ConfigError([Violation("kind", problem, self.pip_line)]) from error
        return found

    @property
    def pip_line(self) -> str:
        """The command that installs what it needs."""
        wanted = [f"'{requirement}'" for requirement in dict.fromkeys(self.packages.values())]
        return f"pip install {' '.join(wanted)}"

    @classmethod
    def is_open(cls) -> bool:
        """Whether it stands for all kinds of its group, and is none itself."""
        return "group" in vars(cls)

    @classmethod
    def kinds(cls) -> dict[str, type[Self]]:
        """The installed kinds that this class stands for, by name. Those that cannot be imported are left out."""
        return {name: found for name, found in kinds(cls.group).items() if issubclass(found, cls)}

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        if not cls.is_open():
            return handler(source)
        return core_schema.no_info_plain_validator_function(cls._chosen, serialization=core_schema.simple_ser_schema("any"))

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        if not cls.is_open():
            return handler(schema)
        kind: dict[str, Any] = {"enum": list(cls.kinds()), "type": "string"}
        if cls.default_kind:
            kind["default"] = cls.default_kind
        required = [] if cls.default_kind else ["kind"]
        return {"type": "object", "properties": {"kind": kind}, "required": required, "x-kinds": cls.group}

    @classmethod
    def _chosen(cls, value: Any) -> KindConfig:
        """The node of the kind that the value names. Errors are those of a union that pydantic discriminates by `kind`."""
        if isinstance(value, cls):
            return value
        if not isinstance(value, Mapping):
            raise PydanticKnownError("model_attributes_type")
        name = value.get("kind", cls.default_kind)
        if name is None:
            raise PydanticKnownError("union_tag_not_found", {"discriminator": "'kind'"})
        found = find_kind(cls.group, name) if isinstance(name, str) else None
        if found is None or not issubclass(found, cls):
            tags = ", ".join(f"'{kind}'" for kind in cls.kinds())
            raise PydanticKnownError("union_tag_invalid", {"discriminator": "'kind'", "tag": str(name), "expected_tags": tags})
        return found.model_validate(value)


def package_violations(where: str, node: KindConfig) -> Iterator[Violation]:
    """Packages that a kind cannot do without and that are not installed. They are not imported."""
    for package, requirement in node.packages.items():
        if importlib.util.find_spec(package) is None:
            yield Violation(f"{where}.kind", f"needs the package {package}", f"pip install '{requirement}'")


def kinds(group: str) -> dict[str, type[KindConfig]]:
    """All installed kinds of a group, by name. Those that cannot be imported are left out."""
    found: dict[str, type[KindConfig]] = {}
    for name in _entries(group):
        try:
            kind = find_kind(group, name)
        except ValueError:
            continue
        if kind is not None:
            found[name] = kind
    return found


@cache
def find_kind(group: str, name: str) -> type[KindConfig] | None:
    """The kind that a package registered under this name, if one did. Raises ValueError that says why it cannot be used."""
    found = load_entry(group, name)
    if found is None:
        return None
    told = _told(_entries(group)[name][0])
    if not (isinstance(found, type) and issubclass(found, KindConfig) and getattr(found, "group", None) == group):
        raise ValueError(f"{name} is {told}, which is no kind of {group}: derive it from the node of that group")
    if name not in get_args(found.model_fields["kind"].annotation):
        raise ValueError(f'{name} is {told}, which has another kind: give it `kind: Literal["{name}"] = "{name}"`')
    return found


def load_entry(group: str, name: str) -> Any:
    """What a package registered under this name, imported; None if none did. Raises ValueError that says why it cannot be."""
    entries = _entries(group).get(name, ())
    if not entries:
        return None
    if len(entries) > 1:
        raise ValueError(f"{name} is registered by {' and by '.join(map(_told, entries))}: uninstall one of them")
    try:
        return entries[0].load()
    except Exception as error:
        raise ValueError(f"{name} is {_told(entries[0])}, which cannot be imported: {error}") from error


def entry_names(group: str) -> list[str]:
    """The names that packages registered."""
    return list(_entries(group))


@cache
def _entries(group: str) -> dict[str, tuple[EntryPoint, ...]]:
    """What packages registered, by name."""
    found: dict[str, tuple[EntryPoint, ...]] = {}
    for entry in _all_entries().get(group, {}).values():
        found[entry.name] = (*found.get(entry.name, ()), entry)
    return found


@cache
def _all_entries() -> dict[str, dict[tuple[str, str], EntryPoint]]:
    """All entry points of reroll's groups, by group. Read at once: to find those of one takes a look at every package.

    Where reroll runs from a checkout its own are read there: it may not be installed, or have been before it had them all. What
    an older copy of a package registers too, further down the search path, counts once.
    """
    own = _of_checkout()
    found = {
        group: {(name, value): EntryPoint(name=name, value=value, group=group) for name, value in entries.items()}
        for group, entries in own.items()
    }
    for package in distributions():
        entries = [entry for entry in package.entry_points if entry.group.startswith("reroll.")]
        if not entries or (own and package.name == "reroll"):
            continue
        for entry in entries:
            found.setdefault(entry.group, {}).setdefault((entry.name, entry.value), entry)
    return found


def _of_checkout() -> dict[str, dict[str, str]]:
    """The entry points in the checkout's pyproject.toml, by group; none where reroll does not run from one."""
    if not _CHECKOUT.is_file():
        return {}
    project = tomllib.loads(_CHECKOUT.read_text()).get("project", {})
    named: dict[str, dict[str, str]] = project.get("entry-points", {}) if project.get("name") == "reroll" else {}
    return named


def _told(entry: EntryPoint) -> str:
    return f"{entry.value} (package {entry.dist.name})" if entry.dist else entry.value
