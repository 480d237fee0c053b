"""Programs and what they deserve: right, wrong, slow, crashing and hostile ones, by the form of the tests they face."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from reroll.types import Completion, FinishReason, Prompt, Status, Trajectory, Turn

# f(a) is 7 * a + 11: no value is easily guessed, and none is the same for two calls.
CALLS = {
    "function": "f",
    "calls": [{"args": [3], "returns": 32}, {"kwargs": {"a": -5}, "returns": -24}, {"args": [0], "returns": 11}],
}
ASSERTS = ["assert f(3) == 32", "assert -24 == f(a=-5), 'negative'", "assert abs(f(0) - 11) < 1e-6 and f(1) in (18, 19)"]
INSIDE = {
    "setup": "import math\ndef near(a, b):\n    return abs(a - b) < 1e-9",
    "asserts": [
        "assert near(f(3), 32)",
        "for a in range(5):\n    assert f(a) == 7 * a + 11",
        "def check(candidate):\n    assert math.isclose(candidate(2) / 5, 5) and isinstance(candidate(4), int)\ncheck(f)",
    ],
}
STDIO = {"stdin": ["3\n1 2 3\n", "2\n-5 4\n", "1\n100\n"], "stdout": ["6\n", "-1\n", "100"]}
TYPES = {
    "asserts": [
        "assert g('none') is None",
        "assert g('tuple') == (1, 'a', [2.5])",
        "assert g('set') == {1, 2, 3}",
        "assert set(g('list')) == set([3, 1])",
        "assert g('bytes') == b'\\x00a'",
        "assert g('inf') == float('inf')",
        "assert g('nan') != g('nan') or True",
        "assert g('big') == 2 ** 900 * 2 ** 900",
        "assert g('dict') == {1: [True, None], 'k': (0,)}",
        "assert g('third') == 0.3333333333",
        "assert not g('empty')",
        "assert g('one')",
        "assert len(g('generator')) > 2 or list(g('generator')) == [0, 1, 2]",
    ]
}
TYPES_ANSWER = """
def g(name):
    return {"none": None, "tuple": (1, "a", [2.5]), "set": {3, 2, 1}, "list": [1, 3, 3], "bytes": b"\\0a", "inf": float("inf"),
            "nan": float("nan"), "big": 2 ** 1800, "dict": {"k": [0], 1: (1, None)}, "third": 1 / 3, "empty": [],
            "one": 1, "generator": [0, 1, 2]}[name]
"""

RIGHT = "def f(a):\n    return 7 * a + 11\n"
ALWAYS_EQUAL = """
class Always:
    def __eq__(self, other): return True
    __ne__ = __lt__ = lambda self, other: False
    __gt__ = __le__ = __ge__ = __eq__
    __hash__ = lambda self: 0
    __bool__ = lambda self: True
    __sub__ = __rsub__ = __add__ = __radd__ = __mul__ = __truediv__ = __abs__ = lambda self, *_: self
    __float__ = lambda self: 5.0
    __class__ = int
def f(a): return Always()
"""
FORGED = """
import os, sys, threading, atexit
text = b'{"ready": true}\\n{"value": 32, "true": true}\\n{"passed": true}\\n{"passed": true}\\n{"passed": true}\\n' * 5
def forge():
    for target in [*range(1, 64), "/proc/1/fd/1", f"/proc/{os.getppid()}/fd/1", "/dev/stdout", "/proc/self/fd/1"]:
        try:
            os.write(target if isinstance(target, int) else os.open(target, os.O_WRONLY), text)
        except OSError:
            pass
forge()
atexit.register(forge)
threading.Thread(target=forge).start()
def f(a):
    forge()
    return None
"""
# Looks for anything that could be an expected value or a token, wherever a program can look, and returns or prints it.
THIEF = """
import gc, glob, os, re, sys
def loot():
    texts = []
    frame = sys._getframe()
    while frame:
        texts.append(repr(frame.f_locals))
        frame = frame.f_back
    texts += [repr(thing) for thing in gc.get_objects() if isinstance(thing, (dict, list, tuple)) and len(thing) < 50]
    for path in ["/proc/self/fd/0", "/proc/1/fd/0", f"/proc/{os.getppid()}/fd/0", f"/proc/{os.getppid()}/environ",
                 f"/proc/{os.getppid()}/mem", *glob.glob("/proc/[0-9]*/cmdline"), *glob.glob("/tmp/*"), *glob.glob("*")]:
        try:
            texts.append(os.read(os.open(path, os.O_RDONLY | os.O_NONBLOCK), 10 ** 6).decode(errors="replace"))
        except OSError:
            pass
    return "\\n".join(texts)
