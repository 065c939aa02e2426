"""What front ends say to each other: typed messages in msgpack, each behind a frame that tells whose it is.

The first front end owns the engine process and the others. Between it and another one `ENGINE` frames hold messages of
`wire`, which pass through unread, and `OWN` frames those below.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeAlias

import msgspec

from deepinfer.errors import InternalError
from deepinfer.runtime.server.link import State
from deepinfer.runtime.server.service import ServerSettings
from deepinfer.runtime.server.wire import Times

ENGINE, OWN = b"engine", b"own"


class Standing(msgspec.Struct, array_like=True, tag="standing", frozen=True):
    """The engine is in this state."""

    state: State
    reason: str
    restarts: int


class Drain(msgspec.Struct, array_like=True, tag="drain", frozen=True):
    """Take no new requests."""


class GiveUp(msgspec.Struct, array_like=True, tag="give_up", frozen=True):
    """End every answer that runs."""

    reason: str


class Leave(msgspec.Struct, array_like=True, tag="leave", frozen=True):
    """End in order."""


class MetricsText(msgspec.Struct, array_like=True, tag="metrics_text", frozen=True):
    """The answer to `AskMetrics`."""

    key: int
    text: bytes


class Joined(msgspec.Struct, array_like=True, tag="joined", frozen=True):
    """A front end listens to the first one; what was said to it before is lost."""


class AskMetrics(msgspec.Struct, array_like=True, tag="ask_metrics", frozen=True):
    """What does `/metrics` show?"""

    key: int


class Counted(msgspec.Struct, array_like=True, tag="counted", frozen=True):
    """Something to count: ``what`` is the name of a method of `ServerMetrics`, the others its arguments."""

    what: str
    label: str
    status: int = 0


class Finished(msgspec.Struct, array_like=True, tag="finished", frozen=True):
    """A request that the engine finished; see `ServerMetrics.finished`."""

    prompt_tokens: int
    tokens: int
    times: Times | None


ToFirst: TypeAlias = Joined | AskMetrics | Counted | Finished
FromFirst: TypeAlias = Standing | Drain | GiveUp | Leave | MetricsText


class FrontEndSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How to start a further front end.

    ``socket``: fd of the listening socket. ``board``: fd of the board. ``endpoint``: where the first one listens.
    """

    number: int
    front_ends: int
    socket: int
    board: int
    endpoint: str
    server: ServerSettings
    log_json: bool
    log_level: str


_encoder = msgspec.msgpack.Encoder()
_to_first: msgspec.msgpack.Decoder[ToFirst] = msgspec.msgpack.Decoder(ToFirst)
_from_first: msgspec.msgpack.Decoder[FromFirst] = msgspec.msgpack.Decoder(FromFirst)


def encode(message: ToFirst | FromFirst) -> bytes:
    """A message as msgpack."""
    return _encoder.encode(message)


def decode_to_first(data: bytes) -> ToFirst:
    """A message of a further front end."""
    try:
        return _to_first.decode(data)
    except msgspec.MsgspecError as error:
        raise InternalError(f"a front end sent no valid message: {error}") from None


def decode_from_first(data: bytes) -> FromFirst:
    """A message of the first front end."""
    try:
        return _from_first.decode(data)
    except msgspec.MsgspecError as error:
        raise InternalError(f"the first front end sent no valid message: {error}") from None


def encode_settings(settings: FrontEndSettings) -> bytes:
    """One line of JSON."""
    return msgspec.json.encode(settings, enc_hook=str) + b"\n"


def decode_settings(line: bytes) -> FrontEndSettings:
    """The settings of `encode_settings`."""
    return msgspec.json.decode(line, type=FrontEndSettings, dec_hook=_path)


def _path(kind: type, value: Any) -> Any:
    return Path(value) if issubclass(kind, Path) else value
