"""Takes an assert statement apart: what to ask the program, and what to compare the answer with outside the sandbox.

A question is a call of something that only the program can have defined, alone or inside builtins that add no knowledge of the
answer: `sorted(f(3))`. Every other assert must run inside the sandbox: one that compares two questions, or hides what it wants
in the arguments of a helper.
"""

from __future__ import annotations

import ast
import builtins
import math
import operator
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from reroll_zoo.code.values import Equality, Reply, is_close

Check = tuple[str, Callable[[Reply], bool]]
"""An expression for the program, and whether its answer is accepted."""

_WRAPPERS = frozenset(
    {"sorted", "list", "set", "frozenset", "tuple", "dict", "len", "str", "int", "float", "round", "sum", "max", "min"}
)
_ORDER: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
_ARITHMETIC: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_MAKERS: dict[str, Callable[..., Any]] = {
    "set": frozenset, "frozenset": frozenset, "tuple": tuple, "list": list, "dict": dict, "float": float, "int": int,
}  # fmt: skip
_LIBRARIES = frozenset({"np", "numpy", "pd", "pandas", "pytest", "torch"})
_COMPARERS = frozenset({"isclose", "approx", "allclose"})
_CONSTANTS = {"inf": math.inf, "nan": math.nan, "pi": math.pi, "e": math.e}
_MAX_LITERAL = 10**6
"""What arithmetic in an expected value may reach: `[0] * 10**9` is not worked out here."""


@dataclass(frozen=True, slots=True)
class SandboxedAssert:
    """A test that must run inside the sandbox, and the names that it needs."""

    source: str
    own: frozenset[str]
    """Names that only the program can define. Every other keeps the meaning that Python or the setup gives it."""
    modules: frozenset[str]
    """Modules of the standard library that it uses."""


def read_assert(source: str, setup: str, equality: Equality) -> list[Check] | SandboxedAssert:
    """The checks that together mean the same as an assert, or what it takes to run it inside.

    Raises SyntaxError if it is not Python, and ValueError if it asks nothing of a program.
    """
    tree = ast.parse(source)
    prepared = ast.parse(setup)
    bound = names_bound_by(tree) | names_bound_by(prepared)
    own = _own_names(tree, bound)
    if len(tree.body) == 1 and isinstance(tree.body[0], ast.Assert):
        try:
            return _Splitter(own or _shadowed_builtin(tree), equality).split(tree.body[0].test)
        except _Whole:
            pass
    if not own:
        raise ValueError("it calls nothing that only the program can define")
    roots = {node.value.id for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)}
    return SandboxedAssert(source, own | _own_names(prepared, bound), frozenset(roots & sys.stdlib_module_names - own))


def names_bound_by(tree: ast.AST) -> frozenset[str]:
    """Every name that some code defines, imports or assigns."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.alias):
            names.add((node.asname or node.name).partition(".")[0])
        elif isinstance(node, ast.arg):
            names.add(node.arg)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return frozenset(names)


def _own_names(tree: ast.AST, bound: frozenset[str]) -> frozenset[str]:
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    # A module cannot be called: `copy(x)` is a function of the program, `copy.copy(x)` is not.
    modules = (sys.stdlib_module_names | _LIBRARIES) - _called(tree)
    return frozenset(used - bound - modules - set(dir(builtins)) - _COMPARERS)


def _shadowed_builtin(tree: ast.AST) -> frozenset[str]:
    """The builtin that a test calls, if it calls just one thing: it must mean the program's function of that name."""
    called = _called(tree)
    return frozenset(called if len(called) == 1 else ())


def _called(tree: ast.AST) -> set[str]:
    return {node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}


class _Whole(Exception):
    """This assert cannot be taken apart."""


