"""Which pages are free and how many owners the others have; no tensor, no byte of a row."""

from __future__ import annotations

from collections.abc import Iterable

from mla_convert.errors import EnvironmentFault, InputRefused


class OutOfPages(EnvironmentFault):
    """More pages are asked for than are free; nothing was allocated."""


class PagePool:
    """Free list and reference counts of a pool of pages.

    A page that several sequences share has as many references; it goes back to the free list with the last.
    """

    def __init__(self, pages: int) -> None:
        if pages < 0:
            raise InputRefused("a pool of a negative number of pages", expected=">= 0", found=str(pages))
        self._references = [0] * pages
        self._free = list(range(pages - 1, -1, -1))

    @property
    def pages(self) -> int:
        """All pages, free or not."""
        return len(self._references)

    @property
    def free(self) -> int:
        """Pages that nobody holds."""
        return len(self._free)

    def references(self, page: int) -> int:
        """Owners of a page; 0 for a free one."""
        return self._references[self._known(page)]

    def allocate(self, count: int) -> list[int]:
        """Take `count` free pages, each with one reference; all or none.

        Raises:
            OutOfPages: Fewer are free.
        """
        if count > len(self._free):
            raise OutOfPages(
                "the pool has no free page left",
                expected=f"{count} free pages",
                found=f"{len(self._free)} of {len(self._references)}",
                remedy="Free a sequence, or extend the cache.",
            )
        taken = [self._free.pop() for _ in range(count)]
        for page in taken:
            self._references[page] = 1
        return taken

    def share(self, pages: Iterable[int]) -> None:
        """Add a reference to each page.

        Raises:
            InputRefused: One is free; no count has changed.
        """
        listed = list(pages)
        self._require_held(listed, "shared")
        for page in listed:
            self._references[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Drop a reference of each page; one without references is free.

        Raises:
            InputRefused: One is free already (a double free); no count has changed.
        """
        listed = list(pages)
        self._require_held(listed, "freed again")
        # Backwards, so that giving back what was just allocated restores the free list.
        for page in reversed(listed):
            self._references[page] -= 1
            if self._references[page] == 0:
                self._free.append(page)

    def extend(self, pages: int) -> None:
        """Add `pages` free pages behind the last."""
        first = len(self._references)
        self._references.extend([0] * pages)
        # Older pages first: a long table stays a run.
        self._free = list(range(first + pages - 1, first - 1, -1)) + self._free

    def _known(self, page: int) -> int:
        if not 0 <= page < len(self._references):
            raise InputRefused("no page of this pool", expected=f"0 to {len(self._references) - 1}", found=str(page))
        return page

    def _require_held(self, pages: list[int], verb: str) -> None:
        asked: dict[int, int] = {}
        for page in pages:
            asked[page] = asked.get(page, 0) + 1
        for page, times in asked.items():
            held = self.references(page)
            if held == 0 or (verb == "freed again" and times > held):
                raise InputRefused(f"a page that nobody holds is {verb}", found=f"page {page}", where="page pool")
