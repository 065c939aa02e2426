"""A model's ``config.json`` behind a reader that knows what was read.

"Unknown key" and "unread key" are one check: a spec reads what it uses, names what it ignores and why, and
anything left over is an error, so that no setting of a checkpoint is dropped in silence.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deepinfer.errors import SpecError

_MISSING = object()


class Config:
    """Read-only view of a (nested) config; attribute access reads a required key.

    ``where`` names the place in errors (``config.json: text_config``).
    """

    def __init__(self, data: Mapping[str, Any], where: str = "config.json") -> None:
        self._data = dict(data)
        self._where = where
        self._read: set[str] = set()
        self._ignored: dict[str, str] = {}
        self._children: list[Config] = []

    @staticmethod
    def load(path: str | Path) -> Config:
        p = Path(path)
        file = p / "config.json" if p.is_dir() else p
        try:
            data = json.loads(file.read_text())
        except FileNotFoundError:
            raise SpecError("there is no config.json", where=str(file),
                            next_step="give the folder of a checkpoint") from None
        except (json.JSONDecodeError, UnicodeDecodeError) as e:
            raise SpecError(f"config.json is not JSON ({e})", where=str(file)) from None
        if not isinstance(data, dict):
            raise SpecError("config.json does not hold an object", where=str(file), found=type(data).__name__)
        return Config(data)

    def __getattr__(self, key: str) -> Any:
        if key.startswith("_"):
            raise AttributeError(key)
        return self.get(key)

    def __contains__(self, key: str) -> bool:
        return key in self._data

    @property
    def raw(self) -> dict[str, Any]:
        return self._data

    def error(self, what: str, found: object, allowed: object, next_step: str | None = None) -> SpecError:
        """An error placed in this config, to raise."""
        return SpecError(what, where=self._where, found=found, allowed=allowed, next_step=next_step)

    def get(self, key: str, default: Any = _MISSING) -> Any:
        """Value of a key; without a default a missing key is an error."""
        self._read.add(key)
        if key not in self._data:
            if default is _MISSING:
                raise SpecError(f"the key {key} is missing", where=self._where,
                                next_step="use the checkpoint's own config.json")
            return default
        return self._data[key]

    def integer(self, key: str, low: int = 1, default: Any = _MISSING) -> int:
        v = self.get(key, default)
        if isinstance(v, bool) or not isinstance(v, int) or v < low:
            raise SpecError(f"{key} has a bad value", where=self._where, found=repr(v), allowed=f"an integer >= {low}")
        return v

    def number(self, key: str, default: Any = _MISSING) -> float:
        v = self.get(key, default)
        if isinstance(v, bool) or not isinstance(v, int | float):
            raise SpecError(f"{key} has a bad value", where=self._where, found=repr(v), allowed="a number")
        return float(v)

    def integers(self, key: str, default: Any = _MISSING) -> tuple[int, ...]:
        v = self.get(key, default)
        if not isinstance(v, list | tuple) or any(isinstance(x, bool) or not isinstance(x, int) for x in v):
            raise SpecError(f"{key} has a bad value", where=self._where, found=repr(v), allowed="a list of integers")
        return tuple(v)

    def one_of(self, key: str, *allowed: Any, default: Any = _MISSING) -> Any:
        """Value of a key that the spec supports for some values only."""
        v = self.get(key, default)
        if v not in allowed:
            raise SpecError(f"{key} has a value that this spec does not compute", where=self._where, found=repr(v),
                            allowed=", ".join(map(repr, allowed)))
        return v

    def child(self, key: str, default: Any = _MISSING) -> Config:
        v = self.get(key, default)
        if not isinstance(v, Mapping):
            raise SpecError(f"{key} has a bad value", where=self._where, found=repr(v), allowed="an object")
        c = Config(v, f"{self._where}: {key}")
        self._children.append(c)
        return c

    def ignore(self, reasons: Mapping[str, str]) -> None:
        """Keys that do not change what is computed, each with the reason."""
        self._ignored.update(reasons)

    @property
    def ignored(self) -> dict[str, str]:
        """Keys that are present and ignored, with reasons, children included."""
        out = {k: r for k, r in self._ignored.items() if k in self._data}
        for c in self._children:
            out.update(c.ignored)
        return out

    def finish(self) -> None:
        """Raises SpecError when a key was neither read nor ignored."""
        left = sorted(set(self._data) - self._read - set(self._ignored))
        if left:
            raise SpecError("the config has a key that this spec does not know", where=self._where,
                            found=", ".join(f"{k}={self._data[k]!r}" for k in left),
                            allowed="keys: " + ", ".join(sorted(self._read | set(self._ignored))))
        for c in self._children:
            c.finish()
