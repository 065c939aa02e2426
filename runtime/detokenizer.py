"""Ids to text while they arrive: whole characters only, and stop texts found wherever they begin and end."""

from __future__ import annotations

from collections.abc import Callable, Sequence

_UNFINISHED = "�"
_LOOK_BACK = 8  # ids decoded again in front of new ones, so that what a decoder does at a text's start does not repeat

Decode = Callable[[Sequence[int]], str]


class TextStream:
    """The text of one answer, extended id by id.

    ``decode`` turns ids into text. It is given the last few ids with and without the new one, and the difference is
    what the new one adds; while the text ends in an unfinished character nothing is added.
    """

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._ids: list[int] = []
        self._from = 0  # first id that is decoded again
        self._read = 0  # ids before it are in the text

    def push(self, token_id: int) -> str:
        """The text that ``token_id`` completes."""
        self._ids.append(token_id)
        return self._advance(final=False)

    def finish(self) -> str:
        """What is left of an unfinished character."""
        return self._advance(final=True)

    def _advance(self, final: bool) -> str:
        before = self._decode(self._ids[self._from:self._read])
        after = self._decode(self._ids[self._from:])
        if len(after) <= len(before) or (after.endswith(_UNFINISHED) and not final):
            return ""
        self._read = len(self._ids)
        self._from = max(self._from, self._read - _LOOK_BACK)
        return after[len(before):]


class StopTexts:
    """Finds the first stop text in a growing text. Text that may still become one is held back."""

    def __init__(self, stops: Sequence[str], include: bool) -> None:
        self.stops, self.include = stops, include
        self.text = ""
        self.shown = 0  # characters that cannot belong to a stop text any more

    def push(self, piece: str, active: bool = True) -> str | None:
        """Append ``piece``; the stop text found, after which ``text`` is final. ``active``: whether stops count yet."""
        first_new = len(self.text)
        self.text += piece
        if active and piece:
            found = self._first(first_new)
            if found is not None:
                at, stop = found
                self.text = self.text[: at + len(stop) if self.include else at]
                self.shown = len(self.text)
                return stop
        self.shown = max(self.shown, len(self.text) - self._held_back())
        return None

    def finish(self) -> None:
        """Nothing more comes: all of the text is shown."""
        self.shown = len(self.text)

    def _first(self, first_new: int) -> tuple[int, str] | None:
        hits = [(self.text.find(s, max(0, first_new - len(s) + 1)), s) for s in self.stops]
        return min(((at, s) for at, s in hits if at >= 0), default=None)

    def _held_back(self) -> int:
        """Characters at the end that are the beginning of a stop text."""
        longest = max((len(s) for s in self.stops), default=1) - 1
        for size in range(min(longest, len(self.text)), 0, -1):
            tail = self.text[-size:]
            if any(s.startswith(tail) for s in self.stops if len(s) > size):
                return size
        return 0
