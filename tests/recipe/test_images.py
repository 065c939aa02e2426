"""Sizes and tokens of images, and files that are none."""

from __future__ import annotations

import struct
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer.recipe import ImageError, VisionGrid, inspect_image, shown_size

sides = st.integers(1, 8192)


@given(width=sides, height=sides, detail=st.sampled_from(["low", "high", "original", "auto"]))
def test_an_image_is_whole_patches_within_the_token_budget(width: int, height: int, detail: str) -> None:
    grid = VisionGrid()
    size = shown_size(width, height, detail)
    assert size.width % grid.patch == 0 and size.height % grid.patch == 0
    assert min(size.width, size.height) >= grid.patch
    assert size.tokens <= grid.max_tokens
    rows, columns = -(-size.height // grid.cell), -(-size.width // grid.cell)
    assert size.tokens == rows * (columns + 1) + 2


@given(width=sides, height=sides)
def test_high_detail_is_never_smaller_than_low(width: int, height: int) -> None:
    assert shown_size(width, height, "low").tokens <= shown_size(width, height, "high").tokens + 64


def test_a_side_beyond_the_limit_is_refused_with_both_numbers() -> None:
    with pytest.raises(ImageError, match=r"9000x4.*8192") as caught:
        shown_size(9000, 4)
    assert caught.value.kind == "ImageDimensionsTooLarge"


def png(width: int, height: int) -> bytes:
    header = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + header + struct.pack(">I", zlib.crc32(header))


def jpeg(width: int, height: int) -> bytes:
    application = b"\xff\xe0" + struct.pack(">H", 16) + bytes(14)
    frame = b"\xff\xc2" + struct.pack(">HBHHB", 11, 8, height, width, 1) + bytes(3)
    return b"\xff\xd8" + application + b"\xff" + frame


FILES = {
    "image/png": png(640, 480),
    "image/gif": b"GIF89a" + struct.pack("<HH", 640, 480),
    "image/jpeg": jpeg(640, 480),
    "image/webp": b"RIFF\0\0\0\0WEBPVP8X"
    + bytes(8)
    + (639).to_bytes(3, "little")
    + (479).to_bytes(3, "little"),
}


@pytest.mark.parametrize("media_type", FILES)
def test_type_and_size_are_read_from_the_content(media_type: str) -> None:
    info = inspect_image(FILES[media_type])
    assert (info.media_type, info.width, info.height) == (media_type, 640, 480)


@pytest.mark.parametrize("form", [b"VP8L", b"VP8 "])
def test_both_other_forms_of_webp_are_read(form: bytes) -> None:
    if form == b"VP8L":
        body = b"\x2f" + struct.pack("<I", 639 | 479 << 14)
    else:
        body = b"\0\0\0\x9d\x01\x2a" + struct.pack("<HH", 640, 480)
    info = inspect_image(b"RIFF\0\0\0\0WEBP" + form + bytes(4) + body)
    assert (info.width, info.height) == (640, 480)


@pytest.mark.parametrize("media_type", FILES)
@given(keep=st.integers(0, 40))
def test_a_cut_file_is_one_clear_error(media_type: str, keep: int) -> None:
    data = FILES[media_type][:keep]
    try:
        info = inspect_image(data)
    except ImageError as error:
        assert error.kind in ("EmptyImage", "UnsupportedMediaType", "Decode")
    else:
        assert (info.width, info.height) == (640, 480)


@given(data=st.binary(max_size=60))
def test_no_bytes_break_the_reader(data: bytes) -> None:
    for begin in (b"", b"\xff\xd8\xff", b"GIF87a", b"RIFF....WEBP", b"\x89PNG\r\n\x1a\n"):
        try:
            inspect_image(begin + data)
        except ImageError as error:
            assert str(error)
