"""Fetch, clean and split the training text.

Every document is one file of a Debian package: reStructuredText, Markdown, the text of an HTML page, or Python.
A document is held out when the hash of its name says so, and dropped from the held-out part when most of its
lines also stand in the training part.
"""

from __future__ import annotations

import gzip
import hashlib
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path

from .sources import HTML_PACKAGES, SOURCES, Source

MAX_DOCUMENT_BYTES = 300_000
MIN_DOCUMENT_BYTES = 200
HELD_OUT_PER_MILLE = 6
TEXT_SUFFIXES = (".rst", ".rst.txt", ".md", ".md.txt", ".rst.gz", ".txt")
# Machine-made tables and foreign-language lists teach a small model nothing.
SKIP = re.compile(
    r"(/tests?/|_tests?/|/test_[^/]*\.py$|/_tests?\.py$|/locale/|/conf/locale|unicode|/lib2to3/pgen|encodings/|"
    r"/_vendor/|/extern/|/licen[cs]e|copyright|/idlelib/help|_builtins\.py$|top_level|entry_points|SOURCES\.txt|"
    r"requires\.txt|dependency_links|/data/|/ply_|parsetab|lextab|/_autolev|latex/_antlr|egg-info/|"
    r"html/_modules/|/generated/)",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Document:
    """One cleaned text with the project and the path that it came from."""

    project: str
    path: str
    text: str

    @property
    def is_prose(self) -> bool:
        return not self.path.endswith(".py")


def fetch(folder: Path) -> None:
    """Download and unpack every package of SOURCES below ``folder`` with Debian's own client."""
    folder.mkdir(parents=True, exist_ok=True)
    packages = [name for source in SOURCES for name in source.packages]
    missing = [name for name in packages if not (folder / name).is_dir()]
    if missing:
        subprocess.run(["apt-get", "download", *missing], cwd=folder, check=True)
    for name in missing:
        archive = max(folder.glob(f"{name}_*.deb"), key=lambda path: path.stat().st_mtime)
        subprocess.run(["dpkg-deb", "-x", str(archive), str(folder / name)], check=True)
        archive.unlink()


class _PageText(HTMLParser):
    """Keeps the text of a page's main part, one line a block."""

    _BLOCKS = frozenset({"p", "li", "dt", "dd", "pre", "h1", "h2", "h3", "h4", "tr", "div", "br"})

    def __init__(self) -> None:
        super().__init__()
        self.pieces: list[str] = []
        self._main = 0
        self._skip = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = dict(attrs)
        kind = names.get("class") or ""
        is_main = "body" in kind.split() or names.get("id") == "yui-main" or "articleBody" in names.values()
        if tag == "div" and (self._main or is_main):
            self._main += 1
        if tag in ("script", "style") or (tag == "a" and "headerlink" in kind):
            self._skip += 1
        elif tag in self._BLOCKS:
            self.pieces.append("\n")

    def handle_endtag(self, tag: str) -> None:
        if tag == "div" and self._main:
            self._main -= 1
        if self._skip and tag in ("script", "style", "a"):
            self._skip -= 1
        elif tag in self._BLOCKS:
            self.pieces.append("\n")

    def handle_data(self, data: str) -> None:
        if self._main and not self._skip:
            self.pieces.append(data)


def page_text(html: str) -> str:
    """Text of an HTML page's main part."""
    parser = _PageText()
    parser.feed(html)
    return re.sub(r"\n[ \t]*\n[\s]*\n", "\n\n", "".join(parser.pieces)).strip()


def clean(text: str) -> str | None:
    """The text with normal line ends, or None when it is a table, a blob or too short."""
    text = re.sub(r"[ \t]+\n", "\n", text.replace("\r\n", "\n").replace("\r", "\n"))
    text = re.sub(r"\n{4,}", "\n\n\n", text).strip() + "\n"
    size = len(text.encode())
    if not MIN_DOCUMENT_BYTES <= size <= MAX_DOCUMENT_BYTES:
        return None
    lines = text.split("\n")
    if max(map(len, lines)) > 1000 or size / len(lines) > 200:
        return None
    digits = sum(character.isdigit() for character in text)
    ascii_share = sum(character.isascii() for character in text) / len(text)
    if digits > 0.2 * len(text) or ascii_share < 0.95:
        return None
    return text


def _read(path: Path) -> str | None:
    raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return None


def _package_documents(source: Source, package: str, folder: Path) -> Iterator[Document]:
    root = folder / package
    for path in sorted(root.rglob("*")):
        name = "/" + str(path.relative_to(root))
        keep_tests = source.project == "CPython test suite"
        if path.is_symlink() or not path.is_file() or (SKIP.search(name) and not keep_tests):
            continue
        is_page = path.suffix == ".html" and package in HTML_PACKAGES
        if not (is_page or path.suffix == ".py" or name.endswith(TEXT_SUFFIXES)):
            continue
        raw = _read(path)
        text = clean(page_text(raw) if is_page else raw) if raw else None
        if text is not None:
            yield Document(source.project, package + name, text)


def documents(folder: Path) -> list[Document]:
    """Every cleaned document below ``folder``, exact duplicates once."""
    seen: set[bytes] = set()
    kept: list[Document] = []
    for source in SOURCES:
        for package in source.packages:
            for document in _package_documents(source, package, folder):
                key = hashlib.sha256(document.text.encode()).digest()
                if key not in seen:
                    seen.add(key)
                    kept.append(document)
    return kept


def _is_held_out(document: Document) -> bool:
    digest = hashlib.sha256(document.path.encode()).digest()
    return int.from_bytes(digest[:4], "little") % 1000 < HELD_OUT_PER_MILLE


def _long_lines(text: str) -> list[int]:
    return [hash(line.strip()) for line in text.split("\n") if len(line.strip()) > 20]


def split(all_documents: list[Document]) -> tuple[list[Document], list[Document]]:
    """(training, held out).  A held-out document shares at most half of its long lines with the training part."""
    training = [document for document in all_documents if not _is_held_out(document)]
    known = {line for document in training for line in _long_lines(document.text)}
    held_out = []
    for document in all_documents:
        lines = _long_lines(document.text)
        if _is_held_out(document) and lines and sum(line in known for line in lines) <= 0.5 * len(lines):
            held_out.append(document)
    return training, held_out
