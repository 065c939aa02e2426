"""`deepinfer doctor`: what this machine has and lacks, for a reader and for a bug report."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import click

import deepinfer
from deepinfer.accelerator import built_targets, known_targets, resolve_target, runnable_targets, unproven_targets
from deepinfer.cli.failure import Command
from deepinfer.devices import ascend_device, nvidia_device
from deepinfer.errors import DeepInferError
from deepinfer.machine import misses

_OTHER = "deepinfer"  # another project's distribution, whose package would shadow ours
_EXTRAS = {
    "base": ("numpy", "safetensors", "tokenizers", "jinja2", "click", "huggingface_hub", "rich", "llguidance", "xxhash",
             "lmdb"),
    "server": ("fastapi", "uvicorn", "pyzmq", "msgspec", "prometheus-client", "httpx2"),
    "torch": ("torch",),
    "cuda": ("triton",),
}
_MARKS = {"ok": ("ok", "green"), "note": ("note", "yellow"), "error": ("ERROR", "red")}


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at. ``state``: ok; note (something cannot be used here); error (nothing works)."""

    topic: str
    state: str
    text: str


def findings() -> list[Finding]:
    """Everything `doctor` looks at."""
    found = [
        Finding("version", "ok", f"{deepinfer.DISTRIBUTION} {deepinfer.__version__}, "
                                 f"Python {platform.python_version()} ({sys.executable})"),
        Finding("machine", "ok", f"{platform.system()} {platform.release()} {platform.machine()}, "
                                 f"{len(os.sched_getaffinity(0))} processors for this process"),
        _other_distribution(),
        *_packages(),
        _target(),
    ]
    for target in built_targets():
        lacking = misses(target)
        found += [Finding(f"target {target}", "error" if m.needed else "note", m.sentence) for m in lacking]
        if not lacking:
            runs = "; this version does not run engines for it" if target not in runnable_targets() else (
                "; no engine for it has run on a device yet" if target in unproven_targets() else "")
            found.append(Finding(f"target {target}", "ok", f"can be compiled here{runs}"))
    unbuilt = [t for t in known_targets() if t not in built_targets()]
    if unbuilt:
        found.append(Finding("targets", "note", f"not built in this version: {', '.join(unbuilt)}"))
    return [*found, *_devices(), *_room()]


def _other_distribution() -> Finding:
    try:
        version = importlib.metadata.version(_OTHER)
    except importlib.metadata.PackageNotFoundError:
        return Finding("package", "ok", f"no other distribution named {_OTHER} is installed")
    return Finding("package", "error", f"another project's distribution {_OTHER} {version} is installed in this "
                                       "environment; keep the two apart, for example in a fresh environment")


def _packages() -> list[Finding]:
    found = []
    for extra, names in _EXTRAS.items():
        versions, lacking = [], []
        for name in names:
            try:
                versions.append(f"{name} {importlib.metadata.version(name)}")
            except importlib.metadata.PackageNotFoundError:
                lacking.append(name)
        text = ", ".join(versions)
        if lacking:
            install = "deepinfer-aot" if extra == "base" else f"deepinfer-aot[{extra}]"
            text = f"missing {', '.join(lacking)}: pip install '{install}'" + (f"; there is {text}" if text else "")
        worst = "error" if extra == "base" else "note"
        found.append(Finding(f"packages {extra}", worst if lacking else "ok", text))
    return found


def _target() -> Finding:
    try:
        choice = resolve_target(None)
    except DeepInferError as error:
        return Finding("default target", "error", str(error))
    return Finding("default target", "ok", f"{choice.target}: {choice.reason}")


def _devices() -> list[Finding]:
    nvidia, ascend = nvidia_device(), ascend_device()
    shown = nvidia.note
    if nvidia.capability is not None:
        shown = "compute capability {}.{}".format(*nvidia.capability)
    return [Finding("NVIDIA device", "ok" if nvidia.capability else "note", shown),
            Finding("Ascend device", "ok" if ascend.soc else "note", ascend.soc or ascend.note)]


def _room() -> list[Finding]:
    from deepinfer.codegen.cache import cache_root
    from deepinfer.runtime.checkpoint.room import available_memory, free_disk, gigabytes

    hub = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    found = [Finding("memory", "ok", f"{gigabytes(available_memory())} can be taken")]
    for topic, folder in (("cache", cache_root()), ("checkpoints", hub)):
        place = next(p for p in (folder.absolute(), *folder.absolute().parents) if p.exists())
        text = f"{folder}: {gigabytes(free_disk(folder))} free"
        writable = os.access(place, os.W_OK)
        found.append(Finding(topic, "ok" if writable else "error", text if writable else f"{text}; not writable"))
    return found


@click.command(cls=Command, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, for a bug report.")
def main(as_json: bool) -> None:
    """Look at versions, toolchains, devices, memory, disk, and at what shadows this package.

    Notes are things that this machine cannot be used for; an error stands in the way of everything,
    and makes the exit code 4.

    \b
    Examples:
      deepinfer doctor
      deepinfer doctor --json > doctor.json
    """
    found = findings()
    bad = any(f.state == "error" for f in found)
    if as_json:
        listed = [asdict(f) for f in found]
        click.echo(json.dumps({"version": deepinfer.__version__, "ok": not bad, "findings": listed}, indent=1))
    else:
        width = max(len(f.topic) for f in found)
        for f in found:
            mark, colour = _MARKS[f.state]
            click.echo(f"{click.style(f'{mark:<5}', fg=colour)} {f.topic:<{width}}  {f.text}")
    if bad:
        click.get_current_context().exit(4)
