"""Cells side by side, each in a process of its own; whatever ends a process, the others and the lines survive it.

A process gets one cell at a time through its pipe and answers through it: news, then the cell's line. It ends with its
parent, whatever ended that. (concurrent.futures hands cells to processes before they are free, and one process that is
killed breaks its pool.)
"""

import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import get_context, parent_process
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from robust_attention.training.fit import Interrupted

_PATIENCE = 60.0
"""Seconds that a process has to save itself before it is killed."""

Line = dict[str, Any]
Do = Callable[[Any, Callable[[Any], None]], Line]
"""(cell, tell) -> its line; must be a function of a module, or a partial of one."""


def side_by_side(
    cells: Sequence[Any],
    do: Do,
    jobs: int,
    *,
    tell: Callable[[Any], None],
    keep: Callable[[Any, Line], None],
    lost: Callable[[Any, str], Line],
) -> None:
    """Do every cell, `jobs` at once.

    Args:
        keep: takes each line as it comes.
        lost: the line of a cell whose process has died, and of what.
    An exception, an interrupt among them, ends all processes with SIGTERM, so that training saves itself.
    """
    todo = deque(cells)
    workers = [_Worker(do) for _ in range(min(jobs, len(todo)))]
    try:
        while todo or any(worker.cell is not None for worker in workers):
            for worker in workers:
                if worker.cell is None and todo:
                    worker.give(todo.popleft())
            wait([worker.pipe for worker in workers if worker.cell is not None])
            for place, worker in enumerate(workers):
                cell = worker.cell
                if cell is None or not worker.pipe.poll():
                    continue
                try:
                    kind, what = worker.pipe.recv()
                except (EOFError, OSError):
                    worker.process.join()
                    keep(cell, lost(cell, f"its process ended with exit code {worker.process.exitcode}"))
                    workers[place] = _Worker(do)
                    continue
                if kind == "news":
                    tell(what)
                else:
                    worker.cell = None
                    keep(cell, what)
        for worker in workers:
            worker.pipe.close()  # the end of its work
    except BaseException:
        for worker in workers:
            worker.process.terminate()
        raise
    finally:
        for worker in workers:
            worker.process.join(_PATIENCE)
            if worker.process.is_alive():
                worker.process.kill()
                worker.process.join()


@contextmanager
def stoppable() -> Iterator[None]:
    """SIGTERM stops a grid as Ctrl-C does, instead of leaving processes behind."""

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield  # nobody to tell
        return
    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class _Worker:
    """A process, and the cell that it works on."""

    def __init__(self, do: Do) -> None:
        context = get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, do), daemon=True)
        self.process.start()
        theirs.close()
        self.cell: Any = None

    def give(self, cell: Any) -> None:
        self.cell = cell
        self.pipe.send(cell)


def _serve(pipe: "Connection[Any, Any]", do: Do) -> None:
    """One cell after the other, until the parent has no more, or is no more."""
    # Ctrl-C reaches every process of a terminal; the parent decides, and sends SIGTERM.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    # Cells side by side use the cores better than threads inside one.
    torch.set_num_threads(1)
    while True:
        try:
            cell = pipe.recv()
        except EOFError:
            return
        try:
            line = do(cell, lambda news: pipe.send(("news", news)))
        except Interrupted:
            return  # saved; no further cell
        pipe.send(("line", line))


def _end_with_parent() -> None:
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
