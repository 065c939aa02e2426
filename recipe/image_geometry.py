"""How large an image is shown to V4.1, and how many tokens that takes."""

from __future__ import annotations

import math
from dataclasses import dataclass

from deepinfer.recipe.errors import ImageError

LONGEST_SIDE = 8_192
LOW_DETAIL_SIDE = 512


@dataclass(frozen=True)
class VisionGrid:
    """The numbers of a vision tower that decide image sizes, as its config names them.

    Attributes:
        patch: pixels along a side of one patch.
        downsample: patches along a side of one token's cell.
        max_tokens: most tokens an image may take, marks included.
        min_pixels: smaller images are scaled up to this area.
    """

    patch: int = 14
    downsample: int = 3
    max_tokens: int = 1024
    min_pixels: int = 295_936

    @property
    def cell(self) -> int:
        return self.patch * self.downsample


@dataclass(frozen=True)
class ImageSize:
    """The image as it is shown: pixels, multiples of the patch, and its tokens."""

    width: int
    height: int
    tokens: int


def shown_size(width: int, height: int, detail: str = "high", grid: VisionGrid | None = None) -> ImageSize:
    """The size an image of `width` x `height` pixels is shown in.

    Low detail first fits the image into 512 x 512; then small images grow to the least area and images of too
    many tokens shrink to the largest whole cells of the same aspect.

    Raises:
        ImageError: no pixels, or a side beyond 8192.
    """
    if min(width, height) < 1:
        raise ImageError("EmptyImage", "the image has no pixels", found=f"{width}x{height}")
    if max(width, height) > LONGEST_SIDE:
        raise ImageError(
            "ImageDimensionsTooLarge",
            "the image is too large",
            found=f"{width}x{height}",
            allowed=f"sides up to {LONGEST_SIDE} pixels",
        )
    grid = grid or VisionGrid()
    if detail == "low" and max(width, height) > LOW_DETAIL_SIDE:
        scale = LOW_DETAIL_SIDE / max(width, height)
        width, height = max(1, round(width * scale)), max(1, round(height * scale))
    if width * height < grid.min_pixels:
        scale = math.sqrt(grid.min_pixels / (width * height))
        width, height = max(1, int(width * scale)), max(1, int(height * scale))
    padded = (math.ceil(width / grid.patch) * grid.patch, math.ceil(height / grid.patch) * grid.patch)
    if token_count(*padded, grid) > grid.max_tokens:
        padded = _largest_fit(width, height, grid)
    return ImageSize(*padded, token_count(*padded, grid))


def token_count(width: int, height: int, grid: VisionGrid) -> int:
    """Tokens of an image of the shown size: its cells, a line end per row, a begin and an end."""
    rows, columns = math.ceil(height / grid.cell), math.ceil(width / grid.cell)
    return rows * (columns + 1) + 2


def _largest_fit(width: int, height: int, grid: VisionGrid) -> tuple[int, int]:
    """The largest size whose cells fit: rows * (columns + 1) = budget, solved for the aspect, in whole patches."""
    budget = grid.max_tokens - 2
    aspect = height / width
    columns = math.sqrt(budget / aspect + 0.25) - 0.5
    rows = columns * aspect
    if columns < 1:
        return grid.cell, budget // 2 * grid.cell
    if rows < 1:
        return (budget - 1) * grid.cell, grid.cell
    scale = min(math.floor(columns) * grid.cell / width, math.floor(rows) * grid.cell / height)
    return (
        math.floor(width * scale / grid.patch) * grid.patch,
        math.floor(height * scale / grid.patch) * grid.patch,
    )
