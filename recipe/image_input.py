"""Images as the three APIs name them, checked as far as the request alone allows."""

from __future__ import annotations

import base64
import binascii

from deepinfer.recipe.conversation import ImageSource
from deepinfer.recipe.errors import ConversionError

LONGEST_URL = 8_192
DETAILS = ("low", "high", "original", "auto")
MEDIA_TYPES = ("image/jpeg", "image/png", "image/gif", "image/webp")
_DATA_MARK = "base64,"


def image_from_url(url: str, detail: str | None, path: str) -> ImageSource:
    """An http(s) address or a base64 data URL.

    Raises:
        ConversionError: neither of the two, too long, or the data is not base64.
    """
    detail = detail or "high"
    if url[:4].lower() == "http":
        length = len(url.encode())
        if length > LONGEST_URL:
            raise ConversionError(
                f"{path}: external link length {length} too long, max link length {LONGEST_URL}. "
                "Consider passing file data directly with base64 data url instead."
            )
        return ImageSource(path, detail, url=url)
    _, mark, data = url.partition(_DATA_MARK)
    if not mark:
        raise ConversionError(f"{path}: Unsupported image_url format")
    _check_base64(data, path)
    return ImageSource(path, detail, data_url=url)


def image_from_base64(media_type: str, data: str, path: str) -> ImageSource:
    """An image whose type and base64 data stand apart.

    Raises:
        ConversionError: the type is not one of JPEG, PNG, GIF and WebP, or the data is not base64.
    """
    if media_type.lower() not in MEDIA_TYPES:
        raise ConversionError(
            f"{path}: You have uploaded an unsupported image. Please make sure your image is valid and has "
            "one of the following formats: webp, png, jpeg, and gif."
        )
    data = _padded(data)
    _check_base64(data, path)
    return ImageSource(path, data_url=f"data:{media_type.lower()};{_DATA_MARK}{data}")


def file_id_refused(path: str) -> ConversionError:
    """The error for an image that would have to come from a file service."""
    return ConversionError(f"{path}: file_id is not supported. Pass the image as a base64 data url instead.")


def image_refused(role: str) -> ConversionError:
    """The error for an image in a message that cannot hold one."""
    return ConversionError(f"Image in {role} message is not supported")


def _padded(data: str) -> str:
    """Padding brought to the right length; data without any padding stays as it is."""
    bare = data.rstrip("=")
    if bare == data or len(bare) % 4 == 1:
        return data
    return bare + "=" * (-len(bare) % 4)


def _check_base64(data: str, path: str) -> None:
    try:
        base64.b64decode(_padded(data), validate=True)
    except (binascii.Error, ValueError):
        raise ConversionError(f"{path}: Invalid base64 data") from None
