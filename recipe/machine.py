"""The state machine that reads an answer: reasoning, content, JSON output, tool calls, stop sequences.

Results do not depend on how the answer is cut: only text that may still be part of a pattern is held back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum, auto

from deepinfer.recipe.conversation import InitialStage, ParsingOptions, Tool
from deepinfer.recipe.json_text import escaped
from deepinfer.recipe.ledger import Channel, TokenLedger
from deepinfer.recipe.lenient import LenientCalls, LenientJson, OpenerTest
from deepinfer.recipe.signals import CallBegan, CallPiece, ContentText, Part, ReasoningText, Repair, Signal
from deepinfer.recipe.window import Marker, Pattern, Window


class Stage(Enum):
    REASONING = auto()
    CONTENT = auto()
    JSON = auto()
    AFTER_JSON = auto()
    AFTER_CALLS = auto()
    CALLS = auto()
    CALL_NAME = auto()
    ARGUMENTS = auto()
    PARAMETER_NAME = auto()
    PARAMETER_TYPE = auto()
    TEXT_VALUE = auto()
    JSON_VALUE = auto()
    FINISHED = auto()


@dataclass(frozen=True)
class Rule:
    """Where `pattern` completes, `act` gets the matched text and the machine goes to stage `to`."""

    pattern: Pattern
    to: Stage
    act: Callable[[str], Iterator[Signal]]


REASONING_END = Pattern("", Marker.THINK_END, newlines=True)
EXTRA_THINK_END = Pattern("", Marker.THINK_END)
CALLS_OPEN = Pattern("<", Marker.DSML, newlines=True)
TAG_CLOSE = Pattern("</", Marker.DSML)
CALLS_CLOSE = tuple(Pattern("</", Marker.DSML, tag) for tag in ("tool_calls>", " calls>"))
INVOKE = Pattern('invoke name="')
PARAMETER = Pattern("parameter name=")
JSON_OPEN = tuple(map(Pattern, ("```json\n", "```\n")))
JSON_BARE = tuple(map(Pattern, ("{", "[")))
JSON_FENCE = Pattern("\n```")


class AnswerMachine:
    """Reads one answer.

    Args:
        ledger: told which part of the answer every token belongs to.
        by_id: the answer arrives as token ids, so only real ids are markers.
        repair: read malformed calls for what they mean, instead of exactly as the original does.
        tools: declared tools; repair uses their schemas.

    Attributes:
        stop_sequence: the stop sequence that ended the answer.
        repairs: what repair mode corrected.
    """

    def __init__(
        self,
        options: ParsingOptions,
        ledger: TokenLedger,
        *,
        by_id: bool,
        repair: bool = False,
        tools: tuple[Tool, ...] = (),
    ) -> None:
        self.options = options
        self._ledger = ledger
        self.window = Window(by_id=by_id)
        self.stop_sequence: str | None = None
        self.has_reasoning = False
        self.calls = 0
        self.repairs: list[Repair] = []
        inside = options.starts_in_tool_calls
        self._lenient = LenientCalls(self.window, tools, self.repairs, inside=inside) if repair else None
        self._lenient_json = LenientJson() if repair else None
        self._opener = OpenerTest() if repair else None
        self._name = ""
        self._has_parameters = False
        self._padded = False
        self._trims = False
        self._stage = Stage.CONTENT
        self._rules: tuple[Rule, ...] = ()
        self._rules_of_stage: dict[Stage, tuple[Rule, ...]] = {}
        self._enter(*self._first_stage())

    @property
    def finished(self) -> bool:
        """Whether nothing that follows can still be seen."""
        return self._stage is Stage.FINISHED

    def _first_stage(self) -> tuple[Stage, bool]:
        initial = self.options.initial_stage
        if self.options.starts_in_tool_calls:
            return Stage.CALLS, False
        if initial is InitialStage.REASONING_START or initial is InitialStage.REASONING_CONTINUATION:
            return Stage.REASONING, initial is InitialStage.REASONING_START
        return Stage.CONTENT, initial is None

    def _enter(self, stage: Stage, trims: bool = False) -> None:
        self._stage = stage
        self._trims = trims
        self._padded = False
        if stage not in self._rules_of_stage:
            self._rules_of_stage[stage] = self._rules_of(stage)
        self._rules = self._rules_of_stage[stage]

    def _rules_of(self, stage: Stage) -> tuple[Rule, ...]:
        """The rules of a stage; where two complete at one place the earlier in the list wins."""
        stops = [Rule(Pattern(stop), Stage.FINISHED, self._stop) for stop in self.options.stop_sequences]
        opens = [Rule(CALLS_OPEN, Stage.CALLS, _nothing)] if self.options.parse_tool_calls else []
        if stage is Stage.REASONING:
            return (*opens, Rule(REASONING_END, Stage.CONTENT, _nothing))
        if stage is Stage.CONTENT:
            extra = Rule(EXTRA_THINK_END, Stage.CONTENT, _nothing)
            if self.options.parse_json_output:
                fences = [Rule(pattern, Stage.JSON, _nothing) for pattern in JSON_OPEN]
                bare = [Rule(pattern, Stage.JSON, self._content) for pattern in JSON_BARE]
                return (*fences, *bare, *opens, extra)
            return (*stops, *opens, extra)
        if stage is Stage.JSON:
            return (*stops, Rule(JSON_FENCE, Stage.AFTER_JSON, _nothing))
        if stage in (Stage.AFTER_JSON, Stage.AFTER_CALLS):
            return tuple(opens)
        return self._call_rules(stage)

    def _call_rules(self, stage: Stage) -> tuple[Rule, ...]:
        if stage is Stage.CALLS:
            closes = [Rule(pattern, Stage.FINISHED, _nothing) for pattern in CALLS_CLOSE]
            return (Rule(INVOKE, Stage.CALL_NAME, _nothing), *closes)
        if stage is Stage.CALL_NAME:
            return (Rule(Pattern('"'), Stage.ARGUMENTS, self._begin_call),)
        if stage is Stage.ARGUMENTS:
            begin = Rule(PARAMETER, Stage.PARAMETER_NAME, self._begin_parameter)
            return (begin, Rule(TAG_CLOSE, Stage.CALLS, self._end_call))
        if stage is Stage.PARAMETER_NAME:
            return (Rule(Pattern(" "), Stage.PARAMETER_TYPE, self._end_name),)
        if stage is Stage.PARAMETER_TYPE:
            text = Rule(Pattern('true">'), Stage.TEXT_VALUE, self._quote)
            return (text, Rule(Pattern('false">'), Stage.JSON_VALUE, _nothing))
        if stage is Stage.TEXT_VALUE:
            return (Rule(TAG_CLOSE, Stage.ARGUMENTS, self._unquote),)
        if stage is Stage.JSON_VALUE:
            return (Rule(TAG_CLOSE, Stage.ARGUMENTS, self._end_value),)
        return ()

    def run(self) -> Iterator[Signal]:
        """Signals for all text of the window that is certain."""
        while self.window.left and not self.finished:
            if self._lenient is not None and self._stage is Stage.CALLS:
                yield from self._lenient.run()
                self._ledger.advance(self.window.offset, None)
                self.calls = self._lenient.calls
                if not self._lenient.closed:
                    return
                self._enter(Stage.AFTER_CALLS)
                continue
            if self._trims and self._drop_newline():
                continue
            found = self._earliest()
            if found is None or self._undecided(found):
                held = max((rule.pattern.held(self.window) for rule in self._rules), default=0)
                if found is not None:
                    held = max(held, len(self.window.text) - self._first_begin())
                yield from self._unmatched(self.window.take(len(self.window.text) - held))
                return
            start, end, rule = found
            yield from self._unmatched(self.window.take(start))
            matched = self.window.take(end)
            came_from = self._stage
            yield from rule.act(matched)
            self._ledger.advance(self.window.offset, None)
            self._enter(rule.to, trims=rule.to is Stage.CONTENT and came_from is Stage.REASONING)
        if self.finished:
            self.window.take(len(self.window.text))

    def finish(self, *, complete: bool) -> Iterator[Signal]:
        """Signals for what was held back.

        Args:
            complete: the model ended its answer itself; repair closes calls only then.
        """
        if self._opener is not None:
            self._opener.final = True
        yield from self.run()
        if self._lenient is not None and self._stage is Stage.CALLS:
            yield from self._lenient.finish(complete=complete)
            self.calls = self._lenient.calls
        elif not self.finished:
            yield from self._unmatched(self.window.take(len(self.window.text)))

    def _drop_newline(self) -> bool:
        """At the start of a part a line feed vanishes, unless a pattern completes with it."""
        window = self.window
        self._trims = window.text[window.start] == "\n"
        if not self._trims or self._earliest(window.start + 1) is not None:
            return False
        window.take(window.start + 1)
        self._ledger.advance(window.offset, None)
        return True

    def _earliest(self, limit: int | None = None) -> tuple[int, int, Rule] | None:
        """The pattern that completes first, with the rule's place breaking ties."""
        best: tuple[int, int, Rule] | None = None
        end = len(self.window.text) if limit is None else limit
        for rule in self._rules:
            found = rule.pattern.find(self.window, end)
            while found is not None and self._refused(rule.pattern, found):
                found = rule.pattern.find(self.window, end, found[1])
            if found is not None and (best is None or found[1] < best[1]):
                best = (*found, rule)
                end = found[1]
        return best

    def _refused(self, pattern: Pattern, found: tuple[int, int]) -> bool:
        """Whether repair mode takes this occurrence for text."""
        if pattern is CALLS_OPEN and self._opener is not None:
            return self._opener.opens(self.window.text[found[1] :]) is False
        if pattern is JSON_FENCE and self._lenient_json is not None:
            return self._lenient_json.inside_after(self.window.text[self.window.start : found[0]])
        return False

    def _undecided(self, found: tuple[int, int, Rule]) -> bool:
        """Whether this is an opening marker whose tag name is still to come; what completes behind it has to wait."""
        _start, end, rule = found
        opener = self._opener if rule.pattern is CALLS_OPEN else None
        return opener is not None and opener.opens(self.window.text[end:]) is None

    def _first_begin(self) -> int:
        """Where the first of all patterns that have completed begins."""
        end = len(self.window.text)
        found = [rule.pattern.find(self.window, end) for rule in self._rules]
        return min((place[0] for place in found if place is not None), default=end)

    def _unmatched(self, text: str) -> Iterator[Signal]:
        """What text between patterns means in this stage; in the others it is skipped."""
        if not text:
            return
        stage = self._stage
        if stage is Stage.REASONING:
            self.has_reasoning = self.has_reasoning or bool(text.strip("\n"))
            yield ReasoningText(text, self._ledger.advance(self.window.offset, Channel.REASONING))
        elif stage is Stage.JSON:
            yield from self._content(text)
        elif stage is Stage.AFTER_JSON or (stage is Stage.CONTENT and self.options.parse_json_output):
            # one space for a run of prose, however the run is cut
            if not self._padded:
                self._padded = True
                yield ContentText(" ")
        elif stage is Stage.CONTENT:
            yield ContentText(text, self._ledger.advance(self.window.offset, Channel.CONTENT))
        elif stage is Stage.CALL_NAME:
            self._name += text
        elif stage is Stage.PARAMETER_NAME:
            yield CallPiece(self.calls - 1, Part.NAME, text, text)
        elif stage is Stage.TEXT_VALUE:
            yield CallPiece(self.calls - 1, Part.VALUE, escaped(text), text)
        elif stage is Stage.JSON_VALUE:
            yield CallPiece(self.calls - 1, Part.VALUE, text, text)
        self._ledger.advance(self.window.offset, None)

    def _content(self, text: str) -> Iterator[Signal]:
        if self._lenient_json is not None:
            self._lenient_json.advance(text)
        yield ContentText(text, self._ledger.advance(self.window.offset, Channel.CONTENT))

    def _stop(self, matched: str) -> Iterator[Signal]:
        self.stop_sequence = matched
        yield from ()

    def _begin_call(self, _: str) -> Iterator[Signal]:
        yield CallBegan(self.calls, self._name)
        self.calls += 1
        self._name = ""
        self._has_parameters = False

    def _end_call(self, _: str) -> Iterator[Signal]:
        yield CallPiece(self.calls - 1, Part.END, "}" if self._has_parameters else "{}")

    def _begin_parameter(self, _: str) -> Iterator[Signal]:
        yield CallPiece(self.calls - 1, Part.NAME_BEGIN, ", " if self._has_parameters else "{")
        self._has_parameters = True

    def _end_name(self, _: str) -> Iterator[Signal]:
        yield CallPiece(self.calls - 1, Part.VALUE_BEGIN, ": ")

    def _quote(self, _: str) -> Iterator[Signal]:
        yield CallPiece(self.calls - 1, Part.VALUE, '"')

    def _unquote(self, _: str) -> Iterator[Signal]:
        yield CallPiece(self.calls - 1, Part.VALUE_END, '"')

    def _end_value(self, _: str) -> Iterator[Signal]:
        yield CallPiece(self.calls - 1, Part.VALUE_END, "")


def _nothing(_: str) -> Iterator[Signal]:
    yield from ()
