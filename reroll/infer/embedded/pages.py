"""Which pages hold what: a counted pool, so that equal contexts share their pages and nothing is copied to be kept."""

from __future__ import annotations

from collections.abc import Sequence


class PagePool:
    """Pages by number, each free or used by a number of holders. Page 0 is never given out: padding writes there."""

    def __init__(self) -> None:
        self._uses = [1]
        self._free: list[int] = []

    @property
    def num_pages(self) -> int:
        return len(self._uses)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def grow(self, num_pages: int) -> None:
        """Have this many pages in all."""
        old = self.num_pages
        self._uses += [0] * (num_pages - old)
        self._free += reversed(range(old, num_pages))  # The lowest are given out first.

    def take(self) -> int:
        """A free page, used once from now on. There must be one."""
        page = self._free.pop()
        self._uses[page] = 1
        return page

    def share(self, pages: Sequence[int]) -> None:
        """Each of these has one more holder."""
        for page in pages:
            self._uses[page] += 1

    def give_back(self, pages: Sequence[int]) -> None:
        """Each of these has one holder less; those without any are free."""
        for page in pages:
            self._uses[page] -= 1
            if not self._uses[page]:
                self._free.append(page)


class SavedPages:
    """Pages that are kept for a context that left its slot. They are given back when nobody holds this any more."""

    __slots__ = ("_pool", "pages")

    def __init__(self, pool: PagePool, pages: Sequence[int]) -> None:
        self._pool = pool
        self.pages = tuple(pages)
        pool.share(self.pages)

    def __del__(self) -> None:
        self._pool.give_back(self.pages)
