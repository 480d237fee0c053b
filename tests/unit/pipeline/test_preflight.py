"""What `reroll check` and `reroll train` find before a model is loaded."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from reroll.config.check import notes_of
from reroll.config.load import parse_config
from reroll.config.tree import RlvrConfig
from reroll.errors import ConfigError
from reroll.pipeline.preflight import preflight
from reroll_zoo import rehearsal
from reroll_zoo.rehearsal import code_problems

USER_CODE = """
print("modules may print what they like")


def score(prompt, trajectory):
    return 1.0


def score_without_trajectory(prompt):
    return 1.0


class NoStep:
    def reset(self, seed): ...

    def close(self): ...


class NoStart(NoStep):
    def __init__(self):
        raise OSError("no board")

    def step(self, action): ...


def good(t, *, scale=1.0):
    return -scale * t.ratio * t.advantage


def scalar(t):
    return good(t).mean()


def fixed(t):
    return t.advantage


def raises(t):
    raise ZeroDivisionError("of the user's own")


def nan(t):
    return t.logp * float("nan")


def per_episode(episodes):
    return episodes.reward


def per_token(episodes):
    return episodes.spread(episodes.reward)
"""


@pytest.fixture
def tree(rlvr_tree: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    (tmp_path / "preflight_code.py").write_text(USER_CODE)
    monkeypatch.syspath_prepend(tmp_path)
    return rlvr_tree


def found(tree: dict[str, Any], tmp_path: Path) -> dict[str, str]:
    with pytest.raises(ConfigError) as caught:
        preflight(parse_config(tree, folder=tmp_path), code_folder=tmp_path)
    assert all(violation.fix for violation in caught.value.violations)
    return {violation.path: violation.problem for violation in caught.value.violations}


def test_a_sound_config_passes_without_torch_or_ray(tree: dict[str, Any], tmp_path: Path) -> None:
    tree["rewards"]["default"]["path"] = "preflight_code:score"
    (tmp_path / "run.json").write_text(json.dumps(tree))
    script = (
        "import json, sys\nfrom pathlib import Path\n"
        "from reroll.config.load import parse_config\nfrom reroll.pipeline.preflight import preflight\n"
        "preflight(parse_config(json.loads(Path('run.json').read_text())), code_folder=Path())\n"
        "sys.exit(str({'torch', 'ray', 'transformers'} & set(sys.modules) or 0))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=tmp_path)
    assert done.stderr.strip() == "0"


def test_everything_is_found_at_once(tree: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    (tmp_path / "bad.jsonl").write_text('{"prompt": "fine"}\n{"prompt": \n{"answer": 1}\n')
    tree["data"]["eval"] = [{"kind": "jsonl", "path": str(tmp_path / "bad.jsonl"), "domain": "math"}]
    tree["data"]["train"].append({"kind": "env", "domain": "game", "num": 3})
    tree["rollout"]["prompts_per_step"] = 14
    tree["envs"] = {"game": {"env": {"kind": "import", "path": "preflight_code:NoStep"}}}
    tree["rewards"] = {
        "default": {"kind": "import", "path": "preflight_code:missing"},
        "math": {"kind": "import", "path": "preflight_code:score_without_trajectory"},
    }
    tree["loss"] = {"kind": "import", "path": "preflight_code:good", "options": {"scael": 2.0}}
    tree["teachers"] = {"big": {"model": "reroll-tests/no-such-model"}}
    problems = found(tree, tmp_path)
    assert "line 2: broken JSON" in problems["data.eval.0"]
    assert "line 3: no `prompt`" in problems["data.eval.0"]
    assert "has no attribute 'missing'" in problems["rewards.default.path"]
    assert "cannot be called with (prompt, trajectory)" in problems["rewards.math.path"]
    assert "has no step: an environment has reset, step and close" in problems["envs.game.env.path"]
    assert "unexpected keyword argument 'scael'" in problems["loss.path"]
    assert "is not on this machine" in problems["teachers.big.model"]
    assert len(problems) == 6


def test_a_hub_that_cannot_be_reached_is_a_note_of_check_and_stops_train(
    tree: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    asked: list[bool] = []
    monkeypatch.setattr(rehearsal, "code_violations", lambda config, *, opens: asked.append(opens) or [])
    tree["rewards"] = {"default": {"kind": "exact"}}
    tree["policy"]["model"] = "reroll-tests/no-such-model"
    [note] = preflight(parse_config(tree), code_folder=tmp_path, only_checks=True).notes
    assert note.startswith("policy.model: reroll-tests/no-such-model is not on this machine")
    assert note.endswith("could not be looked up, and train will need it")
    assert "is not on this machine" in found(tree, tmp_path)["policy.model"]
    assert asked == [True, False]  # What check opens, train opens anyway.


def test_weights_that_were_cut_short_are_found_before_a_model_is_loaded(tree: dict[str, Any], tmp_path: Path) -> None:
    tree["rewards"] = {"default": {"kind": "exact"}}
    whole, damaged = Path(tree["policy"]["model"]), tmp_path / "damaged"
    shutil.copytree(whole, damaged)
    weights = damaged / "model.safetensors"
    tree["policy"]["model"] = str(damaged)
    for num_bytes in (0, 500, weights.stat().st_size - 1):
        shutil.copy(whole / weights.name, weights)
        os.truncate(weights, num_bytes)
        assert f"{weights} is damaged" in found(tree, tmp_path)["policy.model"]


def test_a_step_that_asks_prompts_twice_is_pointed_out(tree: dict[str, Any], tmp_path: Path) -> None:
    tree["rewards"] = {"default": {"kind": "exact"}}
    assert preflight(parse_config(tree), code_folder=tmp_path).notes == []
    tree["rollout"]["prompts_per_step"] = 11
    [note] = preflight(parse_config(tree), code_folder=tmp_path).notes
    assert "prompts_per_step is 11, and data.train has 10" in note


def test_a_module_that_ends_python_ends_only_the_process_that_tried_it(tree: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "preflight_ends.py").write_text("import os\nos._exit(7)\n")
    tree["rewards"]["default"]["path"] = "preflight_ends:score"
    assert "ends Python with exit code 7" in found(tree, tmp_path)["rewards.default.path"]


@pytest.mark.parametrize(
    ("part", "name", "says"),
    [
        ("loss", "scalar", r"gives a tensor of shape \[\] for 6 tokens: give one value a token"),
        ("loss", "fixed", "does not depend on the policy's log-probs"),
        ("loss", "raises", r"ZeroDivisionError: of the user's own .*preflight_code.py:\d+"),
        ("loss", "nan", "not finite"),
        ("loss", "per_episode", "'Tokens' object has no attribute 'reward'"),
        ("advantage", "per_episode", r"gives a tensor of shape \[4\] for 10 tokens"),
    ],
)
def test_a_loss_or_an_estimator_is_tried_on_a_few_tokens(tree: dict[str, Any], part: str, name: str, says: str) -> None:
    tree[part] = {"kind": "import", "path": f"preflight_code:{name}"}
    config = parse_config(tree, folder=Path(tree["run"]["runs_dir"]).parent)
    assert isinstance(config, RlvrConfig)
    assert re.search(says, code_problems(config)[f"{part}.path"])


def test_a_loss_and_an_estimator_that_keep_their_contract_pass(tree: dict[str, Any], tmp_path: Path) -> None:
    tree["loss"] = {"kind": "import", "path": "preflight_code:good", "options": {"scale": 2.0}}
    tree["advantage"] = {"kind": "import", "path": "preflight_code:per_token"}
    config = parse_config(tree, folder=tmp_path)
    assert isinstance(config, RlvrConfig)
    assert not code_problems(config)


def test_a_warm_up_longer_than_the_run_is_pointed_out(tree: dict[str, Any], tmp_path: Path) -> None:
    assert not list(notes_of(parse_config(tree, folder=tmp_path)))
    tree["policy"]["optim"]["warmup_steps"] = 1000
    [note] = notes_of(parse_config(tree, folder=tmp_path))
    assert "warmup_steps is 1000 and the run has 3" in note


def edited(folder: Path, name: str, edit: Callable[[Path], object], model: str) -> str:
    """A copy of the model with something wrong."""
    shutil.copytree(model, folder / name)
    edit(folder / name)
    return str(folder / name)


def set_in_config(folder: Path, **fields: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


MODEL_FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "do not fit its config.json, or are not there"),
    "more layers than weights": (lambda folder: set_in_config(folder, num_hidden_layers=9), "lacks weights of the model"),
    "other shapes": (lambda folder: set_in_config(folder, intermediate_size=8), "do not fit its config.json"),
    "unknown family": (lambda folder: set_in_config(folder, model_type="foo"), "model type `foo`"),
    "a config that is a list": (lambda folder: (folder / "config.json").write_text("[]"), "cannot load the tokenizer"),
    "no tokenizer": (lambda folder: (folder / "tokenizer.json").unlink(), "cannot load the tokenizer"),
    "no chat template": (lambda folder: (folder / "chat_template.jinja").unlink(), "no chat template"),
    "a broken template": (lambda folder: (folder / "chat_template.jinja").write_text("{% for m in %}"), "chat template"),
}


@pytest.mark.parametrize("fault", MODEL_FAULTS)
def test_check_finds_a_model_that_no_run_could_open(tree: dict[str, Any], tmp_path: Path, fault: str) -> None:
    edit, says = MODEL_FAULTS[fault]
    tree["rewards"] = {"default": {"kind": "exact"}}
    tree["policy"]["model"] = edited(tmp_path, "faulty", edit, tree["policy"]["model"])
    problems = code_problems(parse_config(tree), opens=True)
    assert problems.keys() == {"policy.model"}
    assert says in problems["policy.model"]


def test_check_opens_what_a_run_would_open_and_judges_the_first_rows(tree: dict[str, Any], tmp_path: Path) -> None:
    rows = tmp_path / "no_answers.jsonl"
    rows.write_text('{"prompt": "a question that is not short"}\n' * 4)
    tree["data"]["train"] = [
        {"kind": "jsonl", "path": str(rows), "domain": domain} for domain in ("math", "program", "shape", "spoken")
    ] + [{"kind": "env", "domain": "game", "num": 3}]
    tree["data"]["eval"], tree["eval"] = [], {"every": 0}
    tree["rewards"] = {
        "math": {"kind": "stack", "parts": {"right": {"kind": "exact"}, "short": {"kind": "length", "max_tokens": 9}}},
        "program": {"kind": "code"},
        "shape": {"kind": "json_schema"},
        "spoken": {"kind": "language", "scripts": ["latin"]},
    }
    tree["envs"] = {"game": {"env": {"kind": "import", "path": "preflight_code:NoStart"}}}
    tree["agents"] = {"spoken": {"kind": "command", "argv": ["reroll-tests-no-such-program"]}}
    tree["rollout"]["max_prompt_tokens"] = 8
    tree["run"]["runs_dir"] = str(rows / "runs")
    problems = code_problems(parse_config(tree, folder=tmp_path), opens=True)
    assert "is a file: name a folder" in problems.pop("run.runs_dir")
    assert "raised OSError: no board" in problems.pop("envs.game.env")
    assert "is not installed here" in problems.pop("agents.spoken")
    assert "raise it, or drop long ones" in problems.pop("rollout.max_prompt_tokens")
    assert "has no reference answer" in problems.pop("rewards.math.parts.right")
    assert "has no column `tests`" in problems.pop("rewards.program")
    assert "has no JSON Schema" in problems.pop("rewards.shape")
    assert not problems


def test_what_check_opens_passes_where_nothing_is_wrong(tree: dict[str, Any], tmp_path: Path) -> None:
    rows = tmp_path / "sums.jsonl"
    rows.write_text('{"prompt": "1+1", "answer": "2"}\n')
    tree["data"]["train"] = [{"kind": "jsonl", "path": str(rows)}, {"kind": "env", "domain": "lake", "num": 3}]
    tree["rewards"] = {"default": {"kind": "numeric"}}
    tree["envs"] = {"lake": {"env": {"kind": "frozen_lake"}}}
    tree["teachers"] = {"self": {"model": tree["policy"]["model"]}}
    tree["policy"]["lora"] = {"rank": 2}
    assert code_problems(parse_config(tree), opens=True) == {}
