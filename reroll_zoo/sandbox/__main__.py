"""`python -m reroll_zoo.sandbox [LEVEL]`: the level that programs get on this machine, and a table of what it holds back."""

from __future__ import annotations

import argparse
import asyncio
import sys

from rich.console import Console
from rich.table import Table

from reroll.errors import SandboxError
from reroll_zoo.sandbox.config import LocalSandboxConfig
from reroll_zoo.sandbox.local import LEVELS, LocalPool
from reroll_zoo.sandbox.selftest import Finding, try_out


def main(arguments: list[str]) -> int:
    """0 if the sandbox keeps what its level promises, 1 if it does not, 2 if there is none."""
    parser = argparse.ArgumentParser(
        prog="python -m reroll_zoo.sandbox", description="What a sandbox on this machine holds back."
    )
    parser.add_argument("level", nargs="?", choices=("auto", *LEVELS), default="auto", help="default: the best there is")
    level = parser.parse_args(arguments).level
    try:
        pool = LocalPool(LocalSandboxConfig(level=level), num_processes=1)
    except SandboxError as error:
        print(error, file=sys.stderr)
        return 2
    findings = asyncio.run(_examine(pool))
    _show(pool, findings)
    return int(any(finding.broken for finding in findings))


async def _examine(pool: LocalPool) -> list[Finding]:
    try:
        return await try_out(pool)
    finally:
        await pool.close()


def _show(pool: LocalPool, findings: list[Finding]) -> None:
    table = Table(title=f"Sandbox level {pool.level}, programs run as user {pool.uid}")
    table.add_column("a program tries to")
    table.add_column("and")
    for finding in findings:
        verdict = "is held back" if finding.held else "MAY, against the promise" if finding.promised else "may"
        table.add_row(finding.name, verdict)
    Console().print(table)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
