"""Tools of the Responses API: functions, namespaces of functions, and the one custom tool."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from deepinfer.recipe.conversation import Tool
from deepinfer.recipe.errors import ConversionError
from deepinfer.recipe.fields import Field
from deepinfer.recipe.options import REJECT
from deepinfer.recipe.prompt_texts import PROMPT_TEXTS
from deepinfer.recipe.schemas import check_parameters, check_tool_name, check_unique, strict_tool

APPLY_PATCH = "apply_patch"
NAMESPACE_MARK = "::"
WEB_SEARCH = "web_search"


@dataclass
class DeclaredTools:
    """What the request declares, in the forms that the prompt, the echo and the answer need."""

    tools: list[Tool] = field(default_factory=list)
    paths: list[tuple[str, str]] = field(default_factory=list)
    custom: list[str] = field(default_factory=list)
    web_search: list[str] = field(default_factory=list)
    echo: list[dict[str, Any]] = field(default_factory=list)

    def converted(self, web_search: str) -> list[Tool]:
        """The tools after every check; hosted tools other than web search are ignored as the API documents.

        Raises:
            ConversionError: a bad name or schema, an unknown custom tool, a refused web search.
        """
        for name in self.custom:
            if name != APPLY_PATCH:
                raise ConversionError(
                    f"Unsupported custom tool: '{name}'. Only '{APPLY_PATCH}' is supported."
                )
        if self.web_search and web_search == REJECT:
            raise ConversionError(f"{self.web_search[0]}: server tools are not supported")
        for name, path in self.paths:
            check_tool_name(name, path)
        check_unique(self.tools)
        for tool in self.tools:
            check_parameters(tool.name, tool.parameters)
        return [strict_tool(tool) for tool in self.tools]


def read_tools(root: Field) -> DeclaredTools:
    """The `tools` of a request."""
    declared = DeclaredTools()
    listed = root.optional("tools")
    for item in listed.items() if listed else ():
        kind = item.required("type").text()
        if kind == "function":
            tool = _read_function(item)
            declared.tools.append(tool)
            declared.paths.append((tool.name, f"{item.path}.name"))
            declared.echo.append(_function_echo(item))
        elif kind == "custom":
            name = item.required("name").text()
            declared.custom.append(name)
            declared.tools.append(_apply_patch())
            declared.echo.append({"type": "custom", "name": name})
        elif kind == "namespace":
            _read_namespace(item, declared)
        else:
            if kind.startswith(WEB_SEARCH):
                declared.web_search.append(item.path)
            declared.echo.append(dict(item.value))
    return declared


def qualified(namespace: str | None, name: str) -> str:
    """The name that the prompt shows for a function of a namespace."""
    return name if namespace is None else f"{namespace}{NAMESPACE_MARK}{name}"


def split_name(name: str) -> tuple[str | None, str]:
    """(namespace, name) of a name that the model called."""
    namespace, mark, bare = name.partition(NAMESPACE_MARK)
    return (namespace, bare) if mark else (None, name)


def _read_function(item: Field) -> Tool:
    return Tool(
        item.required("name").text(),
        item.text_at("description"),
        item.object_at("parameters") or {},
        item.flag_at("strict"),
    )


def _read_namespace(item: Field, declared: DeclaredTools) -> None:
    namespace = item.required("name").text()
    description = item.text_at("description")
    echo: list[dict[str, Any]] = []
    for member in item.required("tools").items():
        if member.required("type").text() != "function":
            echo.append(dict(member.value))
            continue
        tool = _read_function(member)
        shown = tool.description
        if description is not None:
            shown = f"{description}\n{tool.description or ''}"
        declared.tools.append(Tool(qualified(namespace, tool.name), shown, tool.parameters, tool.strict))
        declared.paths.append((tool.name, f"{member.path}.name"))
        echo.append(_function_echo(member))
    declared.echo.append({"type": "namespace", "name": namespace, "description": description, "tools": echo})


def _function_echo(item: Field) -> dict[str, Any]:
    keys = ("name", "description", "parameters", "strict")
    return {"type": "function", **{key: item.value.get(key) for key in keys}}


def _apply_patch() -> Tool:
    """The custom tool as the model sees it: a function with one string."""
    return Tool(APPLY_PATCH, PROMPT_TEXTS.apply_patch_description, dict(PROMPT_TEXTS.apply_patch_parameters))
