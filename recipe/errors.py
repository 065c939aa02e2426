"""What a caller of the recipe can get wrong: a request, a tokenizer, an image."""

from __future__ import annotations

from typing import Any

from deepinfer.errors import ArtifactError, RequestError


class ApiError(RequestError):
    """A request refused with the words and the body that the public API answers with.

    `message` is kept byte for byte in `body()`; `str()` is the same sentence on one line.
    """

    def __init__(self, message: str, *, http_status: int = 400) -> None:
        self.message = message
        super().__init__(message, http_status=http_status)

    def body(self) -> dict[str, Any]:
        """The JSON body of the answer: `{"error": {message, type, param, code}}`."""
        kind = "invalid_request_error"
        return {"error": {"message": self.message, "type": kind, "param": None, "code": kind}}


class SchemaError(ApiError):
    """The body is no request of this API: wrong JSON, a missing field, a wrong type, an unknown word."""


class ConversionError(ApiError):
    """The body has the right shape but asks for something that cannot be served."""


class TokenizerError(ArtifactError):
    """The tokenizer file is not one the prompt can be encoded with."""


class ImageError(RequestError):
    """An image cannot be shown to the model.

    `kind` is one of `EmptyImage`, `UnsupportedMediaType`, `Decode`, `ImageDimensionsTooLarge`; none of them
    is worth a retry.
    """

    retryable = False

    def __init__(self, kind: str, what: str, **details: Any) -> None:
        self.kind = kind
        super().__init__(what, **details)
