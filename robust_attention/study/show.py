"""Progress of a grid: bars where somebody looks on, one line an event where the output goes to a file."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from robust_attention.study.grid import News, Tell

_QUIET_SECONDS = 30.0


@contextmanager
def shown(console: Console, num_cells: int) -> Iterator[Tell]:
    """A `tell` that shows each running cell, and how many of `num_cells` are done."""
    if not console.is_terminal:
        yield _lines(console, num_cells)
        return
    columns = (
        TextColumn("{task.description:32}"),
        BarColumn(bar_width=28),
        TextColumn("{task.percentage:>3.0f} %"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[doing]}"),
    )
    with Progress(*columns, console=console) as progress:
        whole = progress.add_task("all cells", total=num_cells, doing="")
        tasks: dict[str, TaskID] = {}

        def tell(news: News) -> None:
            if news.cell not in tasks:
                tasks[news.cell] = progress.add_task(news.cell, total=1.0, doing="")
            progress.update(tasks[news.cell], completed=news.done, doing=news.doing)
            if news.done >= 1:
                progress.advance(whole)
                if news.doing.startswith("failed"):
                    console.print(f"{news.cell}: {news.doing}", highlight=False)
                progress.remove_task(tasks[news.cell])

        yield tell


def _lines(console: Console, num_cells: int) -> Tell:
    """A line whenever a cell ends, and now and then one that says where each stands."""
    said: dict[str, float] = {}
    ended = 0

    def tell(news: News) -> None:
        nonlocal ended
        now = time.monotonic()
        over = news.done >= 1
        ended += over
        if over or now - said.get(news.cell, 0.0) > _QUIET_SECONDS:
            said[news.cell] = now
            count = f" ({ended} of {num_cells})" if over else ""
            console.print(f"{news.cell}: {news.done:4.0%} {news.doing}{count}", highlight=False, soft_wrap=True)

    return tell
