"""`reroll page`: a web page of a run, from its folder."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console


def page(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run's folder, or its name under runs/.", show_default=False)],
    port: Annotated[int, typer.Option(min=0, max=65535, help="Where to listen; 0 takes a free one.")] = 7860,
    host: Annotated[str, typer.Option(help="Whom to listen to; 0.0.0.0 lets every machine read it.")] = "127.0.0.1",
) -> None:
    """Serve a page of RUN, finished, crashed or still running: what every sample does, the course of time, curves, samples,
    the config. It only reads RUN's folder, as it grows.
    """
    from reroll.observe.episode import find_run
    from reroll.page.run_data import RunData
    from reroll.page.server import PageServer

    console = Console(highlight=False, soft_wrap=True)
    with PageServer(RunData(find_run(run)), host=host, port=port) as server:
        console.print(f"[green]open[/] {server.url} (Ctrl-C ends it)")
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            console.print("closed")
