"""Repair mode: malformed calls read for what they mean, every correction noted."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from deepinfer.recipe.conversation import Tool
from deepinfer.recipe.json_text import escaped, parse_json, quoted
from deepinfer.recipe.signals import CallBegan, CallPiece, Part, Repair, Signal
from deepinfer.recipe.window import Marker, Pattern, Window

OPEN = Pattern("<", Marker.DSML)
CLOSE = Pattern("</", Marker.DSML)
_BLOCK_TAGS = ("tool_calls", "toolcalls", "calls")
_TAG_NAMES = (*_BLOCK_TAGS, "invoke", "parameter")
# white space between the tag token and the name of a tag
_LONGEST_INDENT = 8
# a tag that is still open after so many characters is none
_LONGEST_ATTRIBUTES = 4096
_TAG = re.compile(rf"\s{{0,{_LONGEST_INDENT}}}(\w+)((?:[^<>\"']|\"[^\"<\n]*\"|'[^'<\n]*')*)>")
_TAG_NAME = re.compile(rf"\s{{0,{_LONGEST_INDENT}}}(\w+)")
_ATTRIBUTE = re.compile(r"(\w+)\s*=\s*(?:\"([^\"]*)\"|'([^']*)'|([^\s>]+))")


def _tag_after(text: str, names: Sequence[str], *, final: bool) -> bool | None:
    """Whether one of the tag names follows; None while that cannot be told."""
    found = _TAG_NAME.match(text)
    if found is not None and (found.end() < len(text) or final):
        return found.group(1) in names
    begun = text.lstrip()
    if final or len(text) - len(begun) > _LONGEST_INDENT:
        return False
    return None if any(name.startswith(begun) for name in names) else False


class OpenerTest:
    """Whether `<` and the DSML token open calls: only with a known tag behind them, not when prose mentions it."""

    def __init__(self) -> None:
        self.final = False

    def opens(self, text: str) -> bool | None:
        return _tag_after(text, (*_BLOCK_TAGS, "invoke"), final=self.final)


class LenientJson:
    """Follows JSON text to tell a fence inside a string from one behind the JSON."""

    def __init__(self) -> None:
        self._inside = False
        self._escaped = False

    def advance(self, text: str) -> None:
        for letter in text:
            if self._escaped:
                self._escaped = False
            elif letter == "\\":
                self._escaped = self._inside
            elif letter == '"':
                self._inside = not self._inside

    def inside_after(self, text: str) -> bool:
        """Whether a string is open after the text so far and `text`."""
        ahead = LenientJson()
        ahead._inside, ahead._escaped = self._inside, self._escaped
        ahead.advance(text)
        return ahead._inside


class LenientCalls:
    """Reads the inside of a call block.

    Args:
        inside: the prompt has opened the block, so the answer starts behind its tag.

    Attributes:
        calls: how many calls have begun.
        closed: the block has ended; text after it is not taken.
    """

    def __init__(self, window: Window, tools: Sequence[Tool], repairs: list[Repair], *, inside: bool) -> None:
        self.window = window
        self.repairs = repairs
        self.calls = 0
        self.closed = False
        self._schemas = {tool.name: tool.parameters.get("properties", {}) for tool in tools}
        self._tool = ""
        self._in_call = False
        self._seen: set[str] = set()
        self._parameter: str | None = None
        self._mode = ""
        self._value = ""
        self._skips = False
        self._at_opener = not inside

    def run(self) -> Iterator[Signal]:
        """Signals for all complete tags and certain text."""
        self.closed = False
        while self.window.left and not self.closed:
            before = self.window.offset
            if self._parameter is not None:
                yield from self._read_value(final=False)
            else:
                yield from self._read_tag(final=False)
            if self.window.offset == before and not self.closed:
                return

    def finish(self, *, complete: bool) -> Iterator[Signal]:
        """What is left at the end; an answer that the model ended itself gets its open brackets closed."""
        yield from self.run()
        if self.closed:
            return
        if self._parameter is not None:
            yield from self._take_value(len(self.window.text))
            if complete:
                self._note("unclosed parameter", self._parameter)
                yield from self._end_value()
            elif self._value and not self._skips:
                yield CallPiece(self.calls - 1, Part.VALUE, self._value, self._value)
        self.window.take(len(self.window.text))
        if self._in_call and complete:
            self._note("unclosed call", self._tool)
            yield from self._end_call()

    def _note(self, kind: str, detail: str) -> None:
        self.repairs.append(Repair(self.calls - 1, kind, detail))

    def _next_tag(self) -> tuple[int, int, bool] | None:
        """(start, end of the marker, closing) of the next tag, open or close."""
        limit = len(self.window.text)
        found = [(OPEN.find(self.window, limit), False), (CLOSE.find(self.window, limit), True)]
        places = [(place[0], place[1], closing) for place, closing in found if place is not None]
        return min(places) if places else None

    def _read_tag(self, *, final: bool) -> Iterator[Signal]:
        window = self.window
        if self._at_opener:
            # the opening marker itself has been read: its tag name comes first
            _start, end, closing = window.start, window.start, False
        else:
            place = self._next_tag()
            if place is None:
                held = max(OPEN.held(window), CLOSE.held(window))
                window.take(len(window.text) - held)
                return
            _start, end, closing = place
        tag = _TAG.match(window.text, end, end + _LONGEST_ATTRIBUTES)
        if tag is None:
            if self._next_marker_after(end) or len(window.text) - end >= _LONGEST_ATTRIBUTES:
                self._at_opener = False
                window.take(end)
            return
        self._at_opener = False
        window.take(tag.end())
        yield from self._tag(tag.group(1), tag.group(2), closing)

    def _next_marker_after(self, place: int) -> bool:
        limit = len(self.window.text)
        return any(pattern.find(self.window, limit, place) for pattern in (OPEN, CLOSE))

    def _tag(self, name: str, attributes: str, closing: bool) -> Iterator[Signal]:
        found = {
            key: first or second or third for key, first, second, third in _ATTRIBUTE.findall(attributes)
        }
        if name in _BLOCK_TAGS:
            if closing:
                yield from self._end_call()
                self.closed = True
                self._at_opener = True
        elif name == "invoke":
            yield from self._end_call()
            if not closing and "name" in found:
                yield CallBegan(self.calls, found["name"])
                self.calls += 1
                self._tool, self._in_call, self._seen = found["name"], True, set()
        elif name == "parameter" and not closing and self._in_call and "name" in found:
            yield from self._begin_parameter(found["name"], found.get("string"), attributes)

    def _begin_parameter(self, name: str, string: str | None, attributes: str) -> Iterator[Signal]:
        if attributes != f' name="{name}" string="{string}"' or string not in ("true", "false"):
            self._note("attributes", attributes.strip())
        self._parameter, self._value = name, ""
        self._skips = name in self._seen
        if self._skips:
            self._note("duplicate parameter", name)
            return
        yield CallPiece(self.calls - 1, Part.NAME_BEGIN, ", " if self._seen else "{")
        self._seen.add(name)
        yield CallPiece(self.calls - 1, Part.NAME, quoted(name), f'"{name}"')
        yield CallPiece(self.calls - 1, Part.VALUE_BEGIN, ": ")
        self._mode = self._mode_of(name, string)
        if self._mode == "text":
            yield CallPiece(self.calls - 1, Part.VALUE, '"')

    def _mode_of(self, name: str, string: str | None) -> str:
        """`text` streams; `json`, `string` (a JSON string is due) and `guess` wait for the whole value."""
        known = self._types(name)
        if known == {"string"}:
            return "string" if string == "false" else "text"
        if known and "string" not in known:
            return "json"
        return {"true": "text", "false": "json"}.get((string or "").lower(), "guess")

    def _types(self, name: str) -> set[str]:
        properties = self._schemas.get(self._tool)
        schema = properties.get(name) if isinstance(properties, dict) else None
        declared = schema.get("type") if isinstance(schema, dict) else None
        if isinstance(declared, str):
            return {declared}
        return {item for item in declared if isinstance(item, str)} if isinstance(declared, list) else set()

    def _read_value(self, *, final: bool) -> Iterator[Signal]:
        window = self.window
        search = window.start
        while True:
            place = self._value_end(search)
            if place is None:
                held = max(OPEN.held(window), CLOSE.held(window))
                yield from self._take_value(len(window.text) - held)
                return
            start, end, ends = place
            if ends is None:
                yield from self._take_value(start)
                return
            if ends:
                yield from self._take_value(start)
                yield from self._end_value()
                return
            self._note("marker in value", self._parameter or "")
            search = end

    def _value_end(self, search: int) -> tuple[int, int, bool | None] | None:
        """The next marker, and whether it ends the value: any closing tag or the begin of the next tag."""
        window, limit = self.window, len(self.window.text)
        found = [(OPEN.find(window, limit, search), False), (CLOSE.find(window, limit, search), True)]
        places = [(place[0], place[1], closing) for place, closing in found if place is not None]
        if not places:
            return None
        start, end, closing = min(places)
        names = _TAG_NAMES if closing else ("invoke", "parameter")
        return start, end, _tag_after(window.text[end:], names, final=False)

    def _take_value(self, end: int) -> Iterator[Signal]:
        text = self.window.take(end)
        if self._skips or not text:
            return
        if self._mode == "text":
            yield CallPiece(self.calls - 1, Part.VALUE, escaped(text), text)
        else:
            self._value += text

    def _end_value(self) -> Iterator[Signal]:
        """The value ends; its closing tag, if it is one, is read as any other tag."""
        name, self._parameter = self._parameter or "", None
        if self._skips:
            return
        if self._mode == "text":
            yield CallPiece(self.calls - 1, Part.VALUE_END, '"')
            return
        value = self._value.strip()
        if self._is_json(value):
            yield CallPiece(self.calls - 1, Part.VALUE, value, value)
        else:
            if self._mode != "guess":
                self._note("not JSON" if self._mode == "json" else "type", name)
            yield CallPiece(self.calls - 1, Part.VALUE, quoted(self._value), self._value)
        yield CallPiece(self.calls - 1, Part.VALUE_END, "")

    def _is_json(self, text: str) -> bool:
        try:
            value: Any = parse_json(text)
        except ValueError:
            return False
        return self._mode != "string" or isinstance(value, str)

    def _end_call(self) -> Iterator[Signal]:
        if self._in_call:
            self._in_call = False
            yield CallPiece(self.calls - 1, Part.END, "}" if self._seen else "{}")
