"""`deepinfer chat`: talk to an engine in the terminal."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from deepinfer.cli.failure import Command
from deepinfer.cli.placement import placement_options
from deepinfer.cli.subject import resolve_subject
from deepinfer.errors import RequestError

if TYPE_CHECKING:
    from deepinfer.runtime.llm import LLM
    from deepinfer.runtime.server.vocabulary import Vocabulary

_HELP = """/reset    forget the conversation
/think    reasoning on or off
/help     this text
/quit     end (also Ctrl-D); Ctrl-C ends an answer"""
_MODEL = "chat"


@click.command(cls=Command, context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("subject", metavar="ENGINE_OR_MODEL")
@click.option("--checkpoint", metavar="DIR_OR_HUB_ID",
              help="Weights for an engine. Default: those packed with it, else what it was compiled from.")
@click.option("--system", metavar="TEXT", help="System message of the conversation.")
@click.option("--thinking/--no-thinking", default=True, show_default=True, help="Whether answers begin with reasoning.")
@click.option("--temperature", type=click.FloatRange(0, 2), help="Without reasoning; with it the model wants 1.")
@click.option("--max-tokens", type=click.IntRange(min=1), metavar="N", help="Longest answer.")
@click.option("--seed", type=int, help="Makes answers repeatable.")
@placement_options
@click.option("--tokenizer", type=click.Path(path_type=Path, exists=True), metavar="PATH",
              help="tokenizer.json or its folder. Default: the checkpoint's.")
def main(subject: str, checkpoint: str | None, tokenizer: Path | None, seed: int | None, threads: int | None,
         cpus: str | None, numa: str | None, **options: Any) -> None:
    """Talk to ENGINE_OR_MODEL: an engine folder, or a checkpoint folder or hub id that is compiled first.

    \b
    Examples:
      deepinfer chat engines/my_engine --checkpoint ./my-checkpoint
      deepinfer chat ./my-checkpoint --no-thinking

    Answers go to standard output, reasoning and counts to standard error, so that
    `echo "Hello" | deepinfer chat ENGINE` prints the answer alone.

    \b
    In the conversation:
      /reset  forget it     /think  reasoning on or off     /quit  end
    """
    from deepinfer.runtime.llm import LLM
    from deepinfer.runtime.server.vocabulary import read_vocabulary

    found = resolve_subject(subject, checkpoint, {"max_model_len": None, "max_num_seqs": None})
    if found.compile is not None:
        found.compile.make()
    with LLM(found.engine, found.checkpoint, max_num_seqs=1, seed=seed, threads=threads, cpus=cpus, numa=numa,
             progress=sys.stderr.isatty()) as llm:
        vocabulary = read_vocabulary(tokenizer or llm.core.engine.checkpoint, None)
        vocabulary.conversation_dialect()
        conversation = Conversation(llm, vocabulary, **options)
        interactive = sys.stdin.isatty()
        if interactive:
            click.echo(f"{found.name}: /help for help", err=True)
        while (line := _read(interactive)) is not None:
            if not line.strip():
                continue
            if line.startswith("/"):
                if line.strip() == "/quit":
                    return
                conversation.command(line.strip())
                continue
            try:
                conversation.say(line)
            except RequestError as error:
                if not interactive:
                    raise
                click.echo(f"error: {error}", err=True)


def _read(interactive: bool) -> str | None:
    """The next line, None at the end of the input."""
    if not interactive:
        text = sys.stdin.read()  # a pipe brings one message, whatever its lines
        return text.strip() or None
    try:
        return input("> ")
    except EOFError:
        click.echo(err=True)
        return None
    except KeyboardInterrupt:
        click.echo("\n(Ctrl-D or /quit ends)", err=True)
        return ""


class Conversation:
    """Messages so far, and how the next one is answered."""

    def __init__(self, llm: LLM, vocabulary: Vocabulary, *, system: str | None, thinking: bool,
                 temperature: float | None, max_tokens: int | None) -> None:
        self._llm, self._vocabulary = llm, vocabulary
        self._system, self.thinking = system, thinking
        self._temperature, self._max_tokens = temperature, max_tokens
        self.messages: list[dict[str, str]] = []
        self._reset()

    def _reset(self) -> None:
        self.messages = [{"role": "system", "content": self._system}] if self._system else []

    def command(self, line: str) -> None:
        """A line that begins with a slash."""
        if line == "/reset":
            self._reset()
        elif line == "/think":
            self.thinking = not self.thinking
            click.echo(f"(reasoning {'on' if self.thinking else 'off'})", err=True)
        else:
            click.echo(_HELP, err=True)

    def say(self, text: str) -> None:
        """Ask and print the answer while it comes; Ctrl-C keeps what there is."""
        from deepinfer.recipe import (
            AnswerIdentity,
            ConversionOptions,
            Model,
            StreamProcessor,
            convert_request,
            resolve_max_tokens,
        )
        from deepinfer.runtime.sampling_params import SamplingParams

        dialect = self._vocabulary.conversation_dialect().name
        asked = [*self.messages, {"role": "user", "content": text}]
        body: dict[str, Any] = {"model": _MODEL, "messages": asked,
                                "thinking": {"type": "enabled" if self.thinking else "disabled"}}
        body |= {k: v for k, v in (("temperature", self._temperature), ("max_tokens", self._max_tokens))
                 if v is not None}
        request = convert_request("chat", body, ConversionOptions(models={_MODEL: Model(_MODEL, dialect)}))
        ids = self._vocabulary.prompt(request)
        plan = self._llm.plan
        params = SamplingParams(temperature=request.inference.temperature, top_p=request.inference.top_p,
                                max_tokens=resolve_max_tokens(request, len(ids), plan.max_model_len),
                                detokenize=False)
        answer = StreamProcessor(request, AnswerIdentity(_MODEL, _MODEL), tokenizer=self._vocabulary.tokenizer)
        shown = _Printer()
        shown.events(answer.ready(len(ids)))
        seen, reason, began, first = 0, "stop", time.monotonic(), None
        updates = self._llm.stream([ids], params)
        try:
            for update in updates:
                out = update.outputs[0]
                tokens, seen = out.token_ids[seen:], len(out.token_ids)
                first = first or time.monotonic()
                if out.finish_reason == "error":
                    raise RequestError(out.error or "the answer failed")
                if out.finish_reason == "stop" and tokens and tokens[-1] in self._llm.core.ends:
                    tokens = tokens[:-1]
                shown.events(answer.tokens(tokens))
                reason = out.finish_reason or reason
        except KeyboardInterrupt:
            reason = "stop"
        finally:
            updates.close()  # type: ignore[attr-defined]  # a generator: what still runs is aborted
        shown.events(answer.finish(reason))
        shown.end()
        message = answer.body()["choices"][0]["message"]
        self.messages = [*asked, {"role": "assistant", "content": message["content"]}]
        if first is not None and seen > 1:
            rate = (seen - 1) / max(1e-9, time.monotonic() - first)
            click.secho(f"({len(ids)} prompt tokens, first token after {first - began:.2f} s, {seen} tokens, "
                        f"{rate:.1f} tokens/s)", dim=True, err=True)


class _Printer:
    """Reasoning dimmed on standard error, the answer on standard output."""

    def __init__(self) -> None:
        self._reasoning = False

    def events(self, events: Any) -> None:
        for event in events:
            for choice in event.data.get("choices", ()):
                delta = choice["delta"]
                if delta.get("reasoning_content"):
                    self._reasoning = True
                    click.secho(delta["reasoning_content"], nl=False, dim=True, err=True)
                if delta.get("content"):
                    if self._reasoning:
                        self._reasoning = False
                        click.echo("\n", err=True)
                    click.echo(delta["content"], nl=False)

    def end(self) -> None:
        if self._reasoning:
            click.echo(err=True)
        click.echo()
