"""What this machine lacks for a target: `python -m deepinfer.machine TARGET` prints one sentence per miss.

Only the standard library is needed, so that `build.sh` can ask before anything is installed. The exit
code is that of ToolchainError when a miss stands in the way of compiling, else 0.
"""

from __future__ import annotations

import importlib
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass

from deepinfer.accelerator import backend_of
from deepinfer.devices import ascend_device, nvidia_device
from deepinfer.errors import DeepInferError, SpecError, ToolchainError

GXX_MINIMUM = 12  # the oldest that the generated sources are compiled with in the tests


@dataclass(frozen=True)
class Miss:
    """Something absent. `needed` tells whether compiling for the target is impossible without it."""

    sentence: str
    needed: bool


def cxx_compiler() -> str:
    """The host compiler to use: `CXX`, else `g++`. Raises ToolchainError when absent or older than 12."""
    name = os.environ.get("CXX") or "g++"
    path = shutil.which(name)
    if path is None:
        raise ToolchainError(
            "no C++ compiler",
            where=name,
            found="nothing on PATH",
            allowed=f"g++ {GXX_MINIMUM} or newer",
            next_step="install g++, or point CXX at one",
        )
    version = _first_number([path, "-dumpfullversion", "-dumpversion"])
    if version is None or version < GXX_MINIMUM:
        raise ToolchainError(
            "the C++ compiler is too old",
            where=path,
            found="no version" if version is None else f"version {version}",
            allowed=f"g++ {GXX_MINIMUM} or newer",
            next_step="install a newer g++, or point CXX at one",
        )
    return path


def misses(target: str) -> list[Miss]:
    """What this machine lacks for `target`, in the order a reader should mend it."""
    found = []
    try:
        cxx_compiler()
    except ToolchainError as error:
        found.append(Miss(str(error), needed=True))
    if target.startswith("sm"):
        found += _nvidia_misses()
    if target.startswith("ascend"):
        found += _ascend_misses()
    return found


def _nvidia_misses() -> list[Miss]:
    found = []
    device = nvidia_device()
    if device.capability is None:
        found.append(Miss(f"{device.note}; engines can be compiled here but not run", needed=False))
    return found


def _ascend_misses() -> list[Miss]:
    found = []
    try:
        if importlib.import_module("deepinfer.backends.ascend950.bisheng").find() is None:
            sentence = ("bisheng is not on PATH, so kernels stay sources that run on the CPU twin only "
                        "(DEEPINFER_ASCEND_TWIN=1); install CANN, source its set_env.sh")
            found.append(Miss(sentence, needed=False))
    except ToolchainError as error:
        found.append(Miss(str(error), needed=True))
    device = ascend_device()
    if device.soc is None:
        found.append(Miss(f"{device.note}; engines cannot be run here", needed=False))
    return found


def _first_number(command: list[str], after: str = "") -> int | None:
    """The first integer that `command` prints behind the pattern `after`, or None."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    match = re.search(after + r"(\d+)", done.stdout)
    return int(match.group(1)) if done.returncode == 0 and match else None


def main(arguments: list[str]) -> int:
    """Print the misses for the target named in `arguments`; return the exit code."""
    if len(arguments) != 1:
        print("usage: python -m deepinfer.machine TARGET", file=sys.stderr)
        return SpecError.exit_code
    try:
        backend_of(arguments[0])
    except DeepInferError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    found = misses(arguments[0])
    for miss in found:
        print(f"{'error' if miss.needed else 'note'}: {miss.sentence}", file=sys.stderr)
    return ToolchainError.exit_code if any(miss.needed for miss in found) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
