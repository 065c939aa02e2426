"""Output text that is not classified yet, and the patterns that are looked for in it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import cached_property

from deepinfer.recipe.dialect import DSML, THINK_END


class Marker(Enum):
    """Control tokens that steer parsing; the value is the spelling."""

    THINK_END = THINK_END
    DSML = DSML


class Window:
    """A growing text with a cursor.

    Args:
        by_id: markers exist only where `append_marker` put them; otherwise their spelling counts.
    """

    def __init__(self, *, by_id: bool) -> None:
        self.by_id = by_id
        self.text = ""
        self.start = 0
        # where the line feeds at the end begin, kept up to date so that a long run of them stays cheap
        self._newlines_from = 0
        self._dropped = 0
        self._marks: dict[Marker, set[int]] = {marker: set() for marker in Marker}

    def append(self, text: str) -> None:
        if self.start:
            self._dropped += self.start
            self._newlines_from = max(0, self._newlines_from - self.start)
            self.text = self.text[self.start :]
            self.start = 0
        stripped = len(text.rstrip("\n"))
        if stripped:
            self._newlines_from = len(self.text) + stripped
        self.text += text

    def append_marker(self, marker: Marker) -> None:
        """A control token that arrived as an id."""
        self._marks[marker].add(self._dropped + len(self.text))
        self.append(marker.value)

    @property
    def offset(self) -> int:
        """Place of the cursor from the start of the stream, in code points."""
        return self._dropped + self.start

    @property
    def left(self) -> int:
        return len(self.text) - self.start

    def take(self, end: int) -> str:
        """The text from the cursor to `end`; the cursor moves there."""
        taken = self.text[self.start : end]
        self.start = end
        return taken

    def before_newlines(self, at: int) -> int:
        """Where the line feeds that end at `at` begin, not before the cursor."""
        if at == len(self.text):
            return max(self.start, self._newlines_from)
        return self.start + len(self.text[self.start : at].rstrip("\n"))

    def is_marker(self, marker: Marker, place: int) -> bool:
        """Whether the spelling at `place` of `text` counts as the control token."""
        return not self.by_id or self._dropped + place in self._marks[marker]


@dataclass(frozen=True)
class Pattern:
    """`before`, a marker, `after` in a row; with `newlines`, line feeds directly in front belong to it."""

    before: str
    marker: Marker | None = None
    after: str = ""
    newlines: bool = False

    @cached_property
    def spelling(self) -> str:
        return self.before + (self.marker.value if self.marker else "") + self.after

    @cached_property
    def _letters(self) -> frozenset[str]:
        return frozenset(self.spelling[:-1])

    @cached_property
    def _marker_end(self) -> int:
        return len(self.before) + (len(self.marker.value) if self.marker else 0)

    def find(self, window: Window, limit: int, start: int | None = None) -> tuple[int, int] | None:
        """(start, end) in `window.text` of the first occurrence that ends at or before `limit`."""
        text, spelling = window.text, self.spelling
        at = text.find(spelling, window.start if start is None else start, limit)
        while at >= 0 and self.marker and not window.is_marker(self.marker, at + len(self.before)):
            at = text.find(spelling, at + 1, limit)
        if at < 0:
            return None
        end = at + len(spelling)
        return self._with_newlines(window, at), end

    def held(self, window: Window) -> int:
        """How many characters at the end of the window may be the beginning of an occurrence."""
        text = window.text
        partial = 0
        if window.left and text[-1] in self._letters:
            for length in range(min(len(self.spelling) - 1, window.left), 0, -1):
                if text.endswith(self.spelling[:length]) and self._possible(window, length):
                    partial = length
                    break
        at = len(text) - partial
        return len(text) - self._with_newlines(window, at)

    def _possible(self, window: Window, length: int) -> bool:
        """Ids bring markers whole: a partly spelled one can never become one."""
        if not window.by_id or self.marker is None or length <= len(self.before):
            return True
        place = len(window.text) - length + len(self.before)
        return length >= self._marker_end and window.is_marker(self.marker, place)

    def _with_newlines(self, window: Window, at: int) -> int:
        return window.before_newlines(at) if self.newlines else at
