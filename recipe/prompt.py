"""A rendered prompt: text with the places of its control tokens, which exist as ids and not as characters."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from deepinfer.recipe.conversation import Content, ImageSource


@dataclass(frozen=True)
class Prompt:
    """What a conversation becomes.

    Attributes:
        text: the prompt as it reads.
        special_ranges: half-open code point ranges; each is one control token, everything else is plain text
            even where it looks like one.
        image_sources: the images in the order of their tokens.
    """

    text: str
    special_ranges: tuple[tuple[int, int], ...]
    image_sources: tuple[ImageSource, ...] = ()

    def spans(self) -> Iterator[tuple[bool, str]]:
        """(is a control token, text) from start to end; plain spans are never empty and never adjacent."""
        place = 0
        for start, end in self.special_ranges:
            if place < start:
                yield False, self.text[place:start]
            yield True, self.text[start:end]
            place = end
        if place < len(self.text):
            yield False, self.text[place:]

    def byte_ranges(self) -> tuple[tuple[int, int], ...]:
        """The special ranges as offsets into the UTF-8 form of the text."""
        ranges: list[tuple[int, int]] = []
        place = 0
        for special, span in self.spans():
            end = place + len(span.encode("utf-8"))
            if special:
                ranges.append((place, end))
            place = end
        return tuple(ranges)


class PromptBuilder:
    """Collects plain text and control tokens in order."""

    def __init__(self, image_token: str) -> None:
        self._image_token = image_token
        self._parts: list[str] = []
        self._length = 0
        self._ranges: list[tuple[int, int]] = []
        self._images: list[ImageSource] = []

    def plain(self, text: str) -> None:
        """Text that never becomes a control token."""
        self._parts.append(text)
        self._length += len(text)

    def special(self, token: str) -> None:
        """One control token by its spelling."""
        self._ranges.append((self._length, self._length + len(token)))
        self.plain(token)

    def template(self, text: str, tokens: tuple[str, ...]) -> None:
        """A text of ours in which the given spellings are control tokens."""
        place = 0
        while place < len(text):
            found = [(text.find(token, place), token) for token in tokens]
            start, token = min(((at, token) for at, token in found if at >= 0), default=(len(text), ""))
            self.plain(text[place:start])
            if token:
                self.special(token)
            place = start + len(token)

    def content(self, content: Content) -> None:
        """Text as plain, each image as the image token."""
        for piece in content:
            if isinstance(piece, ImageSource):
                self._images.append(piece)
                self.special(self._image_token)
            else:
                self.plain(piece)

    def build(self) -> Prompt:
        return Prompt("".join(self._parts), tuple(self._ranges), tuple(self._images))
