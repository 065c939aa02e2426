"""A tenant's secret part of its root key. Who forgets it purges the tenant: no key leads to its records any more, and
they die with their segments."""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
import time
from pathlib import Path

from deepinfer.runtime.prefix.chain import digest
from deepinfer.runtime.store.files import FILE_MODE, Files
from deepinfer.runtime.store.health import PUBLISHING, READING, Health
from deepinfer.runtime.store.points import Point

FOLDER = "salts"
SALT_BYTES = 32
_LOOK_SECONDS = 5.0  # after a purge elsewhere, running servers follow within this time


class Salts:
    """Salts of tenants in a store's folder, one file each, named for a digest of the tenant's name."""

    def __init__(self, folder: Path, files: Files, health: Health | None = None) -> None:
        self.folder, self.files, self.health = folder / FOLDER, files, health
        self._known: dict[str, tuple[bytes, float]] = {}
        self._lock = threading.Lock()

    def get(self, tenant: str) -> bytes:
        """[32] the tenant's salt, made on first use. Without a folder that works, one of this process alone."""
        now = time.monotonic()
        with self._lock:
            salt, looked = self._known.get(tenant, (b"", 0.0))
        if salt and now - looked < _LOOK_SECONDS:
            return salt
        try:
            salt = self._read(tenant) or self._make(tenant)
        except OSError as failure:
            if self.health is not None:
                self.health.failed(PUBLISHING if salt else READING, failure, off=False)
            salt = salt or secrets.token_bytes(SALT_BYTES)
        with self._lock:
            self._known[tenant] = salt, now
        return salt

    def forget(self, tenant: str) -> bool:
        """Purge a tenant; whether it had a salt."""
        with self._lock:
            self._known.pop(tenant, None)
        try:
            self.files.unlink(self._path(tenant), Point.OTHER)
        except FileNotFoundError:
            return False
        self.files.sync_folder(self.folder, Point.OTHER)
        return True

    def _read(self, tenant: str) -> bytes:
        try:
            data = self._path(tenant).read_bytes()
        except FileNotFoundError:
            return b""
        return data if len(data) == SALT_BYTES else b""

    def _make(self, tenant: str) -> bytes:
        self.files.make_folder(self.folder, within=self.folder.parent.parent)
        path, salt = self._path(tenant), secrets.token_bytes(SALT_BYTES)
        aside = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
        fd = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, FILE_MODE)
        try:
            os.write(fd, salt)
            os.fsync(fd)
        finally:
            os.close(fd)
        try:
            if path.exists():  # a damaged one: its records are lost to everybody
                os.rename(aside, path)
                return salt
            os.link(aside, path)  # the first of several processes wins
            return salt
        except FileExistsError:
            return self._read(tenant) or salt
        finally:
            with contextlib.suppress(OSError):
                os.unlink(aside)

    def _path(self, tenant: str) -> Path:
        return self.folder / f"{digest(b'tenant', tenant.encode()).hex()}.salt"
