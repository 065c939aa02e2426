"""What the first block of a chain hangs on: the engine's own root, salted for a tenant."""

from __future__ import annotations

import os
from collections.abc import Callable

from deepinfer.runtime.prefix.chain import digest, root_key

_MOST = 4096  # tenants whose roots are remembered


class Roots:
    """Root keys by tenant salt.

    ``weights``, ``numerics``, ``cache_plan``: digests of what changes a cached byte. None: blocks never leave this
    process, and a number of the process stands for all three. ``secret``: of a tenant, where a store keeps one that
    can be forgotten; None: the salt itself.
    """

    def __init__(self, identity: tuple[bytes, bytes, bytes] | None = None,
                 secret: Callable[[str], bytes] | None = None) -> None:
        self._identity = identity or (os.urandom(16), b"", b"")
        self._secret = secret
        self._roots: dict[str, bytes] = {}

    def root(self, salt: str | None) -> bytes:
        """[16] for requests with a tenant's salt, or without one."""
        key = salt or ""
        if key and self._secret is not None:
            return root_key(*self._identity, self._secret(key))
        found = self._roots.get(key)
        if found is None:
            if len(self._roots) >= _MOST:
                self._roots.clear()
            found = self._roots[key] = root_key(*self._identity, digest(b"tenant", key.encode()) if key else b"")
        return found

