"""`import reroll`: what it offers, what it loads, and how objects become a config."""

from __future__ import annotations

import ast
import copy
import inspect
import pickle
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_type_hints

import pytest

import reroll
from reroll.api import ConfigSections
from reroll.config.imports import ObjectPath, import_object
from reroll.config.load import dump_config, parse_config
from reroll.config.rewards import ImportRewardConfig
from reroll.config.tree import RlvrConfig
from reroll.data.sources import load_source
from reroll.errors import ConfigError, DataError
from reroll_zoo.games.frozen_lake import FrozenLakeConfig
from reroll_zoo.offline.config import OfflineConfig
from reroll_zoo.text.match import ExactRewardConfig
from reroll_zoo.tiny_models import make_tiny

ROWS = [{"prompt": "1 + 1 =", "answer": "2"}, {"prompt": "1 + 2 =", "answer": "3"}]


def score(prompt: reroll.Prompt, trajectory: reroll.Trajectory) -> float:
    return float(trajectory.text == prompt.answer)


class Maze:
    def reset(self, seed: int) -> tuple[reroll.Message, ...]:
        return ({"role": "user", "content": "left or right?"},)

    def step(self, action: str) -> reroll.StepResult:
        return reroll.StepResult(reward=float(action == "left"), terminated=True)

    def close(self) -> None:
        pass


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    return str(make_tiny(tmp_path / "tiny"))


def violations(**options: Any) -> dict[str, str]:
    with pytest.raises(ConfigError) as caught:
        reroll.make_config(**options)
    return {violation.path: f"{violation.problem} → {violation.fix}" for violation in caught.value.violations}


def test_every_name_is_there_and_type_checkers_see_the_same_ones() -> None:
    assert all(hasattr(reroll, name) for name in reroll.__all__)
    assert sorted(reroll._HOME_OF) == sorted(reroll.__all__)
    tree = ast.parse(Path(reroll.__file__).read_text())
    [block] = [node for node in tree.body if isinstance(node, ast.If)]
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    assert {alias.name: node.module for node in imports for alias in node.names} == reroll._HOME_OF
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        reroll.trian  # noqa: B018


