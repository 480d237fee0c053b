"""Real processes running real user code that misbehaves."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
import pytest_asyncio

from reroll.config.reward_base import InProcessRewardConfig
from reroll.config.rewards import ImportRewardConfig, RewardWorkersConfig
from reroll.errors import RewardError
from reroll.rewards.memory import MustRestart
from reroll.rewards.meter import RewardMeter
from reroll.rewards.worker import Case, RewardWorker, Verdicts
from reroll.rewards.workers import RewardWorkers
from reroll.runtime.base import WorkerInfo
from reroll.runtime.local import LocalRuntime
from reroll.types import Completion, FinishReason, Prompt, Score, Status, Trajectory, Turn
from reroll_zoo.reasoning_gym.config import ReasoningGymRewardConfig
from reroll_zoo.text.match import RegexRewardConfig

CLOSING = "the run is closing: rewards take no more calls"

pytestmark = pytest.mark.asyncio(loop_scope="module")

USER_MODULE = '''
import asyncio, ctypes, os, signal, subprocess, sys, threading, time
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
    if text == "killed": os.kill(os.getpid(), signal.SIGKILL)
    if text == "killed once" and not os.path.exists(prompt.extra["flag"]):
        open(prompt.extra["flag"], "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
    if text == "exit": os._exit(7)
    if text == "sys.exit": sys.exit("leaving")
    if text == "segfault": ctypes.string_at(0)
    if text == "print": print("noise " * 1000); print("noise", file=sys.stderr); os.write(1, b"raw noise")
    if text == "read stdin": return float(len(sys.stdin.read()))
    if text == "score": return Score(value=0.5, parts={"style": 0.25})
    if text == "bad part": return Score(value=0.5, parts={"style": float("nan")})
    if text == "calls": return calls
    if text == "eat memory": return len(bytearray(300 * 2**20))
    if text == "no memory": raise MemoryError
    if text == "pid": return os.getpid()
    if text == "child raises":
        if os.fork() == 0: raise LookupError("only the child")
    if text.startswith("fork"): os.fork(); return len(text)
    if text.startswith("raw fork"): ctypes.CDLL(None).fork(); return len(text)
    if text == "stray": os.write(int(sys.argv[1]), b"garbage"); time.sleep(0.2)
    if text == "stray zeros": os.write(int(sys.argv[1]), bytes(64))
    if text == "stray later":
        threading.Timer(0.2, os.write, (int(sys.argv[1]), b"garbage")).start()
    if text in ("answer nobody", "answer another"):
        from reroll.runtime.frames import Kind, header, pack
        payload = pack([Score(value=99.0)], what="verdicts")
        number = 1 if text == "answer another" else 0  # The first call of all has its answer.
        os.write(int(sys.argv[1]), header(Kind.ANSWER, number, payload) + payload.inline)
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


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("user_code")
    (made / "judges.py").write_text(USER_MODULE)
    (made / "broken.py").write_text("import no_such_library\n")
    (made / "deadly.py").write_text("import os; os._exit(9)\n")
    (made / "endless.py").write_text("import time; time.sleep(600)\n")
    (made / "types.py").write_text("raise ImportError('a file of the user must not break the standard library')\n")
    return made


HANGS_S = 120.0
"""What takes longer than this hangs, however busy the machine is."""


def imported(name: str, *, timeout_s: float = HANGS_S, **options: object) -> ImportRewardConfig:
    return ImportRewardConfig(kind="import", path=name, timeout_s=timeout_s, options=options)


@asynccontextmanager
async def opened(
    rewards: Mapping[str, InProcessRewardConfig], folder: Path | None = None, *, num_processes: int = 1
) -> AsyncIterator[RewardWorkers]:
    workers = await RewardWorkers.start(
        LocalRuntime(),
        rewards,
        RewardWorkersConfig(num_processes=num_processes),
        search_path=[str(folder)] if folder is not None else [],
        meter=RewardMeter(),
    )
    try:
        yield workers
    finally:
        await workers.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def workers(folder: Path) -> AsyncIterator[RewardWorkers]:
    """One process: all are of one entry."""
    rewards = {
        "my.user": imported("judges:act"),
        "my.bonus": imported("judges:act", bonus=2.0),
        "my.later": imported("judges:act_later"),
        "my.nested": imported("judges:Judges.always"),
        "my.hasty": imported("judges:act", timeout_s=0.3),
        "my.hasty later": imported("judges:act_later", timeout_s=0.3),
    }
    async with opened(rewards, folder) as made:
        yield made


async def test_a_user_function_may_return_a_score_or_any_real_number_and_may_be_async(workers: RewardWorkers) -> None:
    assert await workers.score("my.user", asked(), said("anything")) == Score(value=1.0)
    assert await workers.score("my.user", asked(), said("score")) == Score(value=0.5, parts={"style": 0.25})
    assert (await workers.score("my.user", asked(), said("true"))).value == 1.0
    assert (await workers.score("my.user", asked(), said("int"))).value == 3.0
    assert (await workers.score("my.user", asked(), said("numpy"))).value == 0.5
    assert (await workers.score("my.user", asked(), said("numpy bool"))).value == 1.0
    assert (await workers.score("my.later", asked(), said("score"))).parts == {"style": 0.25}
    assert (await workers.score("my.bonus", asked(), said("anything"))).value == 3.0
    assert (await workers.score("my.nested", asked(), said("anything"))).value == 0.125


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
        ("huge", "value is too large for a float"),
        ("own error", "of my own"),
    ],
)
@pytest.mark.parametrize("domain", ["user", "later"])
async def test_a_raise_or_a_bad_value_fails_the_sample_and_keeps_the_process(
    workers: RewardWorkers, domain: str, text: str, reason: str
) -> None:
    before = await workers.score("my.user", asked(), said("pid"))
    with pytest.raises(RewardError, match=reason):
        await workers.score(f"my.{domain}", asked(), said(text))
    assert await workers.score("my.user", asked(), said("pid")) == before


@pytest.mark.parametrize(("text", "reason"), [("exit", "exit code 7"), ("segfault", "SIGSEGV"), ("killed", "SIGKILL")])
async def test_a_crash_fails_the_sample_and_another_process_takes_over(workers: RewardWorkers, text: str, reason: str) -> None:
    before = await workers.score("my.user", asked(), said("pid"))
    with pytest.raises(RewardError, match=rf"process died \({reason}\) while judging"):
        await workers.score("my.user", asked(), said(text))
    assert await workers.score("my.user", asked(), said("pid")) != before


@pytest.mark.parametrize("domain", ["hasty", "hasty later"])
async def test_a_hang_is_killed_at_the_timeout_and_another_process_takes_over(workers: RewardWorkers, domain: str) -> None:
    pid = int((await workers.score("my.user", asked(), said("pid"))).value)
    start_s = time.monotonic()
    with pytest.raises(RewardError, match=r"took longer than 0.3 s judging: killed"):
        await workers.score(f"my.{domain}", asked(), said("hang"))
    assert time.monotonic() - start_s < 300  # Half as long as it hangs.
    assert not Path(f"/proc/{pid}").exists()
    assert (await workers.score("my.user", asked(), said("anything"))).value == 1.0


async def test_a_kill_reaches_what_user_code_has_started(workers: RewardWorkers, tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    while not (pid_file.exists() and pid_file.read_text()):  # On a busy machine the first may end before it has a child.
        with pytest.raises(RewardError, match="killed"):
            await workers.score("my.hasty", asked(pid_file=str(pid_file)), said("hang with child"))
    assert not is_running(int(pid_file.read_text()))


@pytest.mark.parametrize("how", ["fork", "raw fork"])
async def test_each_sample_gets_its_own_score_where_user_code_forks_and_both_processes_return(
    workers: RewardWorkers, how: str
) -> None:
    texts = [how + "!" * number for number in range(5)]
    assert [(await workers.score("my.user", asked(), said(text))).value for text in texts] == [len(text) for text in texts]


async def test_a_fork_of_user_code_that_raises_answers_nothing(workers: RewardWorkers) -> None:
    assert (await workers.score("my.user", asked(), said("child raises"))).value == 1.0
    assert (await workers.score("my.user", asked(), said("int"))).value == 3.0


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("stray", r"process sent what is no message \(b'garbage.* while judging"),
        ("stray zeros", r"process sent what is no message .* while judging"),
        ("answer nobody", r"process sent what is no message \(an answer to call 0, which waits for none\)"),
        ("answer another", r"process sent what is no message \(an answer to call 1, which waits for none\)"),
    ],
)
async def test_a_process_that_says_what_it_was_not_asked_is_replaced_at_once(
    workers: RewardWorkers, text: str, reason: str
) -> None:
    before = await workers.score("my.user", asked(), said("pid"))
    with pytest.raises(RewardError, match=reason):
        await workers.score("my.user", asked(), said(text))
    assert await workers.score("my.user", asked(), said("pid")) != before


async def test_what_is_said_after_the_answer_fails_nobody(workers: RewardWorkers) -> None:
    before = await workers.score("my.user", asked(), said("pid"))
    assert (await workers.score("my.user", asked(), said("stray later"))).value == 1.0
    while Path(f"/proc/{int(before.value)}").exists():
        await asyncio.sleep(0.02)
    assert await workers.score("my.user", asked(), said("pid")) != before


async def test_a_process_that_was_killed_while_idle_fails_nobody(workers: RewardWorkers) -> None:
    pid = int((await workers.score("my.user", asked(), said("pid"))).value)
    os.kill(pid, signal.SIGKILL)
    while is_running(pid):
        time.sleep(0.01)
    assert (await workers.score("my.user", asked(), said("int"))).value == 3.0


async def test_a_process_that_is_killed_before_it_reads_the_question_fails_nobody(workers: RewardWorkers) -> None:
    pid = int((await workers.score("my.user", asked(), said("pid"))).value)
    os.kill(pid, signal.SIGSTOP)  # It cannot read, and lives as far as anybody can see.
    while any(state(task) != "T" for task in Path(f"/proc/{pid}/task").iterdir()):
        await asyncio.sleep(0.01)
    killer = threading.Timer(0.5, os.kill, (pid, signal.SIGKILL))
    killer.start()
    assert (await workers.score("my.user", asked(), said("int"))).value == 3.0
    killer.join()


async def test_a_process_that_is_killed_in_the_midst_of_a_verdict_fails_nobody_if_the_next_one_lives(
    workers: RewardWorkers, tmp_path: Path
) -> None:
    assert (await workers.score("my.user", asked(flag=str(tmp_path / "killed")), said("killed once"))).value == 1.0


@pytest.mark.parametrize("text", ["daemon", "daemon and die", "child"])
async def test_close_ends_what_user_code_has_started_in_whatever_session(folder: Path, tmp_path: Path, text: str) -> None:
    pid_file = tmp_path / "pid"
    async with opened({"user": imported("judges:act")}, folder) as workers:
        with suppress(RewardError):
            await workers.score("user", asked(pid_file=str(pid_file)), said(text))
    assert not is_running(int(pid_file.read_text()))


async def test_what_user_code_prints_reaches_neither_the_terminal_nor_the_answer(
    workers: RewardWorkers, capfd: pytest.CaptureFixture[str]
) -> None:
    assert (await workers.score("my.user", asked(), said("print"))).value == 1.0
    assert (await workers.score("my.user", asked(), said("read stdin"))).value == 0.0
    assert capfd.readouterr() == ("", "")


async def test_imports_that_fail_are_all_named_and_fail_only_their_own_samples(folder: Path) -> None:
    rewards = {
        "missing": imported("no_such_module:f"),
        "broken": imported("broken:f"),
        "absent": imported("judges:no_such_function"),
        "not callable": imported("judges:not_a_function"),
        "good": imported("judges:act"),
    }
    async with opened(rewards, folder) as workers:
        problems = await workers.problems()
        assert set(problems) == {"missing", "broken", "absent", "not callable"}
        assert "No module named 'no_such_library'" in problems["broken"]
        assert "no_such_function" in problems["absent"]
        assert "is int, not a function" in problems["not callable"]
        with pytest.raises(RewardError, match="no_such_module"):
            await workers.score("missing", asked(), said(""))
        assert (await workers.score("good", asked(), said(""))).value == 1.0


async def test_a_module_that_kills_the_process_on_import_is_a_problem_and_not_a_hang(folder: Path) -> None:
    async with opened({"deadly": imported("deadly:f")}, folder) as workers:
        told = "process died (exit code 9) while importing the rewards"
        assert told in (await workers.problems())["deadly"]
        with pytest.raises(RewardError, match=re.escape(told)):
            await workers.score("deadly", asked(), said(""))


async def test_a_module_that_hangs_on_import_is_killed_and_a_problem(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("reroll.rewards.workers.IMPORT_TIMEOUT_S", 0.5)
    async with opened({"endless": imported("endless:f")}, folder) as workers:
        assert "took longer than 0.5 s importing the rewards: killed" in (await workers.problems())["endless"]


async def test_a_call_that_wants_too_much_memory_fails_its_sample_and_its_process_is_replaced(folder: Path) -> None:
    limited = ImportRewardConfig(kind="import", path="judges:act", memory_mb=100)
    rewards = {"my.limited": limited, "my.free": ImportRewardConfig(kind="import", path="judges:act", memory_mb=None)}
    async with opened(rewards, folder) as workers:
        before = await workers.score("my.limited", asked(), said("pid"))
        with pytest.raises(RewardError, match="wanted more memory than its memory_mb allows"):
            await workers.score("my.limited", asked(), said("eat memory"))
        assert await workers.score("my.limited", asked(), said("pid")) != before
        assert (await workers.score("my.free", asked(), said("eat memory"))).value == 300 * 2**20


async def test_options_that_a_function_does_not_take_are_found_before_the_first_call(folder: Path) -> None:
    async with opened({"user": imported("judges:act", malus=1.0)}, folder) as workers:
        assert "unexpected keyword argument 'malus'" in (await workers.problems())["user"]


async def test_each_entry_has_a_process_while_another_hangs_in_all_that_it_may_use(folder: Path) -> None:
    rewards = {name: imported("judges:act", timeout_s=300.0) for name in ("slow", "quick", "quicker.part")}
    async with opened(rewards, folder, num_processes=2) as workers:
        stuck = [asyncio.create_task(workers.score("slow", asked(), said("hang"))) for _ in range(5)]
        await asyncio.sleep(0.1)
        quick = await asyncio.gather(*(workers.score(name, asked(), said("int")) for name in ("quick", "quicker.part")))
        assert [score.value for score in quick] == [3.0, 3.0]
        assert not any(task.done() for task in stuck)
        await workers.close()
        assert {str(error) for error in await asyncio.gather(*stuck, return_exceptions=True)} == {CLOSING}


async def test_processes_work_side_by_side_and_close_ends_busy_ones(folder: Path) -> None:
    async with opened({"user": imported("judges:act", timeout_s=300.0)}, folder, num_processes=2) as workers:
        stuck = asyncio.create_task(workers.score("user", asked(), said("hang")))
        await asyncio.sleep(0.1)
        assert (await workers.score("user", asked(), said(""))).value == 1.0
        pid = int((await workers.score("user", asked(), said("pid"))).value)
        await workers.close()
        await workers.close()
        with pytest.raises(RewardError, match=CLOSING):
            await stuck
        assert not is_running(pid)
        with pytest.raises(RewardError, match=CLOSING):
            await workers.score("user", asked(), said(""))


async def test_a_hung_process_and_its_daemons_follow_its_parent_into_death(folder: Path, tmp_path: Path) -> None:
    script = f"""
        import asyncio, os, sys
        from pathlib import Path
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        from test_workers import asked, imported, opened, said
        pid_file = {str(tmp_path / "pid")!r}

        async def main():
            async with opened({{"user": imported("judges:act")}}, Path({str(folder)!r})) as workers:
                pid = int((await workers.score("user", asked(), said("pid"))).value)
                open(pid_file, "w").write(str(pid))
                await workers.score("user", asked(pid_file=pid_file + "-daemon"), said("daemon"))
                hung = asyncio.create_task(workers.score("user", asked(), said("hang")))
                await asyncio.sleep(0.5)
                os._exit(0)

        asyncio.run(main())
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True)
    assert not is_running(int((tmp_path / "pid").read_text()))
    assert not is_running(int((tmp_path / "pid-daemon").read_text()))


