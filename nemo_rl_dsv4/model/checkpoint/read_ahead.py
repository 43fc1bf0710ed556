"""Read the next items in a thread while the caller works on this one."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def read_ahead(
    items: Iterable[Item], read: Callable[[Item], Result], *, depth: int = 1, threads: int = 1
) -> Iterator[tuple[Item, Result]]:
    """Yield (item, read(item)) in order, up to `depth` items read before they are asked for.

    Memory is that of `depth` + 1 results. An error of `read` is raised where its item's turn comes.
    """
    with ThreadPoolExecutor(threads, thread_name_prefix="read-ahead") as pool:
        waiting: deque[tuple[Item, Future[Result]]] = deque()
        try:
            for item in items:
                waiting.append((item, pool.submit(read, item)))
                if len(waiting) > depth:
                    done, future = waiting.popleft()
                    yield done, future.result()
                    del future
            while waiting:
                done, future = waiting.popleft()
                yield done, future.result()
                del future
        finally:
            for _, future in waiting:
                future.cancel()
