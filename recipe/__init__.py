"""Prompt, tool and message formats that go with the models: three APIs in, prompts and ids out, and answers back.

    from deepinfer.recipe import DIALECTS, convert_request, packaged_tokenizer, render

    request = convert_request("chat", body)
    prompt = render(request.conversation, DIALECTS[request.dialect])
    ids = packaged_tokenizer(request.dialect).encode_prompt(prompt)

`StreamProcessor` turns what the model answers into the events and the body of the same API. See `docs/recipe.md`.
"""

from __future__ import annotations

from deepinfer.recipe.answer import AnswerIdentity, Event, Finish, Usage
from deepinfer.recipe.call_grammar import calls_grammar
from deepinfer.recipe.conversation import (
    Assistant,
    Constraint,
    Conversation,
    ConvertedRequest,
    Effort,
    ImageSource,
    InferenceOptions,
    InitialStage,
    ParsingOptions,
    Reminder,
    ResponseFormat,
    System,
    Tool,
    ToolCall,
    ToolChoice,
    ToolResult,
    ToolsAdded,
    User,
)
from deepinfer.recipe.detokenize import StreamDecoder
from deepinfer.recipe.dialect import DIALECTS, V4, V41, ControlTokens, Dialect
from deepinfer.recipe.errors import ApiError, ConversionError, ImageError, SchemaError, TokenizerError
from deepinfer.recipe.image_bytes import ImageInfo, inspect_image
from deepinfer.recipe.image_geometry import ImageSize, VisionGrid, shown_size
from deepinfer.recipe.options import MODELS, ConversionOptions, Model
from deepinfer.recipe.processor import StreamProcessor
from deepinfer.recipe.prompt import Prompt
from deepinfer.recipe.render import render, render_fim
from deepinfer.recipe.requests import convert_request
from deepinfer.recipe.sampling import resolve_max_tokens
from deepinfer.recipe.signals import Repair
from deepinfer.recipe.tokenizer import RecipeTokenizer, derive_v41, packaged_tokenizer

__all__ = [
    "DIALECTS",
    "MODELS",
    "V4",
    "V41",
    "AnswerIdentity",
    "ApiError",
    "Assistant",
    "Constraint",
    "ControlTokens",
    "Conversation",
    "ConversionError",
    "ConversionOptions",
    "ConvertedRequest",
    "Dialect",
    "Effort",
    "Event",
    "Finish",
    "ImageError",
    "ImageInfo",
    "ImageSize",
    "ImageSource",
    "InferenceOptions",
    "InitialStage",
    "Model",
    "ParsingOptions",
    "Prompt",
    "RecipeTokenizer",
    "Reminder",
    "Repair",
    "ResponseFormat",
    "SchemaError",
    "StreamDecoder",
    "StreamProcessor",
    "System",
    "TokenizerError",
    "Tool",
    "ToolCall",
    "ToolChoice",
    "ToolResult",
    "ToolsAdded",
    "Usage",
    "User",
    "VisionGrid",
    "calls_grammar",
    "convert_request",
    "derive_v41",
    "inspect_image",
    "packaged_tokenizer",
    "render",
    "render_fim",
    "resolve_max_tokens",
    "shown_size",
]
