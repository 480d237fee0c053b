"""Where a live panel is drawn: a terminal, or the output of a notebook's cell."""

from __future__ import annotations

import contextvars
import io
import threading
from collections.abc import Callable
from typing import Any, Protocol

from rich.console import Console, RenderableType
from rich.live import Live

from reroll.observe.progress import in_notebook

REFRESH_S = 1.0
"""How often a cell is drawn again while nothing happens: what is being done goes on."""


class Screen(Protocol):
    """Shows what a function renders, again and again."""

    def start(self, refresh: bool = False) -> None:
        """Begin."""

    def refresh(self) -> None:
        """Draw it now."""

    def stop(self) -> None:
        """Draw it once more, and leave it there."""


def open_screen(console: Console, render: Callable[[], RenderableType]) -> Screen | None:
    """A screen where the output can be drawn over; None where it is a file, a pipe or a log."""
    if in_notebook():
        return NotebookScreen(render, width=console.width)
    if console.is_terminal:
        return Live(console=console, get_renderable=render, refresh_per_second=4)
    return None


class NotebookScreen:
    """One output of the cell, replaced as a whole. It needs no widgets, so it also shows in a stored notebook."""

    def __init__(self, render: Callable[[], RenderableType], *, width: int) -> None:
        self._render = render
        self._width = width
        self._display: Any = None
        self._is_over = threading.Event()
        self._drawing = threading.Lock()
        self._thread: threading.Thread | None = None

    def start(self, refresh: bool = False) -> None:
        from IPython.display import display

        self._display = display(self._bundle(), raw=True, display_id=True)  # type: ignore[no-untyped-call]
        # The kernel knows by its context which cell an output belongs to.
        context = contextvars.copy_context()
        self._thread = threading.Thread(target=context.run, args=(self._keep_drawing,), daemon=True, name="reroll-view")
        self._thread.start()

    def refresh(self) -> None:
        with self._drawing:
            self._display.update(self._bundle(), raw=True)

    def stop(self) -> None:
        self._is_over.set()
        if self._thread:
            self._thread.join()
        self.refresh()

    def _keep_drawing(self) -> None:
        while not self._is_over.wait(REFRESH_S):
            self.refresh()

    def _bundle(self) -> dict[str, str]:
        """The panel for front ends that show HTML, and for those that show text."""
        console = Console(width=self._width, record=True, file=io.StringIO(), force_jupyter=False)
        console.print(self._render())
        html = console.export_html(inline_styles=True, code_format=_HTML, clear=False)
        return {"text/html": html, "text/plain": console.export_text()}


_HTML = (
    "<pre style=\"line-height:1.25;font-family:Menlo,'DejaVu Sans Mono',Consolas,'Courier New',monospace;"
    'overflow-x:auto">{code}</pre>'
)
