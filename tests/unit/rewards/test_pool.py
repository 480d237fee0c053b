"""Real processes running real user code that misbehaves."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from reroll.config.reward_match import RegexReward
from reroll.config.rewards import ImportReward
from reroll.errors import RewardError
from reroll.rewards.pool import ProcessPool
from reroll.types import Completion, FinishReason, Prompt, Score, Status, Trajectory, Turn
from reroll_zoo.reasoning_gym.config import ReasoningGymRewardConfig

USER_MODULE = '''
import asyncio, ctypes, os, subprocess, sys, threading, time
import numpy as np
from reroll.errors import RewardError
from reroll.types import Score

calls = 0

def act(prompt, trajectory, *, bonus=0.0):
    """Does what the trajectory says."""
    global calls
    calls += 1
    text = trajectory.text
    if text == "raise": raise LookupError("the judge is lost")
    if text == "hang": time.sleep(600)
    if text == "hang with child":
        child = subprocess.Popen(["sleep", "600"])
        open(prompt.extra["pid_file"], "w").write(str(child.pid))
        time.sleep(600)
    if text == "exit": os._exit(7)
    if text == "sys.exit": sys.exit("leaving")
    if text == "segfault": ctypes.string_at(0)
    if text == "print": print("noise " * 1000); print("noise", file=sys.stderr); os.write(1, b"raw noise")
    if text == "read stdin": return float(len(sys.stdin.read()))
    if text == "score": return Score(value=0.5, parts={"style": 0.25})
    if text == "bad part": return Score(value=0.5, parts={"style": float("nan")})
    if text == "calls": return calls
    if text == "eat memory": return len(bytearray(300 * 2**20))
    if text == "pid": return os.getpid()
    if text == "child raises":
        if os.fork() == 0: raise LookupError("only the child")
    if text.startswith("fork"): os.fork(); return len(text)
    if text.startswith("raw fork"): ctypes.CDLL(None).fork(); return len(text)
    if text == "stray": os.write(int(sys.argv[1]), b"garbage"); time.sleep(0.2)
    if text == "stray zeros": os.write(int(sys.argv[1]), bytes(64))
    if text == "stray later":
        threading.Timer(0.2, os.write, (int(sys.argv[1]), b"garbage")).start()
    if text == "answer for another":
        from reroll.runtime.children import framed
        os.write(int(sys.argv[1]), framed((0, Score(value=99.0))))
    if text in ("daemon", "daemon and die", "child"):
        child = subprocess.Popen(["sleep", "600"], start_new_session=text != "child")
        open(prompt.extra["pid_file"], "w").write(str(child.pid))
        if text == "daemon and die": os._exit(3)
    if text == "own error":
        class Mine(RewardError): pass
        raise Mine("of my own")
    values = {"nan": float("nan"), "inf": float("-inf"), "str": "1.0", "none": None, "true": True, "int": 3,
              "numpy": np.float32(0.5), "numpy bool": np.bool_(True), "complex": 1j, "huge": 10**400}
    return values.get(text, 1.0 + bonus)

async def act_later(prompt, trajectory):
    await asyncio.sleep(0.01)
    return act(prompt, trajectory)

class Judges:
    @staticmethod
    def always(prompt, trajectory):
        return 0.125

not_a_function = 3
'''


def said(text: str) -> Trajectory:
    completion = Completion(token_ids=(1,), logprobs=(0.0,), finish_reason=FinishReason.STOP, versions=((0, 1),))
    return Trajectory(id="s", turns=(Turn(prompt_ids=(0,), completion=completion, text=text),), status=Status.COMPLETED)


def asked(**extra: object) -> Prompt:
    return Prompt(id="p", messages=(), domain="user", extra=extra)


def score(pool: ProcessPool, name: str, prompt: Prompt, trajectory: Trajectory) -> Score:
    [verdict] = pool.score(name, [(prompt, trajectory)])
    if isinstance(verdict, RewardError):
        raise verdict
    return verdict


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("user_code")
    (made / "judges.py").write_text(USER_MODULE)
    (made / "broken.py").write_text("import no_such_library\n")
    (made / "deadly.py").write_text("import os; os._exit(9)\n")
    (made / "types.py").write_text("raise ImportError('a file of the user must not break the standard library')\n")
    return made


def imported(name: str, *, timeout_s: float = 10.0, **options: object) -> ImportReward:
    return ImportReward(kind="import", path=name, timeout_s=timeout_s, options=options)


@pytest.fixture(scope="module")
def pool(folder: Path) -> Iterator[ProcessPool]:
    rewards = {
        "user": imported("judges:act"),
        "bonus": imported("judges:act", bonus=2.0),
        "later": imported("judges:act_later"),
        "nested": imported("judges:Judges.always"),
        "hasty": imported("judges:act", timeout_s=0.3),
        "hasty later": imported("judges:act_later", timeout_s=0.3),
    }
    made = ProcessPool(rewards, num_processes=1, search_path=[str(folder)])
    yield made
    made.close()


def test_a_user_function_may_return_a_score_or_any_real_number_and_may_be_async(pool: ProcessPool) -> None:
    assert score(pool, "user", asked(), said("anything")) == Score(value=1.0)
    assert score(pool, "user", asked(), said("score")) == Score(value=0.5, parts={"style": 0.25})
    assert score(pool, "user", asked(), said("true")).value == 1.0
    assert score(pool, "user", asked(), said("int")).value == 3.0
    assert score(pool, "user", asked(), said("numpy")).value == 0.5
    assert score(pool, "user", asked(), said("numpy bool")).value == 1.0
    assert score(pool, "later", asked(), said("score")).parts == {"style": 0.25}
    assert score(pool, "bonus", asked(), said("anything")).value == 3.0
    assert score(pool, "nested", asked(), said("anything")).value == 0.125


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("raise", r"LookupError: the judge is lost \(.*judges.py:\d+\)"),
        ("sys.exit", "SystemExit: leaving"),
        ("nan", "value is nan: return a finite number"),
        ("inf", "value is -inf: return a finite number"),
        ("bad part", "part style is nan"),
        ("str", "value is a str: return a number or a Score"),
        ("none", "value is a NoneType"),
        ("complex", "value is a complex"),
        ("huge", "OverflowError"),
        ("own error", "of my own"),
    ],
)
@pytest.mark.parametrize("domain", ["user", "later"])
def test_a_raise_or_a_bad_value_fails_the_sample_and_keeps_the_process(
    pool: ProcessPool, domain: str, text: str, reason: str
) -> None:
    before = score(pool, "user", asked(), said("pid"))
    with pytest.raises(RewardError, match=reason):
        score(pool, domain, asked(), said(text))
    assert score(pool, "user", asked(), said("pid")) == before


@pytest.mark.parametrize(("text", "reason"), [("exit", "exit code 7"), ("segfault", "SIGSEGV")])
def test_a_crash_fails_the_sample_and_another_process_takes_over(pool: ProcessPool, text: str, reason: str) -> None:
    before = score(pool, "user", asked(), said("pid"))
    with pytest.raises(RewardError, match=f"process died judging .*{reason}"):
        score(pool, "user", asked(), said(text))
    assert score(pool, "user", asked(), said("pid")) != before


@pytest.mark.parametrize("domain", ["hasty", "hasty later"])
def test_a_hang_is_killed_at_the_timeout_and_another_process_takes_over(pool: ProcessPool, domain: str) -> None:
    pid = int(score(pool, "user", asked(), said("pid")).value)
    start_s = time.monotonic()
    with pytest.raises(RewardError, match=r"took longer than 0.3 s judging: killed"):
        score(pool, domain, asked(), said("hang"))
    assert time.monotonic() - start_s < 5
    assert not Path(f"/proc/{pid}").exists()
    assert score(pool, domain, asked(), said("anything")).value == 1.0


def test_a_kill_reaches_what_user_code_has_started(pool: ProcessPool, tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    with pytest.raises(RewardError, match="killed"):
        score(pool, "hasty", asked(pid_file=str(pid_file)), said("hang with child"))
    assert not is_running(int(pid_file.read_text()))


@pytest.mark.parametrize("how", ["fork", "raw fork"])
def test_each_sample_gets_its_own_score_where_user_code_forks_and_both_processes_return(pool: ProcessPool, how: str) -> None:
    texts = [how + "!" * number for number in range(5)]
    assert [score(pool, "user", asked(), said(text)).value for text in texts] == [len(text) for text in texts]


def test_a_fork_of_user_code_that_raises_answers_nothing(pool: ProcessPool) -> None:
    assert score(pool, "user", asked(), said("child raises")).value == 1.0
    assert score(pool, "user", asked(), said("int")).value == 3.0


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("stray", "sent what is no answer"),
        ("stray zeros", "sent what is no answer"),
        ("answer for another", "answered what it was not asked"),
    ],
)
def test_a_process_that_says_what_it_was_not_asked_is_replaced_at_once(pool: ProcessPool, text: str, reason: str) -> None:
    before = score(pool, "user", asked(), said("pid"))
    with pytest.raises(RewardError, match=reason):
        score(pool, "user", asked(), said(text))
    assert score(pool, "user", asked(), said("pid")) != before


def test_what_is_said_after_the_answer_fails_nobody(pool: ProcessPool) -> None:
    before = score(pool, "user", asked(), said("pid"))
    assert score(pool, "user", asked(), said("stray later")).value == 1.0
    time.sleep(0.5)
    assert score(pool, "user", asked(), said("pid")) != before


def test_a_process_that_was_killed_while_idle_fails_nobody(pool: ProcessPool) -> None:
    pid = int(score(pool, "user", asked(), said("pid")).value)
    os.kill(pid, signal.SIGKILL)
    while is_running(pid):
        time.sleep(0.01)
    assert score(pool, "user", asked(), said("int")).value == 3.0


def test_a_process_that_is_killed_before_it_reads_the_question_fails_nobody(pool: ProcessPool) -> None:
    pid = int(score(pool, "user", asked(), said("pid")).value)
    os.kill(pid, signal.SIGSTOP)  # It cannot read, and lives as far as anybody can see.
    killer = threading.Timer(0.5, os.kill, (pid, signal.SIGKILL))
    killer.start()
    assert score(pool, "user", asked(), said("int")).value == 3.0
    killer.join()


@pytest.mark.parametrize("text", ["daemon", "daemon and die", "child"])
def test_close_ends_what_user_code_has_started_in_whatever_session(folder: Path, tmp_path: Path, text: str) -> None:
    pid_file = tmp_path / "pid"
    pool = ProcessPool({"user": imported("judges:act")}, num_processes=1, search_path=[str(folder)])
    with suppress(RewardError):
        score(pool, "user", asked(pid_file=str(pid_file)), said(text))
    pool.close()
    assert not is_running(int(pid_file.read_text()))


def test_what_user_code_prints_reaches_neither_the_terminal_nor_the_answer(
    pool: ProcessPool, capfd: pytest.CaptureFixture[str]
) -> None:
    assert score(pool, "user", asked(), said("print")).value == 1.0
    assert score(pool, "user", asked(), said("read stdin")).value == 0.0
    assert capfd.readouterr() == ("", "")


def test_imports_that_fail_are_all_named_and_fail_only_their_own_samples(folder: Path) -> None:
    rewards = {
        "missing": imported("no_such_module:f"),
        "broken": imported("broken:f"),
        "absent": imported("judges:no_such_function"),
        "not callable": imported("judges:not_a_function"),
        "good": imported("judges:act"),
    }
    pool = ProcessPool(rewards, num_processes=1, search_path=[str(folder)])
    problems = pool.problems()
    assert set(problems) == {"missing", "broken", "absent", "not callable"}
    assert "No module named 'no_such_library'" in problems["broken"]
    assert "no_such_function" in problems["absent"]
    assert "is int, not a function" in problems["not callable"]
    with pytest.raises(RewardError, match="no_such_module"):
        score(pool, "missing", asked(), said(""))
    assert score(pool, "good", asked(), said("")).value == 1.0
    pool.close()


def test_a_module_that_kills_the_process_on_import_is_a_problem_and_not_a_hang(folder: Path) -> None:
    pool = ProcessPool({"deadly": imported("deadly:f")}, num_processes=1, search_path=[str(folder)])
    assert "died importing the rewards (exit code 9)" in pool.problems()["deadly"]
    with pytest.raises(RewardError, match="died importing"):
        score(pool, "deadly", asked(), said(""))
    pool.close()


def test_a_call_that_wants_too_much_memory_fails_its_sample_and_its_process_is_replaced(folder: Path) -> None:
    limited = ImportReward(kind="import", path="judges:act", memory_mb=100)
    rewards = {"limited": limited, "free": ImportReward(kind="import", path="judges:act", memory_mb=None)}
    pool = ProcessPool(rewards, num_processes=1, search_path=[str(folder)])
    before = score(pool, "limited", asked(), said("pid"))
    with pytest.raises(RewardError, match="wanted more memory than its memory_mb allows"):
        score(pool, "limited", asked(), said("eat memory"))
    assert score(pool, "limited", asked(), said("pid")) != before
    assert score(pool, "free", asked(), said("eat memory")).value == 300 * 2**20
    pool.close()


def test_options_that_a_function_does_not_take_are_found_before_the_first_call(folder: Path) -> None:
    pool = ProcessPool({"user": imported("judges:act", malus=1.0)}, num_processes=1, search_path=[str(folder)])
    assert "unexpected keyword argument 'malus'" in pool.problems()["user"]
    pool.close()


def test_a_call_that_finds_all_processes_busy_starts_another_up_to_the_limit(folder: Path) -> None:
    rewards = {"user": imported("judges:act", timeout_s=60.0)}
    pool = ProcessPool(rewards, num_processes=1, max_processes=2, search_path=[str(folder)])
    assert score(pool, "user", asked(), said("pid")) == score(pool, "user", asked(), said("pid"))

    def hang() -> None:
        with suppress(RewardError):
            score(pool, "user", asked(), said("hang"))

    for _ in range(2):
        threading.Thread(target=hang, daemon=True).start()
        time.sleep(0.1)
    waiting = threading.Thread(target=hang, daemon=True)
    waiting.start()
    deadline_s = time.monotonic() + 2.0
    while pool.num_processes < 2 and time.monotonic() < deadline_s:
        time.sleep(0.01)
    time.sleep(0.1)
    assert pool.num_processes == 2
    pool.close()
    waiting.join(10)
    assert not waiting.is_alive()


def test_processes_work_side_by_side_and_close_ends_busy_ones(folder: Path) -> None:
    pool = ProcessPool({"user": imported("judges:act", timeout_s=60.0)}, num_processes=2, search_path=[str(folder)])
    failures: list[str] = []

    def hang() -> None:
        try:
            score(pool, "user", asked(), said("hang"))
        except RewardError as error:
            failures.append(str(error))

    stuck = threading.Thread(target=hang)
    stuck.start()
    time.sleep(0.1)
    assert score(pool, "user", asked(), said("")).value == 1.0
    pid = int(score(pool, "user", asked(), said("pid")).value)
    pool.close()
    pool.close()
    stuck.join(10)
    assert not stuck.is_alive()
    assert len(failures) == 1
    assert not is_running(pid)
    with pytest.raises(RewardError):
        score(pool, "user", asked(), said(""))


def test_a_hung_process_and_its_daemons_follow_its_parent_into_death(folder: Path, tmp_path: Path) -> None:
    script = f"""
        import os, threading, time
        from reroll.config.rewards import ImportReward
        from reroll.rewards.pool import ProcessPool
        sys_path, pid_file = {str(folder)!r}, {str(tmp_path / "pid")!r}
        import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})
        from test_pool import asked, said, imported, score
        pool = ProcessPool({{"user": imported("judges:act")}}, num_processes=1, search_path=[sys_path])
        pid = int(score(pool, "user", asked(), said("pid")).value)
        open(pid_file, "w").write(str(pid))
        score(pool, "user", asked(pid_file=pid_file + "-daemon"), said("daemon"))
        threading.Thread(target=lambda: score(pool, "user", asked(), said("hang")), daemon=True).start()
        time.sleep(0.5)
        os._exit(0)
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True)
    assert not is_running(int((tmp_path / "pid").read_text()))
    assert not is_running(int((tmp_path / "pid-daemon").read_text()))