def test_importing_it_loads_neither_torch_nor_ray_and_its_functions_stay_functions() -> None:
    program = (
        "import sys, reroll; from reroll import Prompt, ConfigError, load_config, train\n"
        "assert not {'torch', 'ray', 'transformers'} & set(sys.modules), 'too much'\n"
        "import reroll.training.loss, reroll.pipeline.evaluate\n"
        "assert callable(reroll.train) and callable(reroll.evaluate) and callable(reroll.build)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_train_takes_what_a_config_is_made_of() -> None:
    made, trained = (inspect.signature(function).parameters for function in (reroll.make_config, reroll.train))
    assert trained.keys() - made.keys() == {"config", "resume", "overwrite"}
    assert all(trained[name] == parameter for name, parameter in made.items())


def test_settings_are_the_sections_of_the_config_that_are_no_arguments_of_their_own() -> None:
    own = {"pipeline", "algorithm", "data", "loss", "advantage"}
    assert get_type_hints(ConfigSections).keys() == RlvrConfig.model_fields.keys() - own | {"rows_per_step", "eval_every"}
    assert {"rows_per_step", "eval_every"} <= OfflineConfig.model_fields.keys()


def test_rows_and_a_function_make_a_config_that_is_stored_and_read_again(model: str) -> None:
    config = reroll.make_config(
        model=model, data=ROWS, reward=score, steps=3, lr=1e-4, group_size=4, eval_data=ROWS[:1], kl={"coef": 0.1}
    )
    assert isinstance(config, RlvrConfig)
    assert (config.run.steps, config.policy.optim.lr, config.rollout.group_size, config.kl.coef) == (3, 1e-4, 4, 0.1)
    assert config.run.name == "grpo-tiny-1"
    [source] = config.data.train
    assert Path(source.path).read_text().count("\n") == 2  # type: ignore[union-attr]
    reward = config.rewards["default"]
    assert isinstance(reward, ImportRewardConfig)
    assert import_object(reward.path) is score
    again = parse_config(__import__("yaml").safe_load(dump_config(config)))
    assert again.model_dump(mode="json") == config.model_dump(mode="json")
    (Path("runs") / "grpo-tiny-1").mkdir(parents=True)
    assert reroll.make_config(model=model, data=ROWS, reward=score).run.name == "grpo-tiny-2"


def test_objects_travel_by_value_where_no_module_has_them_and_copies_are_the_same() -> None:
    bonus = 0.5
    node = ImportRewardConfig(kind="import", path=lambda prompt, trajectory: bonus)  # type: ignore[arg-type]
    sent = pickle.loads(pickle.dumps(node))
    assert import_object(sent.path)(None, None) == 0.5
    assert import_object(pickle.loads(pickle.dumps(sent)).path)(None, None) == 0.5
    assert copy.deepcopy(node).path is node.path
    assert type(node.model_dump(mode="json")["path"]) is str


def test_what_cannot_travel_is_refused_with_the_reason_and_the_way_out(model: str) -> None:
    lock = threading.Lock()
    problem = violations(model=model, data=ROWS, reward=lambda prompt, trajectory: float(lock.locked()))["rewards.default.path"]
    assert "cannot pickle '_thread.lock' object" in problem
    assert "make what it holds inside the function" in problem


def test_an_environment_class_brings_its_own_prompts(model: str) -> None:
    config = reroll.make_config(model=model, env=Maze)
    assert isinstance(config, RlvrConfig)
    assert import_object(config.envs["env"].env.path) is Maze  # type: ignore[union-attr]
    assert [source.kind for source in config.data.train] == ["env"]


def test_kinds_nodes_and_functions_may_stand_for_each_other_anywhere(model: str) -> None:
    rewards = {"kind": "stack", "parts": {"mine": score, "exact": {"kind": "exact", "weight": 2}}}
    config = reroll.make_config(
        model=model, data=ROWS, reward=rewards, loss=lambda t: -t.ratio * t.advantage, advantage="opo",
        rollout=reroll.RolloutConfig(group_size=2),
    )  # fmt: skip
    assert isinstance(config, RlvrConfig)
    assert config.rewards["default"].parts["mine"].kind == "import"  # type: ignore[union-attr]
    assert (config.loss.kind, config.advantage.kind, config.rollout.group_size) == ("import", "opo", 2)


@pytest.mark.parametrize(
    ("options", "path", "told"),
    [
        ({"group_size": 4, "rollout": {"group_size": 8}}, "rollout.group_size", "given twice"),
        ({"algorithm": "grppo"}, "algorithm", "did you mean grpo"),
        ({"pipeline": "rlvrr"}, "pipeline", "module:Class"),
        ({"pipeline": "nowhere:Mine"}, "pipeline", "No module named 'nowhere'"),
        ({"reward": "exakt"}, "rewards.default", "did you mean exact"),
        ({"rollout": {"groupsize": 4}}, "rollout.groupsize", "did you mean group_size"),
    ],
)
def test_what_is_wrong_is_told_with_its_fix(model: str, options: dict[str, Any], path: str, told: str) -> None:
    found = violations(**{"model": model, "data": ROWS, "reward": score} | options)
    assert told in found[path]


@pytest.mark.parametrize(
    ("data", "told"),
    [
        ([], "no rows"),
        ([1], "row 1 is a int"),
        ([{"prompt": "a", "answer": threading.Lock()}], "row 1 cannot be stored: lock is not plain data"),
        ({"a": [1]}, "of a DatasetDict choose a split"),
        (7, "a int has no rows"),
    ],
)
def test_what_is_no_data_is_told(model: str, data: Any, told: str) -> None:
    with pytest.raises(DataError, match=told):
        reroll.make_config(model=model, data=data, reward=score)


def test_tables_of_other_libraries_are_rows(model: str) -> None:
    datasets, pandas = pytest.importorskip("datasets"), pytest.importorskip("pandas")
    for table in (datasets.Dataset.from_list(ROWS), pandas.DataFrame(ROWS), iter(ROWS)):
        config = reroll.make_config(model=model, data=table, reward=score)
        assert Path(config.data.train[0].path).read_text().count("prompt") == 2  # type: ignore[union-attr]


def test_a_config_and_arguments_beside_it_are_refused(model: str) -> None:
    config = reroll.make_config(model=model, data=ROWS, reward=score)
    with pytest.raises(ConfigError, match="beside a config"):
        reroll.train(config, steps=3)
    with pytest.raises(ConfigError, match="samples: is given beside a config"):
        reroll.evaluate(config, samples=4)
    with pytest.raises(ConfigError, match="say which run goes on"):
        reroll.train(model=model, data=ROWS, reward=score, resume=True)


class Louder(reroll.RlvrConfig):
    """A config with a field of its own."""

    volume: float = 1.0


class Loud(reroll.RlvrPipeline):
    """A pipeline of one's own."""

    config_class = Louder


def test_a_pipeline_of_ones_own_reads_its_own_fields(model: str) -> None:
    config = reroll.make_config(model=model, data=ROWS, reward=score, pipeline=Loud, volume=2.0)  # type: ignore[call-arg]
    assert isinstance(config, Louder)
    assert config.volume == 2.0
    assert isinstance(config.pipeline, ObjectPath)
    named = config.model_dump(mode="json")
    assert named["pipeline"].endswith(":Loud")
    assert pickle.loads(pickle.dumps(config)).pipeline == named["pipeline"]  # The class itself stays here.
    by_name = reroll.make_config(model=model, data=ROWS, reward=score, pipeline=f"{__name__}:Loud", max_tokens=7)
    assert isinstance(by_name, Louder)
    assert by_name.rollout.max_tokens == 7
    problem = violations(model=model, data=ROWS, reward=score, pipeline=Loud, volum=2.0)
    assert "did you mean volume" in problem["volum"]


def sums() -> Iterator[dict[str, str]]:
    yield from ROWS


def test_nodes_of_kinds_that_are_found_by_entry_points_are_objects_too(model: str) -> None:
    lake = FrozenLakeConfig(size=3)
    config = reroll.make_config(model=model, env=lake)
    assert isinstance(config, RlvrConfig)
    assert config.envs["env"].env == lake
    assert parse_config(copy.deepcopy(config.model_dump(mode="json"))) == config


def test_a_function_gives_the_rows(model: str) -> None:
    config = reroll.make_config(model=model, data=sums, reward=ExactRewardConfig(ignore_case=True))
    assert isinstance(config, RlvrConfig)
    assert config.rewards["default"] == ExactRewardConfig(ignore_case=True)
    there: RlvrConfig = pickle.loads(pickle.dumps(config))
    assert [prompt.answer for prompt in load_source(there.data.train[0])] == ["2", "3"]
