"""Reading a checkpoint's tokenizer.json, for everyone who needs the file as the `tokenizers` library sees it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from deepinfer.errors import ArtifactError

if TYPE_CHECKING:
    from tokenizers import Tokenizer


def read_tokenizer(file: Path) -> Tokenizer:
    """The tokenizer in `file`. Raises ArtifactError for a file that holds none, for instance a truncated one."""
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception for a file it cannot read
        raise ArtifactError(
            "the tokenizer cannot be read", where=file, found=error, next_step="fetch the file again"
        ) from None