def is_running(pid: int, *, patience_s: float = 5.0) -> bool:
    """Whether a process still runs after a while; one that was killed and waits to be reaped does not."""
    deadline_s = time.monotonic() + patience_s
    while time.monotonic() < deadline_s:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except FileNotFoundError:
            return False
        if state == "Z":
            return False
        time.sleep(0.05)
    return True


def test_reasoning_gym_tasks_are_scored_by_their_own_verifier() -> None:
    reasoning_gym = pytest.importorskip("reasoning_gym")
    options = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    entry = reasoning_gym.create_dataset("chain_sum", size=1, seed=5, **options)[0]
    prompt = asked(reasoning_gym={"name": "chain_sum", "options": options, "entry": entry})
    reward = ReasoningGymRewardConfig(kind="reasoning_gym", pattern=r"<answer>(.*?)</answer>")
    pool = ProcessPool({"logic": reward}, num_processes=1, search_path=[])
    assert score(pool, "logic", prompt, said(f"so <answer>{entry['answer']}</answer>")).value == 1.0
    assert score(pool, "logic", prompt, said("<answer>1000</answer>")).value < 1.0
    assert score(pool, "logic", prompt, said("no tags")).value < 1.0
    with pytest.raises(RewardError, match="p is not a reasoning-gym task"):
        score(pool, "logic", asked(), said("3"))
    pool.close()


