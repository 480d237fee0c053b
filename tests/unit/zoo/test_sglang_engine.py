"""The engine and the process behind it, without sglang: a Python of ours answers the messages in its place."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from reroll.errors import WorkerError
from reroll.models.load import load_model, load_tokenizer
from reroll.types import FinishReason, Request, SamplingParams
from reroll_zoo.external_engine.weights import HFWeightAssembler
from reroll_zoo.sglang.config import SglangConfig
from reroll_zoo.sglang.engine import SglangEngine, buckets, open_process
from reroll_zoo.sglang.messages import OpenServer, Ready, ResetCache, RunStep, StepOutput
from reroll_zoo.sglang.process import SglangProcess
from reroll_zoo.tiny_models import make_tiny

OPENING = OpenServer(server={}, device="cpu", memory_share=0.5, max_length=None)


def interpreter(folder, body):
    """Stands for sglang's Python: runs `body` with `connection`, whatever script it is told to run."""
    script = folder / "stand_in.py"
    root = Path(__file__).parents[3]
    script.write_text(
        f"import sys; sys.path.insert(0, {str(root)!r})\n"
        "from multiprocessing.connection import Connection\n"
        "from reroll_zoo.sglang.messages import *\n"
        "connection = Connection(int(sys.argv[2]))\n"
        "options = connection.recv()\n" + body
    )
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} {script} "$@"\n')
    python.chmod(0o755)
    return str(python)


ECHO = """
connection.send(Ready(64, 16, True))
while not isinstance(message := connection.recv(), CloseServer):
    print(message, flush=True)
    connection.send(StepOutput((), (), (), {}, frozenset()))
"""


def test_an_interpreter_that_is_not_there_is_named():
    with pytest.raises(WorkerError, match=r"engine.python /no/such/python does not run"):
        SglangProcess("/no/such/python", OPENING)


def test_a_process_that_dies_while_it_starts_is_reported_with_the_end_of_its_log(tmp_path):
    python = interpreter(tmp_path, "print('no kernel for this GPU', flush=True); sys.exit(3)")
    with pytest.raises(WorkerError, match=r"(?s)ended with 3.*no kernel for this GPU"):
        SglangProcess(python, OPENING)


def test_an_error_on_the_other_side_arrives_with_its_traceback(tmp_path):
    python = interpreter(tmp_path, "connection.send(ServerError('Traceback: out of memory')); connection.recv()")
    with pytest.raises(WorkerError, match=r"(?s)stopped on an error.*out of memory"):
        SglangProcess(python, OPENING)


def test_a_process_that_dies_later_fails_the_call_that_waits_for_it(tmp_path):
    python = interpreter(tmp_path, "connection.send(Ready(64, 16, True)); connection.recv(); sys.exit(4)")
    process = SglangProcess(python, OPENING)
    with pytest.raises(WorkerError, match="ended with 4"):
        process.ask(ResetCache())


