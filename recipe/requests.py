"""One door for the three request types."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, TypeAlias

from deepinfer.errors import InternalError
from deepinfer.recipe.chat_request import convert_chat
from deepinfer.recipe.conversation import ConvertedRequest
from deepinfer.recipe.messages_request import convert_messages
from deepinfer.recipe.options import ConversionOptions
from deepinfer.recipe.responses_request import convert_responses

Body: TypeAlias = Mapping[str, Any] | str | bytes
APIS: Mapping[str, Callable[[Body, ConversionOptions | None], ConvertedRequest]] = MappingProxyType(
    {"chat": convert_chat, "responses": convert_responses, "messages": convert_messages}
)


def convert_request(api: str, body: Body, options: ConversionOptions | None = None) -> ConvertedRequest:
    """The neutral form of a body of `api`: chat, responses or messages.

    Raises:
        SchemaError: the body is not a request of this API.
        ConversionError: it asks for something that cannot be served.
    """
    if api not in APIS:
        raise InternalError(f"no API {api!r}; there are {', '.join(APIS)}")
    return APIS[api](body, options)