@dataclass(frozen=True, slots=True)
class _Splitter:
    own: frozenset[str]
    equality: Equality

    def split(self, test: ast.expr) -> list[Check]:
        """Raises _Whole."""
        if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And):
            return [check for value in test.values for check in self.split(value)]
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            return [(self._call(test.operand), lambda reply: not reply.is_true)]
        if isinstance(test, ast.Compare) and len(test.ops) == 1:
            return [self._compare(test.left, test.ops[0], test.comparators[0])]
        if isinstance(test, ast.Call) and _name(test.func) in ("isclose", "math.isclose"):
            return [self._isclose(test)]
        return [(self._call(test), lambda reply: reply.is_true)]

    def _compare(self, left: ast.expr, op: ast.cmpop, right: ast.expr) -> Check:
        same = self.equality.same
        if isinstance(op, ast.Eq | ast.NotEq | ast.Is | ast.IsNot):
            if _is_literal(left):
                left, right = right, left
            return self._equal(left, op, right)
        if isinstance(op, ast.In | ast.NotIn):
            wanted = isinstance(op, ast.In)
            if _is_literal(right):
                choices = literal(right)
                return self._call(left), lambda reply: _holds(choices, reply.value, same) is wanted
            item = literal(left)
            return self._call(right), lambda reply: _holds(reply.value, item, lambda held, item: same(item, held)) is wanted
        compare = _ORDER[type(op)]
        if near := _difference(left):
            return self._near(*near, compare, literal(right))
        if _is_literal(right):
            bound = literal(right)
            return self._call(left), lambda reply: _ordered(compare, reply.value, bound)
        bound = literal(left)
        return self._call(right), lambda reply: _ordered(compare, bound, reply.value)

    def _equal(self, left: ast.expr, op: ast.cmpop, right: ast.expr) -> Check:
        wanted = isinstance(op, ast.Eq | ast.Is)
        if isinstance(right, ast.Call) and _name(right.func) in ("approx", "pytest.approx"):
            about, rel, abs_ = _arguments(right, rel=1e-6, abs=1e-12)
            return self._question(left), lambda reply: _all_close(about, reply.value, rel=rel, abs_=abs_) is wanted
        expected = literal(right)
        if isinstance(op, ast.Is | ast.IsNot):
            return self._call(left), lambda reply: (type(reply.value) is type(expected) and reply.value == expected) is wanted
        # A truth value is guessed too easily to be asked for through anything but the program's own function.
        expression = self._call(left) if isinstance(expected, bool) else self._question(left)
        return expression, lambda reply: self.equality.same(expected, reply.value) is wanted

    def _isclose(self, test: ast.Call) -> Check:
        if len(test.args) != 2:
            raise _Whole
        left, right = reversed(test.args) if _is_literal(test.args[0]) else test.args
        expected, rel, abs_ = _arguments(ast.Call(test.func, [right], test.keywords), rel_tol=1e-9, abs_tol=0.0)
        return self._question(left), lambda reply: is_close(expected, reply.value, rel=rel, abs_=abs_)

    def _near(self, left: ast.expr, right: ast.expr, compare: Callable[[Any, Any], Any], bound: Any) -> Check:
        """`abs(left - right) < bound`."""
        if _is_literal(left):
            left, right = right, left
        expected = literal(right)
        return self._question(left), lambda reply: _ordered(lambda a, b: compare(abs(a - expected), b), reply.value, bound)

    def _question(self, node: ast.expr) -> str:
        """The source of a question. Raises _Whole if it is none."""
        inner = node
        while isinstance(inner, ast.Call) and _name(inner.func) in _WRAPPERS - self.own and inner.args:
            # What else a builtin is told may be what is expected: `max(f(3), 5) == 5`.
            if any(keyword.arg != "reverse" for keyword in inner.keywords) or not all(map(_is_literal, inner.args[1:])):
                raise _Whole
            if len(inner.args) > 1 and _name(inner.func) != "round":
                raise _Whole
            inner = inner.args[0]
        self._call(inner)
        return ast.unparse(node)

    def _call(self, node: ast.expr) -> str:
        """The source of a call of the program's own, an index or a method after it at most. Raises _Whole if it is none."""
        root: ast.expr = node
        calls: list[ast.Call] = []
        while isinstance(root, ast.Call | ast.Attribute | ast.Subscript):
            if isinstance(root, ast.Call):
                calls.append(root)
            root = root.func if isinstance(root, ast.Call) else root.value
        if not calls or not isinstance(root, ast.Name) or root.id not in self.own:
            raise _Whole
        # In `f(3).issubset({1, 2})` a method of the answer is told what is expected. `Solution().f(3)` is told nothing.
        if sum(bool(call.args or call.keywords) for call in calls) > (2 if root.id[0].isupper() else 1):
            raise _Whole
        return ast.unparse(node)