def test_a_closed_process_is_gone_with_what_it_started(tmp_path):
    child = tmp_path / "child"
    body = f"import subprocess; child = subprocess.Popen(['sleep', '600']); open({str(child)!r}, 'w').write(str(child.pid))\n"
    process = SglangProcess(interpreter(tmp_path, body + ECHO), OPENING)
    process.close()
    pid = int(child.read_text())
    for _ in range(200):
        if not is_running(pid):
            return
        time.sleep(0.05)
    raise AssertionError("the child lives")


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_the_packages_of_this_python_are_not_on_the_path_of_the_other(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/of/this/one")
    body = "import os; connection.send(ServerError(str(os.environ.get('PYTHONPATH')))); connection.recv()"
    with pytest.raises(WorkerError, match=r"error:\nNone"):
        SglangProcess(interpreter(tmp_path, body), OPENING)


def test_settings_reach_sglang_and_options_win(tmp_path):
    python = interpreter(tmp_path, "connection.send(ServerError(repr(sorted(options.server.items())))); connection.recv()")
    config = SglangConfig(
        kind="sglang", python=python, max_running=7, tp=2, sleep=True, options={"page_size": 64, "tp_size": 4}
    )
    with pytest.raises(WorkerError) as raised:
        open_process("/models/x", config, precision="bf16", device="cuda:1")
    settings = {
        "model_path": "/models/x",
        "max_running_requests": 7,
        "page_size": 64,
        "tp_size": 4,
        "enable_memory_saver": True,
    }
    for item in settings.items():
        assert repr(item) in str(raised.value)


def test_weights_travel_in_buckets_and_a_large_one_alone():
    weights = {name: torch.zeros(size) for name, size in {"a": 10, "b": 20, "c": 500, "d": 5}.items()}
    found = list(buckets(weights, dtype=torch.bfloat16, max_bytes=256))
    assert [[entry.name for entry in bucket] for bucket in found] == [["a", "b"], ["c"], ["d"]]
    assert [entry.offset for entry in found[0]] == [0, 64]
    assert {entry.dtype for bucket in found for entry in bucket} == {torch.bfloat16}


class Scripted:
    """Stands for the process: keeps what it was asked, and writes a token a step for every request that it was handed."""

    ready = Ready(max_length=64, block_tokens=16, takes_parts=True)

    def __init__(self):
        self.asked, self.running = [], {}

    def ask(self, message):
        self.asked.append(message)
        if isinstance(message, ResetCache):
            self.running.clear()
        if not isinstance(message, RunStep):
            return StepOutput((), (), (), {}, frozenset())
        new = {start.external_id: start for start in message.starts}
        self.running = {name: start for name, start in (self.running | new).items() if name not in message.ends}
        names = tuple(self.running)
        return StepOutput(names, (30,) * len(names), (-1.0,) * len(names), dict.fromkeys(new, 0), frozenset())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(make_tiny(tmp_path_factory.mktemp("tiny"), hidden=32, max_positions=64))


@pytest.fixture
def process():
    return Scripted()


@pytest.fixture
def engine(folder, process):
    tokenizer = load_tokenizer(folder)
    return SglangEngine(
        process,
        tokenizer,
        HFWeightAssembler(folder, lora=None),
        end_ids=frozenset({2}),
        dtype=torch.float32,
        device="cpu",
        max_running=8,
        can_sleep=True,
    )


def asked(process, kind):
    return [type(message).__name__ for message in process.asked if not isinstance(message, kind)]


def starts(process):
    """How many requests each step has handed in."""
    return [len(message.starts) for message in process.asked if isinstance(message, RunStep)]


def request(name, prompt, **sampling):
    return Request(id=name, prompt_ids=tuple(prompt), sampling=SamplingParams(**{"max_tokens": 9} | sampling))


def test_siblings_are_handed_in_when_the_first_has_read_their_prompt(engine, process):
    for index in range(4):
        engine.submit(request(str(index), range(10, 40), seed=index))
    for _ in range(3):
        engine.step()
    assert starts(process) == [1, 3, 0]


def test_siblings_do_not_wait_for_a_reader_that_was_aborted(engine, process):
    for index in range(3):
        engine.submit(request(str(index), range(10, 40), seed=index))
    engine.abort("0")
    [report] = engine.step()
    assert report.completion.finish_reason is FinishReason.ABORT
    assert starts(process) == [2]


def test_prompts_shorter_than_a_block_are_handed_in_at_once(engine, process):
    for index in range(4):
        engine.submit(request(str(index), range(10, 20), seed=index))
    engine.step()
    assert starts(process) == [4]


def test_a_request_that_ends_here_is_ended_there_with_the_next_step(engine, process):
    engine.submit(request("a", [5], stop_token_ids=(30,)))
    engine.submit(request("b", [6]))
    [report] = engine.step()
    assert (report.request_id, report.completion.token_ids) == ("a", (30,))
    engine.step()
    assert process.asked[-1].ends == ("0000000000000000",)


def test_a_request_that_sglang_gives_up_does_not_keep_the_run_waiting(engine, process, monkeypatch):
    engine.submit(request("a", [5]))
    given_up = StepOutput((), (), (), {}, frozenset({"0000000000000000"}))
    monkeypatch.setattr(process, "ask", lambda message: given_up)
    with pytest.raises(RuntimeError, match="gave up request a"):
        engine.step()


def test_asleep_with_new_weights_they_are_woken_first_and_the_cache_with_the_engine(engine, process, folder):
    engine.submit(request("a", [5, 6]))
    engine.step()
    engine.sleep()
    engine.load_weights(dict(load_model(folder, dtype=torch.float32, device="cpu").named_parameters()), version=4)
    engine.wake()
    assert asked(process, RunStep) == ["SetMaxRunning", "ResetCache", "Sleep", "Wake", "LoadWeights", "Wake"]
    wakes = [message for message in process.asked if type(message).__name__ == "Wake"]
    assert [(wake.weights, wake.cache) for wake in wakes] == [(True, False), (False, True)]
    engine.step()
    assert process.asked[-1].starts[0].context == (5, 6, 30)
    engine.abort("a")
    assert engine.step()[0].completion.versions == ((0, 1), (4, 1))


def test_sglang_itself_is_imported_nowhere_in_this_process():
    assert "sglang" not in sys.modules
    assert not any(name.startswith("reroll_zoo.sglang.server") for name in sys.modules)


def test_sglangs_python_finds_both_packages_by_their_place(tmp_path):
    root = Path(__file__).parents[3]
    code = (
        f"import runpy; runpy.run_path({str(root / 'reroll_zoo/sglang/start.py')!r}, run_name='started')\n"
        "import reroll.weights.buckets, reroll_zoo.sglang.sampling\n"
        "print(reroll.weights.buckets.__file__, reroll_zoo.sglang.sampling.__file__)"
    )
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([sys.executable, "-P", "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert all(Path(file).is_relative_to(root) for file in done.stdout.split())
