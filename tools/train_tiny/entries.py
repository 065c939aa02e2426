"""Facts for the scripted dialogues: signatures and summaries out of the Python library reference."""

from __future__ import annotations

import re
from dataclasses import dataclass

from .corpus import Document

_DIRECTIVE = re.compile(r"^( *)\.\. (module|currentmodule|function|class|method|data|exception|attribute):: (.+)$")
_ROLE = re.compile(r":[a-zA-Z:]+:`([^`]*)`")


@dataclass(frozen=True)
class Entry:
    """One documented name.  ``summary`` is its first sentence, ``detail`` the first paragraph."""

    name: str
    kind: str
    module: str
    signature: str
    summary: str
    detail: str


def plain(text: str) -> str:
    """reStructuredText of one paragraph as plain words on one line."""

    def target(match: re.Match[str]) -> str:
        shown = match.group(1).split(" <")[0]
        name = shown[1:].split(".")[-1] if shown.startswith("~") else shown.lstrip("!.")
        return f"`{name}`"

    text = _ROLE.sub(target, " ".join(text.split()))
    text = text.replace("``", "`").replace("\\ ", "").replace("\\*", "*").replace("\\", "")
    return re.sub(r"(?<!\w)\*{1,2}([\w.]+)\*{1,2}(?!\w)", r"\1", text)


def first_sentence(paragraph: str) -> str:
    match = re.match(r"(.+?[.!?])(?= [A-Z`(]|$)", paragraph)
    return match.group(1) if match else paragraph


def _paragraph(lines: list[str], start: int, indent: int) -> str:
    """The first paragraph of a directive's body, or nothing when the body starts with another directive."""
    taken: list[str] = []
    for line in lines[start:]:
        if not line.strip():
            if taken:
                break
            continue
        depth = len(line) - len(line.lstrip())
        if depth <= indent:
            break
        if not taken and (line.lstrip().startswith((".. ", ":", "..", "*", "+", "|", ">>>"))):
            if line.lstrip().startswith(":mod") or line.lstrip().startswith(":class"):
                taken.append(line.strip())
                continue
            break
        taken.append(line.strip())
    return plain(" ".join(taken))


def _signature(lines: list[str], i: int, text: str) -> tuple[str, int]:
    """A directive's argument, continued over backslashes, and the index of the line after it."""
    while text.endswith("\\") and i + 1 < len(lines):
        i += 1
        text = text[:-1] + " " + lines[i].strip()
    return " ".join(text.replace("\\", "").split()), i + 1


def _qualified(signature: str, module: str, owner: str) -> tuple[str, str]:
    """(qualified name, qualified signature)."""
    name = re.split(r"[(\s]", signature, maxsplit=1)[0]
    prefix = f"{owner}." if owner and "." not in name else ""
    full = name if not module or name.startswith(module + ".") else f"{module}.{prefix}{name}"
    return full, full + signature[len(name) :]


def entries(documents: list[Document]) -> list[Entry]:
    """Every documented function, class, method, constant and exception of the library reference."""
    found: dict[str, Entry] = {}
    for document in documents:
        if "/_sources/library/" not in document.path or document.project != "CPython":
            continue
        module, owner, owner_indent = "", "", 0
        lines = document.text.split("\n")
        for i, line in enumerate(lines):
            match = _DIRECTIVE.match(line)
            if not match:
                continue
            indent, kind, rest = len(match.group(1)), match.group(2), match.group(3)
            if kind in ("module", "currentmodule"):
                module, owner = rest.strip(), ""
                continue
            signature, after = _signature(lines, i, rest)
            if indent <= owner_indent:
                owner = ""
            name, signature = _qualified(signature, module, owner if kind in ("method", "attribute") else "")
            if kind in ("class", "exception"):
                owner, owner_indent = name.removeprefix(module + "."), indent
            detail = _paragraph(lines, after, indent)
            is_prose = 20 <= len(detail) <= 600 and detail.count(" ") >= 3 and "::" not in detail
            if is_prose and name not in found and len(signature) <= 200:
                label = {"data": "constant"}.get(kind, kind)
                found[name] = Entry(name, label, module, signature, first_sentence(detail), detail)
    return list(found.values())
