"""Which target this machine compiles for and runs on; the only reader of `DEEPINFER_ACCELERATOR`.

`build.sh`, the default of `--target`, `LLM` and the examples all ask `resolve_target`. Run as a
module it prints the choice on one line: `python -m deepinfer.accelerator`. Only the standard library
is needed, so that it answers before anything is installed.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
import sys
from dataclasses import dataclass

from deepinfer.devices import ascend_device, nvidia_device
from deepinfer.errors import ArtifactError, DeepInferError, InternalError, SpecError, ToolchainError

VARIABLE = "DEEPINFER_ACCELERATOR"

TARGETS_OF_ACCELERATOR: dict[str, tuple[str, ...]] = {
    "nvidia": ("sm100", "sm90"),
    "ascend": ("ascend950",),
    "cpu": ("cpu",),
}

# An NVIDIA binary for `sm_100a` runs on compute capability 10.0 and on no other, so the match is exact.
_TARGET_OF_CAPABILITY = {(10, 0): "sm100", (9, 0): "sm90"}
_ASCEND950_SOC_PREFIX = "Ascend950"


@dataclass(frozen=True)
class Choice:
    """A target and the clause that says why: `target=sm90` because `an NVIDIA device of ... is here`."""

    target: str
    reason: str


@dataclass(frozen=True)
class Backend:
    """What a package under `deepinfer.backends` announces: the targets it serves, whether it compiles for them
    (`built`), those whose engines do not run yet, those whose engines nobody has run on a device, which have to be
    asked for, the kind of runner that its engines hold, and the variable that has them run on a stand-in for their
    device."""

    name: str
    targets: tuple[str, ...]
    built: bool
    compiled_only: tuple[str, ...] = ()
    unproven: tuple[str, ...] = ()
    runner: str = "host"
    stand_in: str = ""


def backends() -> list[Backend]:
    """Every backend, by name; a package counts as one when it defines `TARGETS` and `BUILT`."""
    package = importlib.import_module("deepinfer.backends")
    found = []
    for entry in pkgutil.iter_modules(package.__path__):
        if not entry.ispkg:
            continue
        module = importlib.import_module(f"deepinfer.backends.{entry.name}")
        if not hasattr(module, "TARGETS"):
            continue
        if not isinstance(getattr(module, "BUILT", None), bool):
            raise InternalError(f"backends/{entry.name}/__init__.py defines TARGETS but no BUILT: bool")
        found.append(Backend(entry.name, tuple(module.TARGETS), module.BUILT, getattr(module, "COMPILED_ONLY", ()),
                             getattr(module, "UNPROVEN", ()), getattr(module, "RUNNER", "host"),
                             getattr(module, "STAND_IN", "")))
    return sorted(found, key=lambda backend: backend.name)


def known_targets() -> list[str]:
    """Every target any accelerator names, best first."""
    return [target for targets in TARGETS_OF_ACCELERATOR.values() for target in targets]


def built_targets() -> list[str]:
    """The targets whose backend is built, best first."""
    built = {target for backend in backends() if backend.built for target in backend.targets}
    return [target for target in known_targets() if target in built]


def runnable_targets() -> list[str]:
    """The targets that are built and whose engines run, best first."""
    waiting = {target for backend in backends() for target in backend.compiled_only}
    return [target for target in built_targets() if target not in waiting]


def unproven_targets() -> set[str]:
    """The targets for which no engine has run on a device yet: nobody gets them without asking."""
    return {target for backend in backends() for target in backend.unproven}


def backend_of(target: str) -> Backend:
    """The backend that serves `target`; SpecError for a target that none serves."""
    for backend in backends():
        if target in backend.targets:
            return backend
    raise SpecError("no backend serves this target", where="target", found=target, allowed=known_targets())


def uses_stand_in(target: str) -> bool:
    """Whether the user has engines for ``target`` run on the stand-in of its device; it is ready afterwards.

    Raises ToolchainError where it cannot be built.
    """
    variable = backend_of(target).stand_in
    if not variable or os.environ.get(variable, "") in ("", "0"):
        return False
    device = ascend_device()
    if device.soc is None:
        raise ToolchainError("the stand-in for a device cannot be used", where=variable, found=device.note,
                             next_step=f"mend that, or unset {variable}")
    return True


def resolve_target(explicit: str | None = None, *, need_built: bool = True) -> Choice:
    """The target to use, from an explicit name, else `DEEPINFER_ACCELERATOR`, else the best this machine has.

    Args:
        explicit: a target name (`cpu`, `sm90`, `sm100`, `ascend950`), for instance the value of `--target`.
        need_built: refuse a target whose backend is not built. When nothing is asked for, the best
            target found whose backend is built is taken either way.

    Raises:
        SpecError: an unknown target or accelerator, a device no target fits, or a target that is not built.
    """
    if explicit is not None:
        return _checked(_explicit(explicit), "target", need_built)
    accelerator = os.environ.get(VARIABLE, "")
    if accelerator:
        return _checked(_of_accelerator(accelerator), VARIABLE, need_built)
    return _best_found()


def require_runnable(target: str, engine: str) -> None:
    """Refuse an engine whose target this machine, as configured, does not run.

    Without `DEEPINFER_ACCELERATOR` a CPU engine runs anywhere and a device engine where its device is;
    with it, only an engine for that accelerator's target does.

    Args:
        target: the target in the engine's manifest.
        engine: how to name the engine in the message, usually its path.
    """
    if uses_stand_in(target):
        return
    if target in built_targets() and target not in runnable_targets():
        raise ArtifactError(
            "this version compiles engines for this target, but does not run them yet",
            where=engine,
            found=f"an engine for {target}",
            allowed=runnable_targets(),
            next_step="compile again with --target cpu",
        )
    if os.environ.get(VARIABLE, ""):
        here = resolve_target(need_built=False)
    elif target == "cpu":
        return
    else:
        here = Choice(_found_device() or "cpu", "this machine has no better device")
    if here.target != target:
        raise ArtifactError(
            "the engine is for another target than this machine",
            where=engine,
            found=f"an engine for {target} on {here.target} ({here.reason})",
            allowed=here.target,
            next_step=_way_out(target, here.target),
        )


def _way_out(target: str, here: str) -> str:
    """What to do with an engine for `target` on a machine that runs `here`: only what this version can do."""
    steps = [f"compile again with --target {here}"] if here in built_targets() else []
    variable = os.environ.get(VARIABLE, "")
    if variable and target == (_found_device() or "cpu"):
        steps.append(f"unset {VARIABLE} (it is {variable})")
    elif target == "cpu":
        steps.append(f"set {VARIABLE}=cpu")
    elif not steps:
        steps.append("compile again with --target cpu" + (f" and set {VARIABLE}=cpu" if variable else ""))
    return ", or ".join(steps)


def _explicit(target: str) -> Choice:
    if target in known_targets():
        return Choice(target, "asked for by name")
    hint = None
    if target in TARGETS_OF_ACCELERATOR:
        hint = f"{target} is a value of {VARIABLE}; a target names the chip: {_listed(target)}"
    raise SpecError("unknown target", where="target", found=target, allowed=known_targets(), next_step=hint)


def _listed(accelerator: str) -> str:
    return " or ".join(TARGETS_OF_ACCELERATOR[accelerator])


def _of_accelerator(accelerator: str) -> Choice:
    if accelerator not in TARGETS_OF_ACCELERATOR:
        raise SpecError(
            "unknown accelerator",
            where=VARIABLE,
            found=accelerator,
            allowed=list(TARGETS_OF_ACCELERATOR),
            next_step="set one of these, or unset it to use the best target found",
        )
    reason = f"{VARIABLE}={accelerator}"
    if accelerator != "nvidia":
        return Choice(TARGETS_OF_ACCELERATOR[accelerator][0], reason)
    device = nvidia_device()
    if device.capability is None:
        return Choice("sm100", f"{reason} and {device.note}")
    target = _TARGET_OF_CAPABILITY.get(device.capability)
    capability = "{}.{}".format(*device.capability)
    if target is None:
        raise SpecError(
            "no target fits the NVIDIA device here",
            where=VARIABLE,
            found=f"compute capability {capability}",
            allowed="9.0 (sm90), 10.0 (sm100)",
            next_step=f"name the chip to compile for with --target, or set {VARIABLE}=cpu",
        )
    return Choice(target, f"{reason} and the device has compute capability {capability}")


def _checked(choice: Choice, where: str, need_built: bool) -> Choice:
    if need_built and choice.target not in built_targets():
        raise SpecError(
            "the backend of this target is not built yet in this version",
            where=where,
            found=f"{choice.target} ({choice.reason})",
            allowed=built_targets(),
            next_step="choose a built target",
        )
    return choice


def _found_device() -> str | None:
    """The target of the accelerator in this machine, built or not; None without one."""
    capability = nvidia_device().capability
    if capability in _TARGET_OF_CAPABILITY:
        return _TARGET_OF_CAPABILITY[capability]
    soc = ascend_device().soc
    return "ascend950" if soc is not None and soc.startswith(_ASCEND950_SOC_PREFIX) else None


def _best_found() -> Choice:
    found, built = _found_device(), runnable_targets()
    if found is not None and found in built and found not in unproven_targets():
        return Choice(found, f"a device for {found} is here")
    if "cpu" not in built:
        raise SpecError("no backend of this version is built", where="backends", allowed=built)
    if found is not None:
        state = f"no engine for it has run on one yet; --target {found} takes it" if found in built else (
            "engines for it do not run yet")
        return Choice("cpu", f"a device for {found} is here, but {state}")
    capability = nvidia_device().capability
    if capability is not None:
        found_clause = "the NVIDIA device here has compute capability {}.{}".format(*capability)
        return Choice("cpu", f"{found_clause}, which no target fits")
    return Choice("cpu", "no accelerator with a built backend was found")


def main() -> int:
    """Print `target=... reason=...`; on a mistake print one sentence and return its exit code."""
    try:
        choice = resolve_target()
    except DeepInferError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    print(f"target={choice.target} reason={choice.reason!r}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
