"""A checkpoint's headers against what a model declares: everything that does not fit, in one message."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from deepinfer.dsl.params import ParamDecl, StoredTensor
from deepinfer.errors import ArtifactError
from deepinfer.runtime.checkpoint.headers import some


@dataclass(frozen=True)
class IgnoredTensors:
    """Tensors of a checkpoint that an engine does not use."""

    pattern: str
    reason: str
    names: tuple[str, ...]
    bytes: int


def accepted(decl: ParamDecl) -> list[StoredTensor]:
    """What a header may say of one tensor of a parameter, the official spelling first. FP4 pairs are plain bytes to
    some writers, and a type of their own with the logical shape to others."""
    stored = decl.stored()
    if decl.dtype.name != "mxfp4":
        return [stored]
    return [stored, StoredTensor("U8", stored.shape), StoredTensor("F4", decl.shape)]


def accepted_scales(decl: ParamDecl) -> list[StoredTensor]:
    """The same of its scale; writers without the exponent-only type call it bytes."""
    stored = decl.stored_scale()
    return [stored, StoredTensor("U8", stored.shape)]


def check_tensors(headers: Mapping[str, StoredTensor], params: Iterable[ParamDecl],
                  ignored: Iterable[tuple[str, str]], where: str) -> list[IgnoredTensors]:
    """Checks names, shapes and dtypes; returns the tensors that are left out.

    ``ignored``: (name pattern, reason). Raises one ArtifactError that names up to ten missing and ten unexpected
    tensors and up to ten of each other kind.
    """
    expected: dict[str, list[StoredTensor]] = {}
    for p in params:
        if not p.derive:
            expected.update(dict.fromkeys(p.names, accepted(p)))
            if p.scale_names:
                expected.update(dict.fromkeys(p.scale_names, accepted_scales(p)))
    spare = [name for name in headers if name not in expected]
    found = _ignored(headers, spare, list(ignored))
    left_out = {name for group in found for name in group.names}
    complaints = _complaints(headers, expected, [name for name in spare if name not in left_out])
    if complaints:
        raise ArtifactError("the tensors of the checkpoint are not those that the engine reads", where=where,
                            found="; ".join(complaints), next_step=_advice(headers, expected))
    return found


def _ignored(headers: Mapping[str, StoredTensor], spare: list[str],
             patterns: list[tuple[str, str]]) -> list[IgnoredTensors]:
    groups: dict[tuple[str, str], list[str]] = {}
    for name in spare:
        match = next((p for p in patterns if fnmatchcase(name, p[0])), None)
        if match is not None:
            groups.setdefault(match, []).append(name)
    return [IgnoredTensors(pattern, reason, tuple(names), sum(headers[n].nbytes for n in names))
            for (pattern, reason), names in groups.items()]


def _complaints(headers: Mapping[str, StoredTensor], expected: Mapping[str, list[StoredTensor]],
                unexpected: list[str]) -> list[str]:
    missing = [name for name in expected if name not in headers]
    shapes, dtypes = [], []
    for name, allowed in expected.items():
        have = headers.get(name)
        if have is None or have in allowed:
            continue
        if have.dtype in [a.dtype for a in allowed]:
            want = next(a for a in allowed if a.dtype == have.dtype)
            shapes.append(f"{name} {list(have.shape)} for {list(want.shape)}")
        else:
            dtypes.append(f"{name} {have.dtype} for {allowed[0].dtype}")
    kinds = {"missing": missing, "unexpected": unexpected, "of another shape": shapes, "of another dtype": dtypes}
    return [f"{len(names)} {kind}: {some(names)}" for kind, names in kinds.items() if names]


def _advice(headers: Mapping[str, StoredTensor], expected: Mapping[str, list[StoredTensor]]) -> str:
    prefix = "model."
    if any(n not in expected and n.removeprefix(prefix) in expected for n in headers):
        return f"the names carry the prefix {prefix!r} of a converted checkpoint; use the official one"
    if all(name in headers for name in expected):
        return "compile the engine again with this checkpoint"
    return "check that checkpoint and config belong together"
