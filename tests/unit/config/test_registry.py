"""Kinds are found by entry points: reroll's own, and those of a package that is merely on the path."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from reroll.config.env_base import EnvConfig
from reroll.config.imports import import_object
from reroll.config.load import parse_config
from reroll.config.registry import KindConfig, find_kind, kinds
from reroll.errors import ConfigError
from reroll_zoo.load_part import load_env

GROUPS = (
    "reroll.envs",
    "reroll.rewards",
    "reroll.data",
    "reroll.strategies",
    "reroll.engines",
    "reroll.runtimes",
    "reroll.agents",
)
NODES = [(group, name) for group in GROUPS for name in kinds(group)]

PUT_TOGETHER = {"stack", "cascade", "judge", "reward_model", "env", "jsonl", "torch", "embedded"}
"""Kinds that the core makes of more than their node."""

PLUG_IN = """
from typing import ClassVar, Literal
from reroll.config.env_base import EnvConfig
from reroll.envs.base import StepResult

class DiceConfig(EnvConfig):
    '''Say a number.'''
    runs: ClassVar[str] = "dice:Dice"
    kind: Literal["dice"] = "dice"
    sides: int = 6

class OtherConfig(DiceConfig):
    '''Registered under a name that is not its kind.'''

class Dice:
    def __init__(self, options): self.options = options
    def reset(self, seed): return ({"role": "user", "content": f"1 to {self.options.sides}?"},)
    def step(self, action): return StepResult(terminated=True)
    def close(self): pass
"""


@pytest.fixture
def packages(tmp_path: Path) -> Path:
    """A folder with the metadata of two packages, as pip leaves them; one of them has faults."""
    (tmp_path / "dice.py").write_text(PLUG_IN)
    entries = {
        "dice": 'dice = "dice:DiceConfig"\nimport = dice:DiceConfig',
        "broken": "gone = no_such_module:Gone\nother = dice:OtherConfig\nstrange = json:JSONDecoder",
    }
    for name, lines in entries.items():
        folder = tmp_path / f"{name}-1.0.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (folder / "entry_points.txt").write_text(f"[reroll.envs]\n{lines}\n".replace('"', ""))
    return tmp_path


def ask(packages: Path, node: dict[str, Any]) -> str:
    """What comes of an environment's node where the packages are on the path: its kind and fields, or what is wrong."""
    code = (
        "import json, sys\n"
        "from reroll_zoo.load_part import load_env\n"
        "from reroll.errors import ConfigError\n"
        "node = json.loads(sys.argv[1])\n"
        "try: print(repr(load_env(node.pop('kind'), [f'{k}={v}' for k, v in node.items()]).make().reset(1)))\n"
        "except ConfigError as error: print(error)\n"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(packages), *filter(None, sys.path)])}
    command = [sys.executable, "-c", code, json.dumps(node)]
    return subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout


def test_a_package_on_the_path_brings_its_kind(packages: Path) -> None:
    assert "1 to 8?" in ask(packages, {"kind": "dice", "sides": 8})


def test_a_kind_that_cannot_be_used_says_why_and_which_package_it_is_of(packages: Path) -> None:
    assert "no_such_module" in ask(packages, {"kind": "gone"})
    assert "package broken" in ask(packages, {"kind": "gone"})
    assert 'kind: Literal["other"]' in ask(packages, {"kind": "other"})
    assert "derive it from the node of that group" in ask(packages, {"kind": "strange"})
    assert "registered by reroll.config.envs:ImportEnvConfig and by dice:DiceConfig (package dice)" in ask(
        packages, {"kind": "import"}
    )


def test_an_unknown_kind_is_answered_with_the_nearest_and_all_that_can_be_used(packages: Path) -> None:
    said = ask(packages, {"kind": "dize"})
    assert "kind 'dize' is unknown (did you mean dice? choose one of: " in said
    assert "sokoban" in said
    assert "gone" not in said


def test_a_wrong_field_of_a_plug_in_is_named_by_its_path_in_the_file(packages: Path) -> None:
    assert "env.sides: is 'many' (it should be an integer)" in ask(packages, {"kind": "dice", "sides": "many"})
    assert "env.side: unknown key (did you mean sides?)" in ask(packages, {"kind": "dice", "side": 3})


def test_a_node_without_a_kind_is_told_which_there_are() -> None:
    with pytest.raises(ValidationError) as raised:
        TypeAdapter(EnvConfig).validate_python({"size": 4})
    assert raised.value.errors()[0]["type"] == "union_tag_not_found"


def test_a_node_comes_back_from_json_as_it_was() -> None:
    node = load_env("frozen_lake", ["size=5", "slippery=true"])
    adapter = TypeAdapter(dict[str, EnvConfig])
    assert adapter.validate_json(adapter.dump_json({"lake": node})) == {"lake": node}


def test_other_values_than_mappings_are_refused() -> None:
    with pytest.raises(ConfigError, match="kind"):
        load_env("no_such_kind")
    with pytest.raises(ValidationError):
        TypeAdapter(EnvConfig).validate_python("frozen_lake")


@pytest.mark.parametrize(("group", "name"), NODES)
def test_every_kind_says_what_it_is(group: str, name: str) -> None:
    node = find_kind(group, name)
    assert node is not None
    assert node.__doc__


@pytest.mark.parametrize(("group", "name"), NODES)
def test_what_a_kind_runs_takes_its_node(group: str, name: str) -> None:
    node = find_kind(group, name)
    assert node is not None
    if not hasattr(node, "runs"):
        assert node.make is not KindConfig.make or name in PUT_TOGETHER
        return
    for package in node.packages:
        pytest.importorskip(package)
    implementation = import_object(node.runs)
    taken = inspect.signature(getattr(implementation, "open", implementation)).parameters.values()
    wanted = ("RankModel",) if group == "reroll.strategies" else (node.__name__, node, f"{node.__name__[:5]}Config")
    assert any(parameter.annotation in wanted for parameter in taken)


def test_reading_a_config_imports_no_library_that_it_does_not_name() -> None:
    code = (
        "import sys; from reroll_zoo.load_part import load_env; load_env('gymnasium', ['env_id=CartPole-v1'])\n"
        "sys.exit(bool({'torch', 'gymnasium', 'reroll_zoo.games', 'transformers', 'ray'} & set(sys.modules)))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)})


def test_a_package_that_an_environment_needs_is_asked_for_before_anything_starts(
    rlvr_tree: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "gymnasium" else find(name, *rest))
    env = {"env": {"kind": "gymnasium", "env_id": "CartPole-v1"}}
    tree = rlvr_tree | {"envs": {"cart": env}, "data": {"train": [{"kind": "env", "domain": "cart"}]}, "rewards": {}}
    with pytest.raises(
        ConfigError, match=r"envs.cart.env.kind: needs the package gymnasium \(pip install 'reroll\[gymnasium\]'\)"
    ):
        parse_config(tree)


@pytest.mark.parametrize("group", GROUPS)
def test_what_a_bundled_kind_runs_is_defined_where_it_says(group: str) -> None:
    """Read, not imported: vLLM and the like are not installed here."""
    for node in kinds(group).values():
        if not getattr(node, "runs", ""):
            continue
        module, _, name = node.runs.partition(":")
        spec = importlib.util.find_spec(module)
        assert spec is not None, node.runs
        assert spec.origin is not None, node.runs
        tree = ast.parse(Path(spec.origin).read_text())
        defined = {item.name for item in tree.body if isinstance(item, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)}
        assert name.partition(".")[0] in defined, node.runs
