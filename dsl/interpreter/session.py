"""One sequence driven by token ids, for tests and tools: prompts in chunks, bounded replay, prefix hits, drafts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from deepinfer.dsl.graph import Node
from deepinfer.dsl.interpreter.context import Value
from deepinfer.dsl.interpreter.frame import Override, StepRows
from deepinfer.dsl.interpreter.run import Interpreter, Result, Watch
from deepinfer.dsl.model import Model
from deepinfer.dsl.types import KEPT
from deepinfer.errors import InternalError


class ReferenceSession:
    """A sequence of token ids and its state under an interpreter.

    Args:
        interpreter: of a program whose entry ``step`` publishes ``logits``.
        model: sizes that the session needs: window, draft block and its filler token.
        overrides: rows given from outside for the whole sequence, by name, at absolute positions.
    """

    def __init__(self, interpreter: Interpreter, model: Model, overrides: Mapping[str, Override] | None = None) -> None:
        self.interpreter = interpreter
        self.model = model
        self.overrides = dict(overrides or {})
        self.ids: list[int] = []
        self.state = interpreter.new_state()
        self.floor = 0
        self.watched: list[tuple[Node, Value]] = []
        self._resume = 0  # position of the first row of the next step; below len(ids) after a prefix hit

    def feed(self, ids: Sequence[int], *, keep: int | None = None, chunk: int | Sequence[int] | None = None,
             pins: Mapping[str, Tensor] | None = None, watch: Watch | None = None) -> Tensor:
        """Logits [rows, V] of the new ids, or of those among the last ``keep`` rows.

        ``chunk``: rows of each step (a number, or sizes that are cycled through); None: one step. ``pins``: selections
        by name for every row that runs, [rows, k]. ``watch``: nodes whose values are added to ``watched``.
        """
        self._need_kept_axis(keep)
        first_new, begin = len(self.ids), self._resume
        self.ids += ids
        out = []
        for a, b in _chunks(begin, len(self.ids), chunk):
            step = StepRows(self.ids[a:b], a, prompt_end=len(self.ids), keep=keep, write_floor=self.floor,
                            history=self.ids[:a], overrides=self.overrides)
            held = {k: v[a - begin: b - begin] for k, v in (pins or {}).items()}
            result = self.interpreter.step(self.state, step, held, watch)
            self.watched += result.watched
            replayed = max(0, min(first_new, b) - step.first_kept)
            out.append(result.outputs["logits"][replayed:])
        self._resume = len(self.ids)
        return torch.cat(out)

    def greedy(self, logits: Tensor, count: int) -> tuple[list[int], Tensor]:
        """``count`` tokens, the first from the last row of ``logits``, and the logits [count, V] that follow each."""
        tokens, rows = [], []
        row = logits[-1]
        for _ in range(count):
            tokens.append(int(row.argmax()))
            row = self.feed(tokens[-1:])[-1]
            rows.append(row)
        return tokens, torch.stack(rows)

    def draft(self, anchor: int, watch: Watch | None = None) -> Result:
        """The draft block after the rows fed so far, ``anchor`` being the token chosen for the next position."""
        block = [anchor] + [self.model.draft_filler] * (self.model.draft_tokens - 1)
        return self.interpreter.draft(self.state, block, len(self.ids), watch=watch)

    def adopt(self, tokens: int, replay: int | None = None) -> None:
        """A prefix hit: of the rows fed so far keep the paged entries of the first ``tokens`` positions and no more.

        The next ``feed`` runs the last ``replay`` of these positions again in front of its ids (None: one window),
        without writing their entries.
        """
        rows = self.model.window if replay is None else replay
        self.ids = self.ids[:tokens]
        self.state = self.state.only_entries(self.interpreter.states, tokens)
        self.floor, self._resume = tokens, max(0, tokens - rows)

    def fork(self) -> ReferenceSession:
        """An independent copy."""
        other = ReferenceSession(self.interpreter, self.model, self.overrides)
        other.ids, other.state, other.floor = list(self.ids), self.state.fork(), self.floor
        other._resume = self._resume
        return other

    def rewind(self, tokens: int) -> None:
        """Take back every row from position ``tokens`` on (a rejected draft). Later steps overwrite what they left."""
        if not self.floor <= tokens <= len(self.ids):
            raise InternalError(f"cannot go back to {tokens}: rows {self.floor}..{len(self.ids)} may be taken back")
        self.ids, self._resume = self.ids[:tokens], tokens

    def _need_kept_axis(self, keep: int | None) -> None:
        if keep is not None and not any(n.type.rows == KEPT for n in self.interpreter.graphs["step"].nodes):
            raise InternalError("this step graph has no kept rows; narrow it to replay a part of the prompt")


def _chunks(begin: int, end: int, chunk: int | Sequence[int] | None) -> Iterator[tuple[int, int]]:
    sizes = [end - begin] if chunk is None else [chunk] if isinstance(chunk, int) else list(chunk)
    turn = 0
    while begin < end:
        stop = min(end, begin + sizes[turn % len(sizes)])
        yield begin, stop
        begin, turn = stop, turn + 1