def literal(node: ast.expr) -> Any:
    """The value of an expression that is made of constants. Raises _Whole if it is not."""
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError):
        pass
    try:
        return _value(node)
    except (ValueError, TypeError, ArithmeticError):
        raise _Whole from None


def _value(node: ast.expr) -> Any:
    name = _name(node)
    if name.startswith("math.") and name[5:] in _CONSTANTS:
        return _CONSTANTS[name[5:]]
    if isinstance(node, ast.List | ast.Tuple | ast.Set):
        items = [literal(item) for item in node.elts]
        return {ast.List: list, ast.Tuple: tuple, ast.Set: frozenset}[type(node)](items)
    if isinstance(node, ast.Dict) and all(node.keys):
        return {literal(key): literal(item) for key, item in zip(node.keys, node.values, strict=True) if key}
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -literal(node.operand)
    if isinstance(node, ast.Call) and _name(node.func) in _MAKERS and not node.keywords:
        return _MAKERS[_name(node.func)](*map(literal, node.args))
    if isinstance(node, ast.BinOp):
        return _work_out(literal(node.left), node.op, literal(node.right))
    raise _Whole


def _work_out(left: Any, op: ast.operator, right: Any) -> Any:
    sizes = [len(side) if isinstance(side, list | tuple | str | bytes) else abs(side) for side in (left, right)]
    if isinstance(op, ast.Pow) and max(sizes) <= 1000:
        return left**right
    if max(sizes) > _MAX_LITERAL and isinstance(op, ast.Mult):
        raise _Whole
    if type(op) not in _ARITHMETIC:
        raise _Whole
    return _ARITHMETIC[type(op)](left, right)


def _is_literal(node: ast.expr) -> bool:
    try:
        literal(node)
    except _Whole:
        return False
    return True


def _name(node: ast.expr) -> str:
    """`f` or `module.f`; empty for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        return f"{node.value.id}.{node.attr}"
    return ""


def _difference(node: ast.expr) -> tuple[ast.expr, ast.expr] | None:
    """(a, b) of `abs(a - b)`."""
    if isinstance(node, ast.Call) and _name(node.func) in ("abs", "math.fabs") and len(node.args) == 1:
        inside = node.args[0]
        if isinstance(inside, ast.BinOp) and isinstance(inside.op, ast.Sub):
            return inside.left, inside.right
    return None


def _arguments(call: ast.Call, **defaults: float) -> tuple[Any, float, float]:
    """The first argument and two options by name, all constants."""
    given = {str(keyword.arg): literal(keyword.value) for keyword in call.keywords}
    if len(call.args) != 1 or not given.keys() <= defaults.keys():
        raise _Whole
    first, second = (given.get(name, default) for name, default in defaults.items())
    return literal(call.args[0]), float(first), float(second)


def _all_close(expected: Any, given: Any, *, rel: float, abs_: float) -> bool:
    if isinstance(expected, list | tuple):
        same_length = isinstance(given, list | tuple) and len(given) == len(expected)
        return same_length and all(_all_close(*pair, rel=rel, abs_=abs_) for pair in zip(expected, given, strict=True))
    return is_close(expected, given, rel=rel, abs_=abs_)


def _holds(container: Any, item: Any, same: Callable[[Any, Any], bool]) -> bool:
    """`item in container`, whatever either is."""
    if isinstance(container, str):
        return isinstance(item, str) and item in container
    if not isinstance(container, list | tuple | set | frozenset | dict):
        return False
    return any(same(held, item) for held in container)


def _ordered(compare: Callable[[Any, Any], Any], left: Any, right: Any) -> bool:
    try:
        return bool(compare(left, right))
    except (TypeError, ValueError, ArithmeticError):
        return False
