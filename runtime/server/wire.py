"""What the front end and the engine process say to each other: typed messages in msgpack: ids, numbers, the text of
a form.

Each side knows the exact form of what it may receive; bytes of any other form raise `InternalError`. Nothing that
arrives is ever executed or imported.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from deepinfer.errors import InternalError
from deepinfer.runtime.outputs import Debug

Sampling: TypeAlias = dict[str, Any]
"""Keyword arguments of SamplingParams: numbers, flags, lists and maps of them; the text of `structured_outputs`."""


class TokenLogprob(msgspec.Struct, array_like=True, frozen=True):
    """A token's log-probability and those of the most probable ones, (id, value)."""

    value: float
    top: list[tuple[int, float]]


class Submit(msgspec.Struct, array_like=True, tag="submit", frozen=True):
    """A request: ``prompt`` holds the ids as little-endian int32. ``priority``: smaller goes first. ``debug``: updates
    say how the answer came about."""

    id: int
    prompt: bytes
    sampling: Sampling
    priority: int = 0
    debug: bool = False


class Abort(msgspec.Struct, array_like=True, tag="abort", frozen=True):
    """Nobody waits for this request any more."""

    id: int


class Left(msgspec.Struct, array_like=True, tag="left", frozen=True):
    """A front end has ended: nobody waits for its requests any more."""

    front_end: int


class Stop(msgspec.Struct, array_like=True, tag="stop", frozen=True):
    """The process should give its memory back and end."""


class Hello(msgspec.Struct, array_like=True, tag="hello", frozen=True):
    """The engine can serve. ``checkpoint``: the folder whose tokenizer belongs to it; ``seconds``: to get here;
    ``digest``: of the engine folder, "" where there is none."""

    model: str
    target: str
    max_model_len: int
    vocab_size: int
    slots: int
    blocks: int
    block_tokens: int
    checkpoint: str | None
    fingerprint: str
    seconds: float
    digest: str = ""


class Failed(msgspec.Struct, array_like=True, tag="failed", frozen=True):
    """The engine cannot start or go on; ``exit_code`` as in docs/errors.md."""

    sentence: str
    exit_code: int


class Times(msgspec.Struct, array_like=True, frozen=True):
    """Seconds of a finished request, all of the engine's clock; None: it did not get there."""

    queue: float | None
    prefill: float | None
    decode: float | None


class Update(msgspec.Struct, array_like=True, frozen=True):
    """What a step brought one answer of a request.

    ``tokens``: new ids, without the end token. ``finish``: stop, length, deadline, abort, error, or refused (the engine
    cannot serve it and never began). ``prompt_logprobs``: with the first tokens, one entry a prompt token, None for the
    first. ``index``: which answer; ``last``: the request has no further news. ``cached``: prompt tokens that the prefix
    cache had; packed ones do not say it again.
    """

    id: int
    tokens: list[int]
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None
    finish: str | None = None
    error: str | None = None
    times: Times | None = None
    index: int = 0
    last: bool = False
    cached: int = 0
    debug: Debug | None = None


class Step(msgspec.Struct, array_like=True, tag="step", frozen=True):
    """The news of one step.

    ``keys``, ``counts``, ``tokens``: of requests that got tokens and nothing else, packed: their ids as int64, how many
    tokens each and the tokens, one request after the other, as int32.
    """

    updates: list[Update]
    keys: bytes = b""
    counts: bytes = b""
    tokens: bytes = b""

    def all(self) -> list[Update]:
        """The packed ones too."""
        out, tokens, first = self.updates, unpack_ids(self.tokens).tolist(), 0
        for key, count in zip(np.frombuffer(self.keys, "<i8").tolist(), unpack_ids(self.counts).tolist(), strict=True):
            out.append(Update(key, tokens[first : first + count]))
            first += count
        return out


class Metric(msgspec.Struct, array_like=True, frozen=True):
    """One metric by value: ``kind`` counter, gauge or histogram.

    ``values``: by label value ("" without a label); commas part the values of several labels. ``counts``: of a
    histogram's buckets, each apart.
    """

    kind: str
    name: str
    help: str
    label: str = ""
    values: dict[str, float] = {}
    bounds: list[float] = []
    counts: list[int] = []
    total: float = 0.0


class Snapshot(msgspec.Struct, array_like=True, tag="snapshot", frozen=True):
    """The engine's metrics. ``free_blocks``: of the cache, with those that only the prefix cache holds."""

    metrics: list[Metric]
    running: int
    waiting: int
    free_blocks: int


ToEngine: TypeAlias = Submit | Abort | Left | Stop
FromEngine: TypeAlias = Hello | Failed | Step | Snapshot

_Key = TypeVar("_Key", int, NDArray[np.int64])
_KEY_BITS = 40  # of an id; the front end's number stands above them

_encoder = msgspec.msgpack.Encoder()
_to_engine: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)
_from_engine: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)


def first_key(front_end: int) -> int:
    """The first id of a request of a front end; the others count on from there."""
    return (front_end << _KEY_BITS) + 1


def front_end_of(key: _Key) -> _Key:
    """Whose request an id is, or each of several."""
    return key >> _KEY_BITS


def encode(message: ToEngine | FromEngine) -> bytes:
    """A message as msgpack."""
    return _encoder.encode(message)


def decode_to_engine(data: bytes) -> ToEngine:
    """A message of the front end."""
    try:
        return _to_engine.decode(data)
    except msgspec.MsgspecError as error:
        raise InternalError(f"the front end sent no valid message: {error}") from None


def decode_from_engine(data: bytes) -> FromEngine:
    """A message of the engine process."""
    try:
        return _from_engine.decode(data)
    except msgspec.MsgspecError as error:
        raise InternalError(f"the engine sent no valid message: {error}") from None


def pack_ids(ids: Sequence[int] | NDArray[np.int64]) -> bytes:
    """Ids as little-endian int32."""
    return np.asarray(ids, dtype="<i4").tobytes()


def unpack_ids(data: bytes) -> NDArray[np.int32]:
    """The ids of `pack_ids`, a view."""
    return np.frombuffer(data, dtype="<i4")
