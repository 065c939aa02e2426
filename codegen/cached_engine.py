"""An engine of a model for this machine, kept in the cache: what a command runs that was given a model."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepinfer.backends.base import HOST
from deepinfer.codegen.cache import cache_root
from deepinfer.codegen.compile import compile_engine
from deepinfer.dsl.model import EngineOptions


@dataclass(frozen=True)
class CachedEngine:
    """What will be compiled and where it will lie.

    ``options``: fields of EngineOptions that are not the default.
    """

    model: str
    target: str
    options: Mapping[str, Any]

    @property
    def folder(self) -> Path:
        """Follows from model, target and options; its name can be imported, whatever the model's."""
        place = str(Path(self.model).resolve()) if Path(self.model).is_dir() else self.model
        mark = hashlib.sha256("\n".join([place, self.target, *self._flags()]).encode()).hexdigest()[:12]
        name = re.sub(r"[^a-z0-9]+", "_", Path(self.model).name.lower()).strip("_")
        return cache_root() / "engines" / f"engine_{name}_{mark}"

    def command(self) -> list[str]:
        """The equal deepinfer-compile."""
        return ["deepinfer-compile", "--target", self.target, "--model", self.model, *self._flags(), "--out",
                str(self.folder)]

    def make(self) -> Path:
        """Compile it; kernels that were compiled before come from the cache. Raises what `compile_engine` does."""
        compile_engine(model=self.model, out=self.folder, target=self.target, isa=HOST,
                       options=EngineOptions(**self.options))
        return self.folder

    def _flags(self) -> list[str]:
        # for this machine alone, as the cache is: that takes half the time
        given = [part for name, value in self.options.items() for part in (f"--{name.replace('_', '-')}", str(value))]
        return ["--isa", HOST, *given]
