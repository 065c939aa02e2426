"""One answer's place in its grammar: which tokens may come next, also behind drafts that are not accepted yet."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from deepinfer.errors import InternalError, RequestError

if TYPE_CHECKING:
    from llguidance import LLMatcher

Mask = NDArray[np.uint32]
_ALL = np.uint32(0xFFFFFFFF)
_BITS = 32
OUT_OF_BUDGET = ("limit", "max is", "fuel", "too big", "Too many")  # how the library says so


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


def _too_complex(message: str) -> RequestError:
    return RequestError("the form needs more states than its limits allow", where="structured_outputs",
                        found=" ".join(message.split())[:200], next_step="simplify the schema, pattern or grammar")


def restricted(logits: NDArray[np.floating[Any]], row: Mask) -> NDArray[np.floating[Any]]:
    """Logits [V] with -inf at the tokens that a row does not allow."""
    out = logits.copy()
    out[~allowed_tokens(row, len(logits))] = -np.inf
    return out


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
        self._failure: RequestError | None = None  # the budgets were used up: the next mask raises it
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
        stopped = self._ended or (self._failure is None and bool(self._matcher.is_stopped()))
        return self._first is not None and stopped

    def mask(self, drafts: Sequence[int] = ()) -> Mask | None:
        """Which tokens may come next, and which behind each draft.

        Args:
            drafts: ids that may become the next tokens.

        Returns:
            [1 + drafts, ceil(V / 32)] u32: row j has the bits of the tokens that may follow ``drafts[:j]``. Rows that
            are not constrained, and rows behind a draft that does not fit (it is rejected, so that nothing is chosen
            there), have all bits. The array is written again by the next call. None: no row is constrained.

        Raises:
            RequestError: the grammar needs more states here than its limits allow.
        """
        if not self.active and self._start_after.isdisjoint(drafts):
            return None
        rows = len(drafts) + 1
        if len(self._rows) < rows:
            self._rows = np.empty((rows, mask_words(self.vocabulary)), np.uint32)
        out = self._rows[:rows]
        out[:] = _ALL
        # a copy looks ahead: drafts that run out of the budgets must not end an answer that never takes them
        ahead = self._matcher.deep_copy() if drafts else self._matcher
        started = self.active
        for place, draft in enumerate((*drafts, None)):
            if started and (error := self._fill_row(ahead, out[place])) is not None:
                if place == 0:
                    raise error
                out[place:] = 0  # whoever gets here has no token to choose
                break
            if draft is None or not allows(out[place], draft):
                break
            if not started:
                started = draft in self._start_after
            elif draft in self._ends:
                break
            else:
                ahead.consume_token(draft)
        return out

    def accept(self, ids: Iterable[int]) -> None:
        """The answer goes on with ``ids``.

        Raises:
            InternalError: one of them does not fit: whoever chose it ignored the mask.
        """
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
        self._ended = False
        del self.tokens[keep:]
        if self._start_after and self._first is not None and keep < self._first:
            self._first = None

    def copy(self) -> Constraint:
        """The constraint of another answer that goes on from here."""
        other = Constraint.__new__(Constraint)
        other.__dict__.update(self.__dict__)
        other._matcher = self._matcher.deep_copy()
        other.tokens, other._rows = list(self.tokens), self._rows[:0]
        return other

    def require_equal(self, count: int, newest: Sequence[int]) -> None:
        """InternalError unless the tokens are ``count`` ids of which ``newest`` are the last: the emitted ones."""
        if len(self.tokens) != count or self.tokens[count - len(newest):] != list(newest):
            raise InternalError(f"the grammar saw {len(self.tokens)} tokens, the answer has {count}")

    def _consume(self, token: int) -> None:
        if self._failure is None and not self._matcher.consume_token(token):
            message = " ".join(self._matcher.get_error().split())
            if not any(word in message for word in OUT_OF_BUDGET):
                raise InternalError(f"token {token} does not fit the grammar: {message}")
            self._failure = _too_complex(message)

    def _fill_row(self, matcher: LLMatcher, row: Mask) -> RequestError | None:
        """Write the mask of a matcher's next token; the error when its budgets are used up."""
        if self._failure is not None:
            return self._failure
        if not matcher.is_error():
            matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        if not matcher.is_error():
            return None
        error = _too_complex(matcher.get_error())
        if matcher is self._matcher:
            self._failure = error
        return error
