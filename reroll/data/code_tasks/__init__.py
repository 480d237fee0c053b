"""Small programming tasks, drawn by seed: a prompt, a solution, and tests in the function form of reward kind `code`."""

from reroll.data.code_tasks.draw import code_rows

__all__ = ["code_rows"]
