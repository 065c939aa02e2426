"""How a command ends: exit codes, one sentence for a user's mistake, a traceback file for a bug of ours."""

from __future__ import annotations

import os
import shlex
import sys
import tempfile
import traceback
from collections.abc import Sequence
from typing import Any, NoReturn

import click

import deepinfer
from deepinfer.disk import of_the_machine
from deepinfer.errors import DeepInferError, InternalError

_INTERRUPTED = 130  # 128 + SIGINT, what shells report


class _Reporting(click.Command):
    """A command whose failures are one line on standard error and an exit code of `docs/errors.md`."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        **extra: Any,
    ) -> Any:
        if not standalone_mode:
            return super().main(args, prog_name, complete_var, standalone_mode=False, **extra)
        try:
            result = super().main(args, prog_name, complete_var, standalone_mode=False, **extra)
        except Exception as failure:
            _exit_after(failure)
        sys.exit(result if isinstance(result, int) else 0)


class Command(_Reporting):
    """A single command that reports failures."""


class Group(_Reporting, click.Group):
    """A command with subcommands that reports failures, its own and theirs."""

    command_class = Command


def _exit_after(failure: Exception) -> NoReturn:
    if isinstance(failure, click.exceptions.Abort):
        click.echo("interrupted", err=True)
        sys.exit(_INTERRUPTED)
    if isinstance(failure, click.UsageError):
        command = failure.ctx.command_path if failure.ctx is not None else "deepinfer"
        _fail(f"{failure.format_message().rstrip('.')}; see `{command} --help`", failure.exit_code)
    if isinstance(failure, click.ClickException):
        _fail(failure.format_message(), failure.exit_code)
    if isinstance(failure, BrokenPipeError):
        # The reader of our output has gone (`deepinfer info ... | head`): nothing is left to say to anyone.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    if isinstance(failure, OSError):
        failure = of_the_machine(failure) or failure
    if isinstance(failure, DeepInferError):
        _fail(str(failure), failure.exit_code)
    _fail(_bug(failure), InternalError.exit_code)


def _fail(sentence: str, exit_code: int) -> NoReturn:
    click.echo(f"error: {sentence}", err=True)
    sys.exit(exit_code)


def _bug(failure: Exception) -> str:
    """Write the traceback aside and name the file in the sentence that is left for the terminal."""
    summary = " ".join(f"{type(failure).__name__}: {failure}".split())
    handle, path = tempfile.mkstemp(prefix="deepinfer-traceback-", suffix=".txt")
    with open(handle, "w", encoding="utf-8") as file:
        file.write(f"{deepinfer.DISTRIBUTION} {deepinfer.__version__}\nPython {sys.version}\n")
        file.write(f"command: {shlex.join(sys.argv)}\n\n")
        file.writelines(traceback.format_exception(failure))
    return f"a bug in DeepInfer-AOT, not in your input: {summary}; please report it with {path}"