def state(task: Path) -> str:
    """`T` of what is stopped, `Z` of what has ended and waits to be reaped."""
    return (task / "stat").read_text().rsplit(")", 1)[1].split()[0]


def is_running(pid: int, *, patience_s: float = 120.0) -> bool:
    """Whether a process still runs after a while; one that was killed and waits to be reaped does not."""
    deadline_s = time.monotonic() + patience_s
    while time.monotonic() < deadline_s:
        try:
            if state(Path(f"/proc/{pid}")) == "Z":
                return False
        except (FileNotFoundError, ProcessLookupError):  # It may end while it is looked at.
            return False
        time.sleep(0.05)
    return True


async def test_reasoning_gym_tasks_are_scored_by_their_own_verifier() -> None:
    reasoning_gym = pytest.importorskip("reasoning_gym")
    options = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    entry = reasoning_gym.create_dataset("chain_sum", size=1, seed=5, **options)[0]
    prompt = asked(reasoning_gym={"name": "chain_sum", "options": options, "entry": entry})
    reward = ReasoningGymRewardConfig(kind="reasoning_gym", pattern=r"<answer>(.*?)</answer>")
    async with opened({"logic": reward}) as workers:
        assert (await workers.score("logic", prompt, said(f"so <answer>{entry['answer']}</answer>"))).value == 1.0
        assert (await workers.score("logic", prompt, said("<answer>1000</answer>"))).value < 1.0
        assert (await workers.score("logic", prompt, said("no tags"))).value < 1.0
        with pytest.raises(RewardError, match="p is not a reasoning-gym task"):
            await workers.score("logic", asked(), said("3"))


