"""What a cubin says of itself: parameters from its ELF sections, resources and instructions from the tools of NVIDIA's
disassembler that come with Triton."""

from __future__ import annotations

import re
import struct
import subprocess
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from deepinfer.backends.cuda_sm100.target import Arch
from deepinfer.errors import ToolchainError

_KPARAM_INFO = 0x17
_OPCODE = re.compile(r"^\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*)(?:\.|\s|;)", re.MULTILINE)


def _sections(elf: bytes) -> Iterator[tuple[str, bytes]]:
    at, = struct.unpack_from("<Q", elf, 0x28)
    size, count, names = struct.unpack_from("<HHH", elf, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", elf, at + i * size) for i in range(count)]
    text = headers[names][4]
    for name, _, _, _, offset, length in headers:
        end = elf.index(b"\0", text + name)
        yield elf[text + name: end].decode(), elf[offset: offset + length]


def parameter_sizes(cubin: bytes, function: str) -> list[int]:
    """Bytes of each parameter of a function, in order."""
    found: dict[int, int] = {}
    for name, data in _sections(cubin):
        if name != f".nv.info.{function}":
            continue
        at = 0
        while at + 4 <= len(data):
            form, attribute, size = struct.unpack_from("<BBH", data, at)
            at += 4
            if form != 4:  # the value lies in the header itself
                continue
            if attribute == _KPARAM_INFO:
                _, ordinal, _, flags = struct.unpack_from("<IHHI", data, at)
                found[ordinal] = flags >> 18
            at += size
    return [found[i] for i in sorted(found)]


@dataclass(frozen=True)
class Inspection:
    """``matrix``, ``fallback``: instructions of the asynchronous and of the plain tensor cores. ``stack``: bytes a
    thread keeps in local memory."""

    registers: int
    stack: int
    matrix: int
    fallback: int


def inspect(cubin: Path, function: str, arch: Arch, tools: Path) -> Inspection:
    """Disassembles a cubin. ``tools``: folder of cuobjdump and nvdisasm."""
    usage = _run([str(tools / "cuobjdump"), "-res-usage", str(cubin)])
    match = re.search(rf"Function {function}:\s*\n\s*REG:(\d+) STACK:(\d+)", usage)
    if match is None:
        raise ToolchainError("the disassembler does not describe a kernel", where=function, found=usage[:200],
                             next_step="please report this")
    words = Counter(_OPCODE.findall(_run([str(tools / "nvdisasm"), "-c", str(cubin)])))
    return Inspection(int(match[1]), int(match[2]), sum(words[m] for m in arch.matrix),
                      sum(words[m] for m in arch.fallback))


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ToolchainError("a tool of the extra `cuda` fails", where=command[0],
                             found=(done.stderr or done.stdout)[:300], next_step="install the extra `cuda` again")
    return done.stdout
