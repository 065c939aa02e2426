"""JSON schemas of tools and answers: the checks, and the form that `strict` turns them into."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from deepinfer.recipe.conversation import Constraint, ResponseFormat, Tool, ToolChoice
from deepinfer.recipe.errors import ConversionError
from deepinfer.recipe.json_text import compact_style, python_style

LONGEST_TOOL_NAME = 128
_TOOL_NAME = re.compile(r"[a-zA-Z0-9_-]+")
_SCHEMA_MAPS = ("properties", "$defs", "definitions", "patternProperties")
_SCHEMA_LISTS = ("anyOf", "allOf", "oneOf", "prefixItems")
_SCHEMAS = ("items", "not", "if", "then", "else", "contains")


def strict_schema(schema: Any) -> Any:
    """The schema with every object closed: no further properties, all of its own required, at every depth."""
    if not isinstance(schema, dict):
        return schema
    closed = dict(schema)
    for key in _SCHEMA_MAPS:
        if isinstance(closed.get(key), dict):
            closed[key] = {name: strict_schema(part) for name, part in closed[key].items()}
    for key in (*_SCHEMA_LISTS, "items"):
        if isinstance(closed.get(key), list):
            closed[key] = [strict_schema(part) for part in closed[key]]
    for key in _SCHEMAS:
        if isinstance(closed.get(key), dict):
            closed[key] = strict_schema(closed[key])
    properties = closed.get("properties")
    if closed.get("type") == "object" or isinstance(properties, dict):
        closed["additionalProperties"] = False
        closed["required"] = list(properties) if isinstance(properties, dict) else []
    return closed


def strict_tool(tool: Tool) -> Tool:
    """The tool with closed parameters where it asks for `strict`."""
    return replace(tool, parameters=strict_schema(tool.parameters)) if tool.strict else tool


def check_tool_name(name: str, path: str) -> None:
    """Refuse a name that is not 1 to 128 ASCII letters, digits, underscores and hyphens."""
    if not name:
        problem = "empty string. Expected a string with minimum length 1, but got an empty string instead."
    elif not _TOOL_NAME.fullmatch(name):
        problem = (
            "string does not match pattern. Expected a string that matches the pattern '^[a-zA-Z0-9_-]+$'."
        )
    elif len(name) > LONGEST_TOOL_NAME:
        problem = (
            f"string too long. Expected a string with maximum length {LONGEST_TOOL_NAME}, "
            f"but got a string with length {len(name)} instead."
        )
    else:
        return
    raise ConversionError(f"Invalid '{path}': {problem}")


def check_parameters(name: str, schema: dict[str, Any] | None) -> dict[str, Any]:
    """The parameters of a tool; none or `{}` means any.

    Raises:
        ConversionError: the schema does not describe an object.
    """
    if not schema:
        return {}
    if schema.get("type") != "object":
        found = python_style(schema.get("type"))
        raise ConversionError(
            f"Invalid schema for function '{name}': schema must be a JSON Schema of "
            f"'type: \"object\"', got 'type: {found}'."
        )
    return schema


def check_unique(tools: Sequence[Tool]) -> None:
    """Refuse two tools of one name."""
    if len({tool.name for tool in tools}) != len(tools):
        raise ConversionError("Tool names must be unique.")


def choose_tools(
    tools: Sequence[Tool], choice: str | None, named: str | None, thinking: bool
) -> tuple[tuple[Tool, ...], ToolChoice]:
    """The tools that the prompt shows and the choice that remains.

    Args:
        choice: auto, none or required; None is auto.
        named: the one tool that must be called.

    Raises:
        ConversionError: the named tool was not declared, or a call is forced in thinking mode.
    """
    if named is None and choice == "none":
        return (), ToolChoice.NONE
    if not tools:
        return (), ToolChoice.AUTO
    if named is not None:
        tools = [tool for tool in tools if tool.name == named]
        if not tools:
            raise ConversionError(
                f"Invalid value for 'tool_call': no function named '{named}' was specified "
                "in the 'tools' parameter."
            )
    elif choice != "required":
        return tuple(tools), ToolChoice.AUTO
    if thinking:
        raise ConversionError("Thinking mode does not support this tool_choice")
    return tuple(tools), ToolChoice.REQUIRED


def constraint_of(
    tools: Sequence[Tool], choice: ToolChoice, response_format: ResponseFormat
) -> Constraint | None:
    """The constraint for the sampler: a forced call first, then the response format, then possible calls."""
    if choice is ToolChoice.REQUIRED:
        return Constraint("tool_call_required", _tools_json(tools))
    if response_format.kind == "json_object":
        return Constraint("json", "")
    if response_format.kind == "json_schema":
        schema = response_format.schema
        return Constraint("json", compact_style(strict_schema(schema) if response_format.strict else schema))
    if response_format.kind == "regex":
        return Constraint("regex", response_format.regex or "")
    return Constraint("tool_call", _tools_json(tools)) if tools else None


def _tools_json(tools: Sequence[Tool]) -> str:
    listed: list[dict[str, Any]] = []
    for tool in tools:
        entry: dict[str, Any] = {
            "type": "function",
            "function": {
                "name": tool.name,
                "description": tool.description,
                "parameters": tool.parameters,
                "strict": tool.strict,
            },
        }
        if tool.deferred:
            entry["defer_loading"] = True
        listed.append(entry)
    return compact_style(listed)
