"""Texts that would leave a file behind if anything ran, formatted, rendered, unpickled or loaded them."""

from __future__ import annotations

import base64
import json
import pickle
from pathlib import Path
from typing import Any


class _Touch:
    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (str(self._mark), "w")


def texts(mark: Path) -> dict[str, str]:
    """By what they attack. Each is `mark` made, in one language or another."""
    run = f"__import__('os').system('touch {mark}')"
    return {
        "eval, a shell": run,
        "eval, a file": f"[open({str(mark)!r}, 'w').write('x')]",
        "eval, a literal that is none": f"{{'a': open({str(mark)!r}, 'w')}}",
        "exec": f"import os\nos.system('touch {mark}')",
        "sympify": f"S({run!r}) + sympify({run!r})",
        "lambdify": f"lambdify(x, {run!r})(1)",
        "an f-string": f"f\"{{open('{mark}', 'w')}}\"",
        "str.format": "{0.__class__.__init__.__globals__[os].system} {__import__} %(x)s",
        "jinja": f"{{{{ cycler.__init__.__globals__.os.system('touch {mark}') }}}}",
        "yaml": f"!!python/object/apply:os.system ['touch {mark}']",
        "pickle": pickle.dumps(_Touch(mark), protocol=0).decode(),
        "pickle, base64": base64.b64encode(pickle.dumps(_Touch(mark))).decode(),
        "jsonpickle": json.dumps({"py/reduce": [{"py/function": "os.system"}, {"py/tuple": [f"touch {mark}"]}]}),
        "json schema": json.dumps({"$ref": f"file://{mark}", "sum": 2}),
        "a shell": f"$(touch {mark}); `touch {mark}`; | touch {mark} #",
        "latex": f"\\immediate\\write18{{touch {mark}}} \\input{{|touch {mark}}} \\newwrite\\f\\openout\\f={mark}",
        "sql": f"x'; ATTACH DATABASE '{mark}' AS m; CREATE TABLE m.t(a); --",
    }


def dressed(text: str) -> str:
    """The text wherever a reward, a judge or an environment looks for an answer."""
    return f"{text}\n```python\n{text}\n```\n```json\n{text}\n```\nThe answer is \\boxed{{{text}}}\n<answer>{text}</answer>"
