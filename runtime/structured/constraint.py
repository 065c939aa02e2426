"""One answer's place in its grammar: which tokens may come next, also behind drafts that are not accepted yet."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from deepinfer.errors import InternalError, RequestError

if TYPE_CHECKING:
    from llguidance import LLMatcher

Mask = NDArray[np.uint32]
_ALL = np.uint32(0xFFFFFFFF)
_BITS = 32
_NOT_ALLOWED = ("doesn't satisfy the grammar", "parser stopped", "out of range")  # the library of a wrong token


def mask_words(vocabulary: int) -> int:
    """u32 words of one row's mask: bit i % 32 of word i // 32 stands for token i."""
    return -(-vocabulary // _BITS)


def allows(row: Mask, token: int) -> bool:
    """Whether the bit of a token is set in a row [ceil(V / 32)]."""
    return bool(row[token // _BITS] >> np.uint32(token % _BITS) & np.uint32(1))


def allowed_tokens(row: Mask, vocabulary: int) -> NDArray[np.bool_]:
    """[V]: a row's bits one by one."""
    bits: NDArray[np.bool_] = np.unpackbits(row.view(np.uint8), bitorder="little")[:vocabulary].astype(bool)
    return bits


class Constraint:
    """The state after the tokens so far. `tokens` holds every accepted id, also those before the form begins.

    Args:
        matcher: at the start of the grammar; it becomes this object's own.
        vocabulary: V. ``ends``: ids that end an answer. ``start_after``: ids behind which the form begins.
    """

    def __init__(self, matcher: LLMatcher, vocabulary: int, ends: Iterable[int],
                 start_after: Iterable[int] = ()) -> None:
        self._matcher = matcher
        self._ends, self._start_after = frozenset(ends), frozenset(start_after)
        self.vocabulary = vocabulary
        self.tokens: list[int] = []
        self._first = None if self._start_after else 0  # place in `tokens` where the form begins
        self._ended = False
        self._next: Mask | None = None  # the mask of the next token, once it is known
        self._rows: Mask = np.zeros((0, mask_words(vocabulary)), np.uint32)

    @property
    def active(self) -> bool:
        """Whether the next token has to fit the form."""
        return self._first is not None and not self._ended

    @property
    def complete(self) -> bool:
        """Whether the answer may end here."""
        return self._first is not None and (self._ended or bool(self._matcher.is_accepting()))

    @property
    def over(self) -> bool:
        """Whether nothing but the end can follow."""
        return self._first is not None and (self._ended or bool(self._matcher.is_stopped()))

    def mask(self, drafts: Sequence[int] = ()) -> Mask | None:
        """Which tokens may come next, and which behind each draft.

        Args:
            drafts: ids that may become the next tokens.

        Returns:
            [1 + drafts, ceil(V / 32)] u32: row j has the bits of the tokens that may follow ``drafts[:j]``. Rows that
            are not constrained, and rows behind a draft that does not fit (it is rejected, so that nothing is chosen
            there), have all bits; a row at which the grammar runs out of its budgets has none. The array is written
            again by the next call. None: no row is constrained.
        """
        if not self.active and self._start_after.isdisjoint(drafts):
            return None
        rows = len(drafts) + 1
        if len(self._rows) < rows:
            self._rows = np.empty((rows, mask_words(self.vocabulary)), np.uint32)
        out = self._rows[:rows]
        out[:] = _ALL
        if self.active:
            out[0] = self._first_row()
        # a copy looks ahead: drafts that run out of the budgets must not end an answer that never takes them
        ahead = self._matcher.deep_copy() if drafts else self._matcher
        started = self.active
        for place, draft in enumerate(drafts):
            if not allows(out[place], draft) or (started and draft in self._ends):
                break
            if started:
                ahead.consume_token(draft)
            started = started or draft in self._start_after
            if started and _fill(ahead, out[place + 1]) is not None:
                out[place + 1:] = 0
                break
        return out

    def accept(self, ids: Iterable[int]) -> None:
        """The answer goes on with ``ids``.

        Raises:
            InternalError: one of them does not fit: whoever chose it ignored the mask.
            RequestError: behind them the grammar needs more states than its budgets allow; the answer cannot go on.
        """
        self._next = None
        for token in ids:
            if self._first is None:
                self.tokens.append(token)
                if token in self._start_after:
                    self._first = len(self.tokens)
            elif token in self._ends:
                if not self.complete:
                    raise InternalError(f"token {token} ends an answer that is not complete")
                self.tokens.append(token)
                self._ended = True
            else:
                if self._ended:
                    raise InternalError(f"token {token} follows the end of its answer")
                self._consume(token)
                self.tokens.append(token)
        if self.active and not self.over and self._fill_next() is not None:
            raise _too_complex(self._matcher)

    def rollback(self, count: int) -> None:
        """Take the last ``count`` tokens back."""
        if not 0 <= count <= len(self.tokens):
            raise InternalError(f"{count} tokens back of {len(self.tokens)}")
        if not count:
            return
        keep = len(self.tokens) - count
        matched = 0 if self._first is None else len(self.tokens) - max(self._first, keep) - self._ended
        if matched > 0 and not self._matcher.rollback(matched):
            raise InternalError(f"the matcher cannot go back: {self._matcher.get_error()}")
        self._ended, self._next = False, None
        del self.tokens[keep:]
        if self._start_after and self._first is not None and keep < self._first:
            self._first = None

    def copy(self) -> Constraint:
        """The constraint of another answer that goes on from here."""
        other = Constraint.__new__(Constraint)
        other.__dict__.update(self.__dict__)
        other._matcher = self._matcher.deep_copy()
        other.tokens, other._rows, other._next = list(self.tokens), self._rows[:0], None
        return other

    def require_equal(self, count: int, newest: Sequence[int]) -> None:
        """InternalError unless the tokens are ``count`` ids of which ``newest`` are the last: the emitted ones."""
        if len(self.tokens) != count or self.tokens[count - len(newest):] != list(newest):
            raise InternalError(f"the grammar saw {len(self.tokens)} tokens, the answer has {count}")

    def _consume(self, token: int) -> None:
        if not self._matcher.consume_token(token):
            message = _told(self._matcher)
            if any(words in message for words in _NOT_ALLOWED):
                raise InternalError(f"token {token} does not fit the grammar: {message}")
            raise _too_complex(self._matcher)

    def _first_row(self) -> Mask:
        if self._next is None:
            self._fill_next()
        assert self._next is not None
        return self._next

    def _fill_next(self) -> str | None:
        self._next = np.zeros(mask_words(self.vocabulary), np.uint32)
        return _fill(self._matcher, self._next)


def _fill(matcher: LLMatcher, row: Mask) -> str | None:
    """Write the mask of a matcher's next token; what the library says when its budgets are used up, and no bit then."""
    if not matcher.is_error():
        matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
    if not matcher.is_error():
        return None
    row[:] = 0
    return _told(matcher)


def _told(matcher: LLMatcher) -> str:
    return " ".join(matcher.get_error().split())


def _too_complex(matcher: LLMatcher) -> RequestError:
    return RequestError("the form needs more states than its limits allow", where="structured_outputs",
                        found=_told(matcher)[:200], next_step="simplify the schema, pattern or grammar")
