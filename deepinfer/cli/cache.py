"""`deepinfer cache`: look at a prefix store's folder, prove its records, take parts away."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from deepinfer.cli.failure import Command, Group
from deepinfer.cli.info import gigabytes
from deepinfer.errors import ArtifactError, SpecError

if TYPE_CHECKING:
    from deepinfer.runtime.store.survey import Found

_HELP = {"help_option_names": ["-h", "--help"]}
_FOLDER = click.argument("folder", type=click.Path(path_type=Path))
_JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
_CLASS = click.option("--class", "cls", metavar="CLASS", help="Only this retention class.")
_NAMESPACE = click.option("--namespace", metavar="HEX", help="Only namespaces that begin so.")


@click.group(cls=Group, context_settings=_HELP)
def main() -> None:
    """Look after the folder of a prefix store.

    A store keeps the cache blocks of prompts on disk, for all servers that share its folder. These
    commands need no engine and may run while servers do.

    \b
    Examples:
      deepinfer cache ls /data/store
      deepinfer cache verify /data/store
      deepinfer cache purge /data/store --tenant acme
      deepinfer cache gc /data/store --quota 500GiB
    """


@main.command("ls", cls=Command, context_settings=_HELP)
@_FOLDER
@_CLASS
@_NAMESPACE
@_JSON
def ls(folder: Path, cls: str | None, namespace: str | None, as_json: bool) -> None:
    """List the segments of a store: state, records, bytes, when each ends."""
    rows: list[dict[str, Any]] = [
            {"namespace": f.namespace, "class": f.cls, "segment": f.path.name, "state": f.name.state,
             "records": f.records, "bytes": f.bytes, "expires": _moment(f.expires),
             "kind": "damaged" if f.block is None else f.block.layout.kind} for f in _chosen(folder, cls, namespace)]
    if as_json:
        click.echo(json.dumps(rows, indent=1))
        return
    _table(("namespace", "class", "segment", "kind", "records", "bytes", "ends"),
           [(r["namespace"][:8], r["class"], r["segment"], r["kind"], f"{r['records']:,}", gigabytes(r["bytes"]),
             r["expires"]) for r in rows])


@main.command("stat", cls=Command, context_settings=_HELP)
@_FOLDER
@_JSON
def stat(folder: Path, as_json: bool) -> None:
    """Sum a store up, by namespace and class, with its writers."""
    from deepinfer.runtime.store.survey import leases

    sums: dict[tuple[str, str], dict[str, Any]] = {}
    for f in _chosen(folder, None, None):
        if f.name.state not in ("open", "seg"):
            continue  # given up, to be unlinked soon
        entry = sums.setdefault((f.namespace, f.cls), {
            "namespace": f.namespace, "class": f.cls, "segments": 0, "records": 0, "tokens": 0, "bytes": 0,
            "damaged": 0, "record_bytes": 0, "block_tokens": 0})
        if f.block is not None:
            entry["record_bytes"] = f.block.layout.stride
            entry["block_tokens"] = f.block.layout.block_tokens
            entry["tokens"] += f.records * f.block.layout.block_tokens
        entry["segments"] += 1
        entry["records"] += f.records
        entry["bytes"] += f.bytes
        entry["damaged"] += f.marked
    writers = leases(folder)
    if as_json:
        click.echo(json.dumps({"parts": list(sums.values()), "writers": writers}, indent=1))
        return
    _table(("namespace", "class", "segments", "records", "tokens", "bytes", "damaged"),
           [(e["namespace"][:8], e["class"], f"{e['segments']:,}", f"{e['records']:,}",
             f"{e['tokens']:,}", gigabytes(e["bytes"]), f"{e['damaged']:,}")
            for e in sums.values()])
    for w in writers:
        click.echo(f"writer {w.get('name')} on {w.get('host')}, process {w.get('pid')}, "
                   f"last heard of {_moment(int(str(w.get('heartbeat', 0))))}")


@main.command("verify", cls=Command, context_settings=_HELP)
@_FOLDER
@_CLASS
@_NAMESPACE
def verify(folder: Path, cls: str | None, namespace: str | None) -> None:
    """Read every record and let it prove itself. Exit code 5 when one does not.

    A damaged record is no danger: a server that meets it forgets it and computes. Many of them say
    that a disk is dying.
    """
    from rich.progress import Progress

    from deepinfer.runtime.store.survey import verify as prove

    found = list(_chosen(folder, cls, namespace))
    good, bad, broken = 0, 0, 0
    with Progress(disable=not sys.stderr.isatty(), transient=True) as progress:
        task = progress.add_task("records", total=sum(f.records for f in found))
        for f in found:
            whole, slots = prove(f)
            progress.advance(task, f.records)
            good, bad, broken = good + whole, bad + len(slots), broken + (f.block is None)
            if slots or f.block is None:
                click.echo(f"{f.path}: " + ("damaged superblock" if f.block is None else
                                            f"damaged records in slots {', '.join(map(str, slots))}"))
    click.echo(f"{good:,} records of {len(found):,} segments are whole, {bad:,} are damaged")
    if bad or broken:
        raise ArtifactError("the store holds damaged records", where=folder, found=f"{bad} records, {broken} segments",
                            next_step="nothing needs to be done for the store; look at the disk if there are many")


@main.command("purge", cls=Command, context_settings=_HELP)
@_FOLDER
@_CLASS
@_NAMESPACE
@click.option("--tenant", metavar="NAME", help="Forget this tenant's salt: nothing finds its records any more, and "
              "they go when their segments end.")
@click.option("--expired", is_flag=True, help="Only what has ended.")
@click.option("--all", "everything", is_flag=True, help="Everything.")
def purge(folder: Path, cls: str | None, namespace: str | None, tenant: str | None, expired: bool,
          everything: bool) -> None:
    """Take segments away at once, or a tenant's access to its records.

    Running servers go on: what is gone is computed again.
    """
    from deepinfer.runtime.store.files import Files
    from deepinfer.runtime.store.salts import Salts
    from deepinfer.runtime.store.survey import purge as take_away

    if not (cls or namespace or tenant or expired or everything):
        raise SpecError("nothing was named to purge", where="deepinfer cache purge",
                        allowed="--tenant, --class, --namespace, --expired or --all")
    for name, alone in (("--tenant", tenant), ("--all", everything)):
        if alone and sum(map(bool, (cls, namespace, tenant, expired, everything))) > 1:
            raise SpecError(f"{name} goes with no other choice", where="deepinfer cache purge",
                            next_step="name what is to go in two calls")
    if tenant is not None:
        found = list(_chosen(folder, None, None))  # says so when this is no store
        if not Salts(folder, Files()).forget(tenant):
            raise SpecError("this tenant has no records here", where=folder, found=tenant)
        last = max((f.expires for f in found), default=None)
        click.echo(f"forgot the salt of {tenant}; " + ("there are no segments here" if last is None else
                   f"its records end with their segments, the last {_moment(last)}"))
        return
    now = time.time()
    gone = [f for f in _chosen(folder, cls, namespace) if (not expired or f.expires <= now) and take_away(f)]
    click.echo(f"removed {len(gone):,} segments with {sum(f.records for f in gone):,} records, "
               f"{gigabytes(sum(f.bytes for f in gone))}")


@main.command("gc", cls=Command, context_settings=_HELP)
@_FOLDER
@click.option("--quota", metavar="SIZE", help="Bytes that all segments may take, as 500GiB. Default: no limit.")
def gc(folder: Path, quota: str | None) -> None:
    """Do now what servers do in the background: adopt segments of dead writers, expire, compact, keep a quota.

    A call expires a tenth of the segments at most, in case the clock is wrong; purge --expired takes all of them.
    """
    from deepinfer.runtime.store.settings import StoreSettings, parse_size
    from deepinfer.runtime.store.survey import tidy

    found = list(_chosen(folder, None, None))
    if not os.access(folder, os.W_OK):
        raise ArtifactError("the store cannot be tidied", where=folder, found="a folder that may not be written")
    size = max((f.block.segment_bytes for f in found if f.block is not None), default=1 << 28)
    limit = max(size, 2 * sum(f.bytes for f in found)) if quota is None else parse_size(quota, "--quota")
    done = tidy(StoreSettings(folder, quota=limit, segment_bytes=size),
                lambda namespace: click.echo(f"namespace {namespace}", err=True))
    click.echo(", ".join(f"{what} {count:,}" for what, count in done.items()))


def _chosen(folder: Path, cls: str | None, namespace: str | None) -> Iterable[Found]:
    from deepinfer.runtime.store.survey import survey

    for found in survey(folder):
        if (cls is None or found.cls == cls) and (namespace is None or found.namespace.startswith(namespace)):
            yield found


def _table(columns: tuple[str, ...], rows: list[tuple[Any, ...]]) -> None:
    widths = [max(len(str(row[i])) for row in [columns, *rows]) for i in range(len(columns))]
    numbers = {"records", "bytes", "segments", "tokens", "damaged"}
    for row in [columns, *rows]:
        cells = (str(v).rjust(w) if c in numbers else str(v).ljust(w)
                 for v, w, c in zip(row, widths, columns, strict=True))
        click.echo("  ".join(cells).rstrip())


def _moment(seconds: int) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))
