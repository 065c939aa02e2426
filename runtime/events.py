"""Log lines that people read and programs parse: `event key=value key=value`."""

from __future__ import annotations

import json
import logging

_LOGGER = logging.getLogger("deepinfer")


def line(event: str, **values: object) -> str:
    """``event key=value ...``; a text with blanks or quotes is written as JSON writes it."""
    return " ".join([event, *(f"{key}={_shown(value)}" for key, value in values.items())])


def info(event: str, **values: object) -> None:
    """Log an event of ordinary life."""
    if _LOGGER.isEnabledFor(logging.INFO):
        _LOGGER.info(line(event, **values), extra={"values": {"event": event, **values}})


def warn(event: str, **values: object) -> None:
    """Log an event that a person should look at."""
    _LOGGER.warning(line(event, **values), extra={"values": {"event": event, **values}})


def _shown(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    text = str(value)
    return text if text and not set(text) & set(" \t\n\"'=") else json.dumps(text, ensure_ascii=False)
