"""What an image file says about itself, without decoding it."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from dataclasses import dataclass

from deepinfer.recipe.errors import ImageError

_NO_FRAME = {0xC4, 0xC8, 0xCC}


@dataclass(frozen=True)
class ImageInfo:
    """Type and size in pixels of an image file."""

    media_type: str
    width: int
    height: int


def inspect_image(data: bytes) -> ImageInfo:
    """Type and size of a JPEG, PNG, GIF or WebP file, told by its content.

    Raises:
        ImageError: nothing there, another kind of file, or a damaged one.
    """
    if not data:
        raise ImageError("EmptyImage", "the image has no bytes")
    for begin, media_type, read in _KINDS:
        if begin.match(data):
            try:
                width, height = read(data)
            except (struct.error, IndexError, ValueError):
                raise ImageError("Decode", "the image file is damaged", found=media_type) from None
            if min(width, height) < 1:
                raise ImageError("Decode", "the image file is damaged", found=f"{width}x{height} pixels")
            return ImageInfo(media_type, width, height)
    raise ImageError(
        "UnsupportedMediaType", "not an image this model takes", allowed=[kind for _, kind, _ in _KINDS]
    )


def _png(data: bytes) -> tuple[int, int]:
    if data[12:16] != b"IHDR":
        raise ValueError
    width, height = struct.unpack_from(">II", data, 16)
    return width, height


def _gif(data: bytes) -> tuple[int, int]:
    width, height = struct.unpack_from("<HH", data, 6)
    return width, height


def _jpeg(data: bytes) -> tuple[int, int]:
    place = 2
    while True:
        if data[place] != 0xFF:
            raise ValueError
        kind = data[place + 1]
        if kind == 0xFF:
            place += 1
            continue
        if 0xC0 <= kind <= 0xCF and kind not in _NO_FRAME:
            height, width = struct.unpack_from(">HH", data, place + 5)
            return width, height
        place += (
            2 if kind == 0x01 or 0xD0 <= kind <= 0xD8 else 2 + struct.unpack_from(">H", data, place + 2)[0]
        )


def _webp(data: bytes) -> tuple[int, int]:
    form = data[12:16]
    if form == b"VP8X":
        return 1 + int.from_bytes(_span(data, 24, 3), "little"), 1 + int.from_bytes(
            _span(data, 27, 3), "little"
        )
    if form == b"VP8L":
        packed = struct.unpack_from("<I", data, 21)[0]
        return 1 + (packed & 0x3FFF), 1 + (packed >> 14 & 0x3FFF)
    if form == b"VP8 ":
        width, height = struct.unpack_from("<HH", data, 26)
        return width & 0x3FFF, height & 0x3FFF
    raise ValueError


def _span(data: bytes, start: int, length: int) -> bytes:
    part = data[start : start + length]
    if len(part) < length:
        raise ValueError
    return part


_KINDS: tuple[tuple[re.Pattern[bytes], str, Callable[[bytes], tuple[int, int]]], ...] = (
    (re.compile(rb"\x89PNG\r\n\x1a\n"), "image/png", _png),
    (re.compile(rb"GIF8[79]a"), "image/gif", _gif),
    (re.compile(rb"\xff\xd8\xff"), "image/jpeg", _jpeg),
    (re.compile(rb"RIFF....WEBP", re.DOTALL), "image/webp", _webp),
)
