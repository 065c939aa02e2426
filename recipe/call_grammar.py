"""What a turn of tool calls looks like, as a grammar for constrained decoding.

The grammar is Lark text with the additions of llguidance: `<[id]>` is a control token, `%json` a JSON schema. A text
parameter stands as it is between its tags, so it may hold anything but a control token; every other value is JSON.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from deepinfer.recipe.conversation import Tool
from deepinfer.recipe.dialect import Dialect
from deepinfer.recipe.errors import ConversionError
from deepinfer.recipe.schemas import strict_schema

_SHARED = ("$defs", "definitions")
_DEEPEST = 16  # references behind references
_LABEL = "[a-zA-Z0-9]([a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?"
_OCTET = "(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_HEX = "[0-9a-fA-F]{1,4}"
_DATE, _TIME = "[0-9]{4}-[0-9]{2}-[0-9]{2}", r"[0-9]{2}:[0-9]{2}:[0-9]{2}(\.[0-9]{1,9})?(Z|[+-][0-9]{2}:[0-9]{2})"
FORMATS = {
    "email": rf"[a-zA-Z0-9_+-]+(\.[a-zA-Z0-9_+-]+)*@{_LABEL}(\.{_LABEL})+",
    "hostname": rf"{_LABEL}(\.{_LABEL})*",
    "ipv4": rf"{_OCTET}(\.{_OCTET}){{3}}",
    "ipv6": "|".join([f"({_HEX}:){{7}}{_HEX}", f"({_HEX}:){{1,7}}:", f":(:{_HEX}){{1,7}}", "::",
                      *(f"({_HEX}:){{1,{7 - k}}}(:{_HEX}){{1,{k}}}" for k in range(1, 7))]),
    "uuid": "[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
    "date": _DATE, "time": _TIME, "date-time": f"{_DATE}T{_TIME}",
}


def calls_grammar(tools: Sequence[Tool], dialect: Dialect, dsml_id: int, *, blanks: str, opened: bool = False,
                  answer: str | None = None) -> str:
    """The grammar of one or more calls of these tools, up to the end of their block.

    Tools that ask for `strict` get exactly their parameters, in the order of the schema; the others any.

    Args:
        dsml_id: of the control token inside the tags.
        blanks: regular expression of the blanks between two tokens of JSON.
        opened: the block's tag stands in the prompt. Otherwise the grammar goes on behind the control token of that
            tag: ``start`` begins with the rest of the tag.
        answer: what may stand instead of calls, as the body of a rule; the grammar then begins with the first token.

    Raises:
        ConversionError: a parameter's schema has no such grammar.
    """
    writer = _Writer(dialect, dsml_id, blanks)
    head = "" if opened else _quoted(f"{dialect.calls_tag}>\n") + " "
    start = "calls" if answer is None else 'answer | NEWLINE? NEWLINE? "<" dsml calls'
    if answer is not None:
        writer.rule("answer", answer)
    calls = " | ".join(writer.call(place, tool) for place, tool in enumerate(tools))
    writer.rule("calls", f"{head}(({calls}) NEWLINE)+ {writer.close(dialect.calls_tag)}")
    return "\n".join([f"start: {start}", *writer.rules, 'NEWLINE: "\\n"', f"dsml: <[{dsml_id}]>",
                      r"TEXT: /(?s:.*)<\//"]) + "\n"


def json_rule(schema: dict[str, Any], blanks: str) -> str:
    """The body of a rule for JSON of a schema; what the schema itself says of blanks does not count."""
    return f"%json {json.dumps({**schema, 'x-guidance': {'whitespace_pattern': blanks}}, ensure_ascii=False)}"


class _Writer:
    def __init__(self, dialect: Dialect, dsml_id: int, blanks: str) -> None:
        self.dialect, self.dsml_id, self.blanks = dialect, dsml_id, blanks
        self.rules: list[str] = []

    def rule(self, name: str, body: str) -> str:
        self.rules.append(f"{name}: {body}")
        return name

    def close(self, tag: str) -> str:
        return f'"</" dsml {_quoted(tag + ">")}'

    def call(self, place: int, tool: Tool) -> str:
        """The rule of one call of a tool."""
        tag = self.dialect.invoke_tag
        head = f'"<" dsml {_quoted(f"{tag} name={chr(34)}{tool.name}{chr(34)}>" + chr(10))}'
        if not tool.strict:
            return self.rule(f"call_{place}", f"{head} (({self._any()}) NEWLINE)* NEWLINE? {self.close(tag)}")
        schema = strict_schema(tool.parameters)
        shared = {name: schema[name] for name in _SHARED if name in schema}
        where = f"{tool.name}: parameters.properties"
        values = [self._parameter(name, f"p_{place}_{number}", _branches(part, shared, f"{where}.{name}"))
                  for number, (name, part) in enumerate((schema.get("properties") or {}).items())]
        return self.rule(f"call_{place}", f"{head} {' NEWLINE '.join(values) + ' NEWLINE' if values else 'NEWLINE?'} "
                                          f"{self.close(tag)}")

    def _parameter(self, name: str, rule: str, branches: list[tuple[bool, Any]]) -> str:
        choices = []
        for number, (is_text, value) in enumerate(branches):
            ahead = self._ahead(_quoted(name)[1:-1], is_text)
            if is_text:
                self.rule(f"{rule}_{number}".upper(), value)
                choices.append(f'{ahead} {f"{rule}_{number}".upper()} dsml {self._behind()}')
            else:
                self.rule(f"{rule}_{number}", json_rule(value, self.blanks))
                choices.append(f'{ahead} {rule}_{number} "</" dsml {self._behind()}')
        return self.rule(rule, " | ".join(choices))

    def _any(self) -> str:
        if not any(line.startswith("any:") for line in self.rules):
            self.rule("any_json", json_rule({}, self.blanks))
            tag = _quoted(f'{self.dialect.parameter_tag} name="')
            self.rule("NAME", r'/[^"\n]{1,200}/')
            self.rule("any", f'"<" dsml {tag} NAME {_quoted(chr(34) + " string=" + chr(34))} '
                             f'({_quoted("true" + chr(34) + ">")} TEXT dsml {self._behind()} | '
                             f'{_quoted("false" + chr(34) + ">")} any_json "</" dsml {self._behind()})')
        return "any"

    def _ahead(self, name: str, is_text: bool) -> str:
        kind = "true" if is_text else "false"
        tag = _quoted(f"{self.dialect.parameter_tag} name=")[1:-1]
        return f'"<" dsml "{tag}\\"{name}\\" string=\\"{kind}\\">"'

    def _behind(self) -> str:
        return _quoted(f"{self.dialect.parameter_tag}>")


def _branches(schema: Any, shared: dict[str, Any], where: str, depth: int = 0) -> list[tuple[bool, Any]]:
    """The kinds of value that a parameter may have: (True, a terminal) for texts, (False, a schema) for JSON."""
    if depth > _DEEPEST:
        raise ConversionError(f"{where}: the schema refers to itself without an end")
    if schema is True or schema == {}:
        return [(True, r"/(?s:.*)<\//"), (False, {})]
    if not isinstance(schema, dict):
        raise ConversionError(f"{where}: no value fits this schema")
    inner = _unwrapped(schema, shared, where)
    if inner is not None:
        return _branches(inner, shared, where, depth + 1)
    for word in ("anyOf", "oneOf"):
        if isinstance(schema.get(word), list):
            rest = {k: v for k, v in schema.items() if k not in (word, *_SHARED, "description", "title", "default")}
            found = [b for part in schema[word]
                     for b in _branches({**rest, **part} if isinstance(part, dict) else part, shared, where, depth + 1)]
            if word == "oneOf" and len({str(b) for b in found}) < len(found):
                raise ConversionError(f"{where}: oneOf with equal branches; use anyOf")
            return found
    return list(_plain_branches(schema, shared, where))


def _unwrapped(schema: dict[str, Any], shared: dict[str, Any], where: str) -> Any:
    """What a reference, or an allOf of one, stands for."""
    every = schema.get("allOf")
    if isinstance(every, list) and len(every) == 1:
        return {**{k: v for k, v in schema.items() if k != "allOf"}, **every[0]}
    reference = schema.get("$ref")
    if reference is None:
        return None
    kind, _, name = str(reference).removeprefix("#/").partition("/")
    if name not in shared.get(kind, {}):
        raise ConversionError(f"{where}: $ref {reference} leads nowhere; allowed are #/$defs/NAME and "
                              "#/definitions/NAME of the tool's parameters")
    return shared[kind][name]


def _plain_branches(schema: dict[str, Any], shared: dict[str, Any], where: str) -> Iterator[tuple[bool, Any]]:
    listed = [schema["const"]] if "const" in schema else schema.get("enum")
    if listed is not None:
        texts = [value for value in listed if isinstance(value, str)]
        others = [value for value in listed if not isinstance(value, str)]
        if texts:
            yield True, " | ".join(_quoted(f"{text}</") for text in texts)
        if others:
            yield False, {"enum": others}
        return
    kinds = schema.get("type")
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if kinds is None or "string" in kinds:
        yield True, _text_terminal(schema, where)
    rest = None if kinds is None else [kind for kind in kinds if kind != "string"]
    if rest is None:
        yield False, {**schema, **shared}
    elif rest:
        yield False, {**schema, **shared, "type": rest[0] if len(rest) == 1 else rest}


def _text_terminal(schema: dict[str, Any], where: str) -> str:
    """The terminal of a text together with the begin of its closing tag."""
    parts = []
    low, high = schema.get("minLength"), schema.get("maxLength")
    if low is not None or high is not None:
        parts.append(rf"/(?s:.{{{low or 0},{'' if high is None else high}}})<\//")
    if "pattern" in schema:
        parts.append(f"/{slashed(_whole_pattern(str(schema['pattern']), where))}<\\//")
    if "format" in schema:
        if schema["format"] not in FORMATS:
            raise ConversionError(f"{where}: unknown format {schema['format']!r}; allowed: {', '.join(FORMATS)}")
        parts.append(f"/{slashed('(' + FORMATS[schema['format']] + ')')}<\\//")
    return " & ".join(parts) or r"/(?s:.*)<\//"


def _whole_pattern(pattern: str, where: str) -> str:
    """A pattern that is searched for, as one that the whole text matches."""
    starts, ends = pattern.startswith("^"), pattern.endswith("$") and not pattern.endswith("\\$")
    if (starts or ends) and _has_top_alternation(pattern):
        raise ConversionError(f"{where}: a pattern with ^ or $ and alternatives needs a group around these: ^(a|b)$")
    core = pattern[1 if starts else 0 : -1 if ends else None]
    return f"{'' if starts else '(?s:.*)'}({core}){'' if ends else '(?s:.*)'}"


def _has_top_alternation(pattern: str) -> bool:
    depth, inside, place = 0, False, 0
    while place < len(pattern):
        letter = pattern[place]
        if letter == "\\":
            place += 1
        elif inside:
            inside = letter != "]"
        elif letter == "[":
            inside = True
        elif letter in "()":
            depth += 1 if letter == "(" else -1
        elif letter == "|" and depth == 0:
            return True
        place += 1
    return False


def slashed(pattern: str) -> str:
    """A pattern with every bare slash escaped, as a terminal between slashes needs it."""
    out, escaped = [], False
    for letter in pattern:
        out.append("\\/" if letter == "/" and not escaped else letter)
        escaped = letter == "\\" and not escaped
    return "".join(out).replace("\n", "\\n")


def _quoted(text: str) -> str:
    """A literal of the grammar."""
    return json.dumps(text, ensure_ascii=False)
