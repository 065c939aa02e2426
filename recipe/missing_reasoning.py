"""Whether a conversation may leave out the reasoning of its tool turns."""

from __future__ import annotations

import re
from collections.abc import Sequence

from deepinfer.recipe.conversation import Assistant, Message, User
from deepinfer.recipe.errors import ConversionError

# an id issued by a turn whose reasoning came out empty: that turn has nothing to pass back
_EMPTY_THINKING_ID = re.compile(r"call_\d\d_ET_")


def check_reasoning(messages: Sequence[Message], field: str) -> None:
    """Refuse a tool-calling turn after the last user message that passes no reasoning back.

    Args:
        field: how the API calls the reasoning, for the message.
    """
    for message in reversed(messages):
        if isinstance(message, User):
            return
        if not isinstance(message, Assistant) or not message.calls or message.reasoning is not None:
            continue
        if not any(_EMPTY_THINKING_ID.match(call.id) for call in message.calls):
            raise ConversionError(f"The `{field}` in the thinking mode must be passed back to the API.")