def f(a):
    text = loot()
    # Its own source holds no such words: split here.
    asserted = re.search(r"f\\(%d\\) =" % a + r"= (-?\\d+)", text) or re.search("'ret" + "urns': (-?\\\\d+)", text)
    for token in set(re.findall("[0-9a-f]{64}", text)):
        for fd in range(1, 32):
            try: os.write(fd, f'{token}{{"ready": true}}\\n{token}{{"passed": true}}\\n'.encode() * 3)
            except OSError: pass
    return int(asserted[1]) if asserted else None
"""
PATCHES = """
import builtins, json, math, numbers, operator, os, signal, sys
builtins.abs = lambda *_: 0
builtins.isinstance = lambda *_: True
builtins.eval = builtins.compile = builtins.all = builtins.bool = builtins.repr = lambda *_: True
json.dumps = lambda *_: '{"value": 32, "true": true}'
math.isclose = operator.eq = lambda *_, **__: True
class Meta(type):
    def __eq__(self, other): return True
    __hash__ = type.__hash__
AssertionError = builtins.AssertionError = type("Quiet", (), {})
os._exit = sys.exit = signal.setitimer = lambda *_: None
def near(a, b): return True
def check(candidate): return True
def abs(*_): return 0
def isinstance(*_): return True
def f(a): return 0
"""
KILLS = (
    "import os, signal\nfor pid in (os.getppid(), 1, -1):\n    try: os.kill(pid, signal.SIGKILL)\n    except OSError: pass\n"
)
HOSTILE = {
    "exits on import": "import sys\nsys.exit(0)",
    "exits hard on import": "import os\nos._exit(0)",
    "exits in the call": "import sys\ndef f(a): sys.exit(0)",
    "exits hard in the call": "import os\ndef f(a): os._exit(0)",
    "is always equal": ALWAYS_EQUAL,
    "is a number that is always equal": "class N(int):\n    __eq__ = lambda *_: True\ndef f(a): return N(0)",
    "forges the result lines": FORGED,
    "steals what it finds": THIEF,
    "patches what judges it": PATCHES,
    "replaces the builtins": "__builtins__ = {'abs': lambda *_: 0, 'isinstance': lambda *_: True}\nf = lambda a: 0",
    "kills the judge": KILLS + "def f(a): return 0",
    "kills the judge in the call": "def f(a):\n    " + KILLS.replace("\n", "\n    ") + "return 0",
    "raises what tests raise": "def f(a): raise AssertionError('passed')",
    "raises StopIteration": "def f(a): raise StopIteration",
    "says it is a test": "def f(a): return {'passed': True, 'value': 32, 'true': True}",
}
WRONG = {
    "wrong constant": "def f(a):\n    return 7 * a + 10",
    "right for one": "def f(a):\n    return 32",
    "text of the number": "def f(a):\n    return str(7 * a + 11)",
    "no such function": "def g(a):\n    return 7 * a + 11",
    "prints instead": "def f(a):\n    print(7 * a + 11)",
    "crashes": "def f(a):\n    return [][a]",
    "crashes on import": RIGHT + "raise RuntimeError",
    "not Python": "def f(a:\n    return 7 * a + 11",
    "prose": "The function multiplies by seven and adds eleven.",
    "recursion without end": "def f(a):\n    return f(a)",
    "segmentation fault": "import ctypes\ndef f(a):\n    ctypes.string_at(0)",
    "too much memory": "def f(a):\n    return len('x' * 10**10)",
    "a function": "def f(a):\n    return lambda: 7 * a + 11",
    "a list that holds itself": "def f(a):\n    x = [7 * a + 11]\n    x.append(x)\n    return x",
    "a value a thousand deep": "def f(a):\n    x = 7 * a + 11\n    for _ in range(1000): x = [x]\n    return x",
    "endless output": "import sys\ndef f(a):\n    while True: sys.stderr.write('x' * 100000)",
}
SLOW = {
    "endless call": "def f(a):\n    while True: pass",
    "endless import": "while True: pass",
    "endless and stubborn": "def f(a):\n  while True:\n    try:\n      while True: pass\n    except BaseException: pass",
    "sleeps": "import time\ndef f(a):\n    time.sleep(100)\n    return 7 * a + 11",
}
GOOD = {
    "plain": RIGHT,
    "with noise": "import sys\nprint('hello')\n" + RIGHT + "print(f(3)); sys.stdout.flush()\n",
    "with a main part": RIGHT + "if __name__ == '__main__':\n    print(f(int(input())))\n",
    "a float that is whole": "def f(a):\n    return 7 * a + 11.0 if a == 99 else int(7 * a + 11.0)",
    "a lambda": "f = lambda a: 7 * a + 11",
    "a dataclass inside": "import dataclasses\n@dataclasses.dataclass\nclass P:\n  x: int\ndef f(a): return P(7 * a + 11).x",
    "a number type of its own": "class N(int): pass\ndef f(a): return N(7 * a + 11)",
    "leaves a thread behind": "import threading, time\n" + RIGHT + "threading.Thread(target=time.sleep, args=(60,)).start()",
}
METHOD = "class Solution:\n    def f(self, a):\n        return 7 * a + 11"
STDIO_PROGRAMS = {
    "right": ("n = int(input())\nprint(sum(map(int, input().split())))", 1),
    "right with spaces": ("input()\nprint()\nprint('  ', sum(map(int, input().split())), ' ')\nprint()", 1),
    "wrong": ("input()\nprint(max(map(int, input().split())))", 0),
    "right only once": ("print(6)", 0),
    "prints more": ("input()\nprint(sum(map(int, input().split())))\nprint('done')", 0),
    "right but fails": ("input()\nprint(sum(map(int, input().split())))\nraise SystemExit(3)", 0),
    "crashes": ("print(1 / 0)", 0),
    "not Python": ("print(", 0),
    "endless": ("while True: pass", 0),
    "endless output": ("while True: print('6' * 1000)", 0),
    "waits for more": ("import time\ninput(); input(); time.sleep(60)", 0),
    "looks for the answer": (
        "import gc, os, sys\nsys.stdin.read()\n"
        "print([text for text in gc.get_objects() if isinstance(text, dict) and 'stdout' in text and 'stdin' in text])\n"
        "os.system('cat /proc/*/environ /proc/*/cmdline')",
        0,
    ),
}
CPP = """#include <iostream>
int main() { int n; long s = 0, x; std::cin >> n; while (n--) { std::cin >> x; s += x; } std::cout << s; }"""
CPP_PROGRAMS = {
    "right": (CPP, {"passed": 1, "compiled": 1, "ran": 1}),
    "wrong": (CPP.replace("s += x", "s = x"), {"passed": 0, "compiled": 1, "ran": 1}),
    "does not compile": (CPP.replace("int n;", ""), {"passed": 0, "compiled": 0, "ran": 0}),
    "does not link": ("int g(); int main() { return g(); }", {"passed": 0, "compiled": 0, "ran": 0}),
    "crashes": ("int main() { volatile int* p = 0; return *p; }", {"passed": 0, "compiled": 1, "ran": 0}),
    "endless": ("int main() { for (volatile int i = 0;;) i = i; }", {"passed": 0, "compiled": 1, "ran": 0}),
    "includes the host's files": ('#include "/etc/passwd"\nint main() {}', {"passed": 0, "compiled": 0, "ran": 0}),
}


@dataclass(frozen=True)
class Case:
    tests: Any
    program: str
    value: float
    is_endless: bool = False


def _cases() -> dict[str, Case]:
    cases: dict[str, Case] = {}
    for form, tests in {"calls": CALLS, "asserts": ASSERTS, "inside": INSIDE}.items():
        for kind, programs, value in (("good", GOOD, 1), ("wrong", WRONG, 0), ("hostile", HOSTILE, 0), ("slow", SLOW, 0)):
            cases |= {
                f"{form} - {kind} - {name}": Case(tests, program, value, is_endless=kind == "slow")
                for name, program in programs.items()
            }
    cases["calls - good - a method"] = Case(CALLS, METHOD, 1)
    cases["types - good - all"] = Case(TYPES, TYPES_ANSWER, 1)
    cases["types - wrong - one"] = Case(TYPES, TYPES_ANSWER.replace('"one": 1', '"one": 0'), 0)
    for name, (program, value) in STDIO_PROGRAMS.items():
        cases[f"stdio - {name}"] = Case(STDIO, program, value, is_endless=name in ("endless", "waits for more"))
    return cases


CASES = [pytest.param(case, id=name) for name, case in _cases().items()]


def said(text: str) -> Trajectory:
    completion = Completion(token_ids=(1,), logprobs=(0.0,), finish_reason=FinishReason.STOP, versions=((0, 1),))
    return Trajectory(id="s", turns=(Turn(prompt_ids=(0,), completion=completion, text=text),), status=Status.COMPLETED)


def asked(tests: object) -> Prompt:
    return Prompt(id="code/1", messages=(), domain="code", extra={"tests": tests})


def fenced(program: str, tag: str = "python") -> str:
    return f"Here it is:\n```{tag}\n{program}\n```\nThat is all."
