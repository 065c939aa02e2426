"""The errors a user can meet, and the one that only a bug of ours can raise.

Two trees on purpose: everything under `DeepInferError` is something the caller can change (a
description, a plan, a toolchain, a file, a request); `InternalError` is not and says so.
`docs/errors.md` has an entry for each.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar


class DeepInferError(Exception):
    """A mistake the caller can correct; `str()` is one line that says where, what was found and what to do.

    Args:
        what: the sentence that states the problem.
        where: the place: a file with line, a tensor name, an option, a config key.
        found: the value that was there.
        allowed: the values that could have been there; a list is joined with commas.
        next_step: what to do about it, as an instruction.
    """

    exit_code: ClassVar[int] = 1

    def __init__(
        self,
        what: str,
        *,
        where: object | None = None,
        found: object | None = None,
        allowed: object | Iterable[object] | None = None,
        next_step: str | None = None,
    ) -> None:
        self.what = what
        self.where = where
        self.found = found
        self.allowed = allowed
        self.next_step = next_step
        super().__init__(self.sentence())

    def sentence(self) -> str:
        """The whole message on one line: `where: what; found F; allowed A; next step`."""
        parts = [self.what if self.where is None else f"{self.where}: {self.what}"]
        if self.found is not None:
            parts.append(f"found {_listed(self.found)}")
        if self.allowed is not None:
            parts.append(f"allowed {_listed(self.allowed)}")
        if self.next_step is not None:
            parts.append(self.next_step)
        return " ".join("; ".join(part.strip().rstrip(".;") for part in parts).split())


def _listed(value: object) -> str:
    """A value as it reads inside a sentence: a list without brackets, quotes where blanks would hide."""
    if isinstance(value, list | tuple | set | frozenset):
        items = sorted(value, key=str) if isinstance(value, set | frozenset) else value
        return ", ".join(str(item) for item in items) or "nothing"
    text = str(value)
    return text if text and text == text.strip() else repr(text)


class SpecError(DeepInferError):
    """The description of a model, its config or an option is wrong."""

    exit_code = 2


class PlanError(DeepInferError):
    """What was asked for cannot fit: memory, row counts, ranks, disk."""

    exit_code = 3


class ToolchainError(DeepInferError):
    """A compiler, driver or library of the target is missing or failed."""

    exit_code = 4


class ArtifactError(DeepInferError):
    """An engine folder or a checkpoint is stale, foreign, incomplete or damaged."""

    exit_code = 5


class RequestError(DeepInferError):
    """One request cannot be served as asked; other requests are not touched.

    `http_status` is the 4xx status a server answers with.
    """

    exit_code = 6

    def __init__(
        self,
        what: str,
        *,
        where: object | None = None,
        found: object | None = None,
        allowed: object | Iterable[object] | None = None,
        next_step: str | None = None,
        http_status: int = 400,
    ) -> None:
        if not 400 <= http_status <= 499:
            raise InternalError(f"a RequestError carries a 4xx status, not {http_status}")
        self.http_status = http_status
        super().__init__(what, where=where, found=found, allowed=allowed, next_step=next_step)


class InternalError(Exception):
    """A bug in DeepInfer-AOT: a stage broke its own contract. Never raised for a user's mistake."""

    exit_code: ClassVar[int] = 70
