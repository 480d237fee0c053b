"""GEM's environments that would run what the policy writes (tasks of reasoning-gym, mathematics, programs), contained."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from gem.utils.constants import BASE_IMPORTS, TERMINAL_STATE

from reroll_zoo.guarded.contained import ContainedScorer
from reroll_zoo.guarded.reasoning_gym import TaskScorer
from reroll_zoo.sandbox.base import Limits, Program
from reroll_zoo.sandbox.blocking import BlockingSandbox, shared_sandbox
from reroll_zoo.sandbox.config import LocalSandboxConfig

_ANSWER_S, _ANSWER_MB = 8.0, 1024
"""What an answer that must be run to be judged may use."""
_MATH_SCORER = """
from gem.utils.math_grader import boxed_reward_fn
def score(given):
    return any(boxed_reward_fn(given, one, fast=False, correct_reward=1, incorrect_reward=0)[1] for one in answers)
"""


def contain(env: Any, sandbox: LocalSandboxConfig) -> None:
    """Have all that this environment would run itself run in the sandbox. Raises SandboxError if there is none."""
    kinds: dict[str, Callable[[Any, LocalSandboxConfig], None]] = {
        "ReasoningGymEnv": _contain_tasks,
        "MathEnv": _contain_mathematics,
        "CodeEnv": _contain_programs,
    }
    for name in (base.__name__ for base in type(env).__mro__):  # By name: their modules load a library of datasets.
        if name in kinds:
            return kinds[name](env, sandbox)
    return None


def _contain_tasks(env: Any, sandbox: LocalSandboxConfig) -> None:
    scorer = TaskScorer(sandbox, wall_s=_ANSWER_S, memory_mb=_ANSWER_MB)
    env.reward_fn = lambda answer, entry: scorer.score(env.name, {}, entry, answer)


def _contain_mathematics(env: Any, sandbox: LocalSandboxConfig) -> None:
    scorer = ContainedScorer(
        _MATH_SCORER, module="gem.utils.math_grader", sandbox=sandbox, wall_s=_ANSWER_S, memory_mb=_ANSWER_MB
    )
    if env.use_mp:
        env.mp_pool.terminate()  # It would have judged.

    def step(action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        answers = list(map(str, env.answer)) if isinstance(env.answer, list) else [str(env.answer)]
        reward = scorer.score({"answers": answers}, action, reference=" ".join(answers))
        return TERMINAL_STATE, reward, True, True, {"correct": bool(reward)}

    env.step = step


def _contain_programs(env: Any, sandbox: LocalSandboxConfig) -> None:
    from gem.envs import code_env

    # A name of the module, so for all of its environments: each that is made gives the last word on where programs run.
    code_env.run_python = partial(_run_python, shared_sandbox(sandbox.model_copy(update={"site_packages": True})))


def _run_python(
    box: BlockingSandbox, code: str, sandbox_type: str, stdin: str | None = None, timeout: float = _ANSWER_S
) -> tuple[bool, str, str]:
    """As GEM's own: whether it ran, what it printed and what it complained of; once more with imports if a name was missing."""
    limits = Limits(wall_s=timeout, cpu_s=timeout, memory_mb=_ANSWER_MB)
    ran = box.run(Program(source=code, stdin=stdin or "", limits=limits))
    if not ran.ok and "is not defined" in ran.stderr:
        ran = box.run(Program(source=f"{BASE_IMPORTS}\n{code}", stdin=stdin or "", limits=limits))
    return ran.ok, ran.stdout, ran.stderr.strip()