async def test_an_answer_on_which_a_bundled_verifier_hangs_is_wrong_and_fails_nothing(folder: Path) -> None:
    node = RegexRewardConfig(kind="regex", pattern="(a+)+$", wrong=-0.5, timeout_s=HANGS_S)
    async with opened({"form": node, "hasty": node.model_copy(update={"timeout_s": 0.5})}, folder) as workers:
        assert (await workers.score("form", asked(), said("aaa"))).value == 1.0
        assert await workers.score("hasty", asked(), said("a" * 40 + "!")) == Score(value=-0.5, info={"unjudged": 1.0})
        assert (await workers.score("form", asked(), said("aaa"))).value == 1.0


async def test_cases_of_one_call_are_judged_until_the_time_for_them_is_over_or_the_memory_is_spent(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    worker = RewardWorker(WorkerInfo("reward", 0, 1, "cpu"), {"user": imported("judges:act")}, search_path=[str(folder)])
    assert worker.load() == {}
    together = [(asked(), said(text)) for text in ("true", "raise", "int")]
    (first, failed, last), _ = worker.score("user", together, together_s=60.0)
    assert (first, last) == (Score(value=1.0), Score(value=3.0))
    assert isinstance(failed, RewardError)
    assert worker.score("user", together, together_s=0.0)[0] == [Score(value=1.0)]
    (*judged, spent), _ = worker.score("user", [(asked(), said(text)) for text in ("int", "no memory", "int")], together_s=60.0)
    assert judged == [Score(value=3.0)]
    assert isinstance(spent, MustRestart)
    worker.close()


async def test_quick_cases_are_judged_together_however_long_the_way_to_their_process(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("reroll.rewards.workers.TOGETHER_S", 4.0)
    ask, sizes = RewardWorkers._ask, []

    async def from_afar(self: RewardWorkers, rank: int, name: str, cases: Sequence[Case]) -> Verdicts:
        sizes.append(len(cases))
        await asyncio.sleep(0.5)
        return await ask(self, rank, name, cases)

    monkeypatch.setattr(RewardWorkers, "_ask", from_afar)
    async with opened({"user": imported("judges:act")}, folder) as workers:
        await workers.score("user", asked(), said("true"))
        await asyncio.gather(*(workers.score("user", asked(), said("true")) for _ in range(16)))
    assert sizes == [1, 16]


@pytest.mark.parametrize(
    ("text", "reason"), [("hang", "took longer than 2 s"), ("exit", "exit code 7"), ("eat memory", "memory_mb")]
)
async def test_who_is_judged_with_a_culprit_gets_a_verdict_and_the_culprit_alone_pays(
    folder: Path, monkeypatch: pytest.MonkeyPatch, text: str, reason: str
) -> None:
    monkeypatch.setattr("reroll.rewards.workers.TOGETHER_S", 60.0)  # However slow the machine is, they count as quick.
    ask = RewardWorkers._ask

    async def short_for_hangs(self: RewardWorkers, rank: int, name: str, cases: Sequence[Case]) -> Verdicts:
        hangs = any(trajectory.text == "hang" for _, trajectory in cases)
        self._rewards = {name: reward.model_copy(update={"timeout_s": 2.0 if hangs else HANGS_S})}
        return await ask(self, rank, name, cases)  # It reads the limit before it waits.

    monkeypatch.setattr(RewardWorkers, "_ask", short_for_hangs)
    reward = ImportRewardConfig(kind="import", path="judges:act", memory_mb=100)
    async with opened({"user": reward}, folder) as workers:
        await workers.score("user", asked(), said("int"))
        texts = ["int", "score", text, "true", "int"]
        verdicts = await asyncio.gather(*(workers.score("user", asked(), said(t)) for t in texts), return_exceptions=True)
        culprit = verdicts.pop(2)
        assert isinstance(culprit, RewardError)
        assert reason in str(culprit)
        assert verdicts == [Score(value=3.0), Score(value=0.5, parts={"style": 0.25}), Score(value=1.0), Score(value=3.0)]