def test_an_answer_on_which_a_bundled_verifier_hangs_is_wrong_and_fails_nothing(folder: Path) -> None:
    node = RegexReward(kind="regex", pattern="(a+)+$", wrong=-0.5, timeout_s=0.5)
    pool = ProcessPool({"form": node}, num_processes=1, search_path=[str(folder)])
    try:
        assert score(pool, "form", asked(), said("aaa")).value == 1.0
        assert score(pool, "form", asked(), said("a" * 40 + "!")) == Score(value=-0.5, info={"unjudged": 1.0})
        assert score(pool, "form", asked(), said("aaa")).value == 1.0
    finally:
        pool.close()


def test_cases_of_one_call_are_judged_until_one_is_lost_or_the_time_for_them_is_over(pool: ProcessPool) -> None:
    together = [(asked(), said(text)) for text in ("true", "raise", "int")]
    first, failed, last = pool.score("user", together, together_s=60.0)
    assert (first, last) == (Score(value=1.0), Score(value=3.0))
    assert isinstance(failed, RewardError)
    assert len(pool.score("user", together, together_s=0.0)) == 1
    first, failed = pool.score("hasty", [(asked(), said(text)) for text in ("true", "hang", "true")], together_s=60.0)
    assert first == Score(value=1.0)
    assert "took longer than 0.3 s" in str(failed)
    assert score(pool, "hasty", asked(), said("true")).value == 1.0
