"""Landlock: a process gives up, for good, the files it names no right to, and with newer kernels what lies outside it.

Needs no privilege; Linux 5.13 and later.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable

from reroll_zoo.sandbox.inside import kernel
from reroll_zoo.sandbox.inside.tree import DEVICES, SYSTEM, ZEROS

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_ASK_VERSION = 1
_RULE_PATH_BENEATH = 1
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1, 2, 4, 8
# The rights known to each version of the interface: making, removing and reading of all kinds; linking across folders;
# truncating; ioctl on devices. A right that is not named here is one that the kernel does not check.
_ALL = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 4: (1 << 15) - 1, 5: (1 << 16) - 1}
_NETWORK_SINCE, _BIND_AND_CONNECT_TCP = 4, 1 | 2
_SCOPES_SINCE, _ABSTRACT_SOCKETS_AND_SIGNALS = 6, 1 | 2


def version() -> int:
    """The version of the kernel's interface. Raises OSError where there is none."""
    return kernel.syscall("landlock", _CREATE_RULESET, None, 0, _ASK_VERSION)


def restrict(*, readable: Iterable[str], scratch: str) -> None:
    """From now on this process and its children see the system, `readable` and nothing else, and write to `scratch` alone.

    Where the kernel can (6.12 and later), they also signal no other process and reach no socket that another has bound to an
    abstract name. The filter of system calls says the same; each holds where the other has a gap.
    """
    known = version()
    everything = _ALL[min(known, max(_ALL))]
    attributes = struct.pack("Q", everything)
    if known >= _NETWORK_SINCE:
        attributes += struct.pack("Q", _BIND_AND_CONNECT_TCP)
    if known >= _SCOPES_SINCE:
        attributes += struct.pack("Q", _ABSTRACT_SOCKETS_AND_SIGNALS)
    rules = kernel.syscall("landlock", _CREATE_RULESET, attributes, len(attributes), 0)
    for path in [*SYSTEM, *readable]:
        _allow(rules, path, _EXECUTE | _READ_FILE | (_READ_DIR if os.path.isdir(path) else 0))
    for path in DEVICES:
        _allow(rules, path, _READ_FILE | _WRITE_FILE)
    _allow(rules, ZEROS, _READ_FILE)
    _allow(rules, scratch, everything)
    kernel.call("prctl", kernel.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    kernel.syscall("landlock", _RESTRICT_SELF, rules, 0)
    os.close(rules)


def _allow(rules: int, path: str, rights: int) -> None:
    """Grant rights beneath a path. Harmless if there is no such path."""
    try:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        kernel.syscall("landlock", _ADD_RULE, rules, _RULE_PATH_BENEATH, struct.pack("=Qi", rights, descriptor), 0)
    finally:
        os.close(descriptor)
