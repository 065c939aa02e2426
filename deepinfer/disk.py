"""What the machine says about a path, as the user's mistake that it is: no room, or no such place.

For commands, which meet an OSError anywhere, and for the writers, which know better than the OSError which
folder is full: a write that fails names no file, and a copy that fails names its source.
"""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from deepinfer.errors import ArtifactError, DeepInferError, PlanError

_NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT})
_TOO_LARGE = errno.EFBIG
_NO_ACCESS = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})
_NO_PLACE = frozenset({errno.ENOENT, errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ENOTEMPTY, errno.ENAMETOOLONG,
                       errno.ELOOP})
_RAISE_LIMIT = "raise the limit (`ulimit -f`), or choose a folder on another file system"
_OURS = Path(__file__).resolve().parent.parent


def no_room(failure: OSError, where: object, next_step: str) -> PlanError | None:
    """The error for a full disk, an exhausted quota or a limit on file sizes; None for any other failure."""
    if failure.errno in _NO_SPACE:
        return PlanError("no space is left", where=where, found=failure.strerror, next_step=next_step)
    if failure.errno == _TOO_LARGE:
        return PlanError("a file would be larger than this process may write", where=where, found=failure.strerror,
                         next_step=_RAISE_LIMIT)
    return None


def of_the_machine(failure: OSError, next_step: str = "choose another path") -> DeepInferError | None:
    """The error for a path that the user has to change; None where it is ours or no path is named."""
    room = no_room(failure, failure.filename2 or failure.filename or "disk", "free space or choose another folder")
    if room is not None:
        return room
    if failure.errno in _NO_ACCESS:
        return ArtifactError("the path may not be used", where=failure.filename or "disk", found=failure.strerror,
                             next_step=next_step)
    if failure.errno in _NO_PLACE and isinstance(failure.filename, str | os.PathLike) and not _is_ours(failure):
        return ArtifactError("the path cannot be used", where=failure.filename, found=failure.strerror,
                             next_step=next_step)
    return None


@contextmanager
def room_in(folder: Path, next_step: str) -> Iterator[None]:
    """Inside, a full disk is a PlanError that names ``folder``."""
    try:
        yield
    except OSError as failure:
        room = no_room(failure, folder, next_step)
        if room is None:
            raise
        raise room from failure


def no_room_said(message: str, next_step: str) -> str | None:
    """What to do about a program's message (in the C locale) of a full disk, ``next_step``, or of a limit on file
    sizes; None for any other message."""
    if any(os.strerror(number) in message for number in _NO_SPACE):
        return next_step
    limit = (os.strerror(_TOO_LARGE), signal.strsignal(signal.SIGXFSZ) or "SIGXFSZ")
    return _RAISE_LIMIT if any(words in message for words in limit) else None


def _is_ours(failure: OSError) -> bool:
    """A file of this installation that is missing is no choice of the user's."""
    return Path(failure.filename).resolve().is_relative_to(_OURS / "deepinfer")
