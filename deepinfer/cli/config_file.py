"""Options of a command from a TOML file with the flags' names, and a listing of where each value came from."""

from __future__ import annotations

import difflib
import tomllib
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from deepinfer.errors import SpecError

_ORIGINS = {
    ParameterSource.COMMANDLINE: "flag",
    ParameterSource.ENVIRONMENT: "environment",
    ParameterSource.DEFAULT_MAP: "file",
}
_NOT_IN_FILES = frozenset({"config", "print_config", "help"})


def config_option(command: Any) -> Any:
    """Add `--config FILE`; a flag and an environment variable win over the file, the file over the default."""
    return click.option("--config", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE", is_eager=True,
                        callback=_read, expose_value=False,
                        help="TOML file with the names of these flags, for example `max-queue = 64`.")(command)


def print_config_option(command: Any) -> Any:
    """Add `--print-config`; the command itself calls `print_config`."""
    return click.option("--print-config", "print_config", is_flag=True,
                        help="Print every option with its value and where it came from, and end.")(command)


def print_config(context: click.Context) -> None:
    """One line an option: `name = value  # origin`, readable as a config file."""
    for parameter in context.command.params:
        if not isinstance(parameter, click.Option):
            continue
        name = parameter.name
        if name is None or name in _NOT_IN_FILES or name not in context.params:
            continue
        value = context.params[name]
        source = context.get_parameter_source(name)
        origin = _ORIGINS.get(source, "default") if source is not None else "default"
        if origin == "environment":
            origin += f" {context.auto_envvar_prefix}_{name.upper()}"
        shown = f"{name.replace('_', '-')} = {_toml(value)}"
        click.echo(f"{'# ' if value is None else ''}{shown}  # {origin}")


def _read(context: click.Context, parameter: click.Parameter, file: Path | None) -> None:
    if file is None:
        return
    try:
        found = tomllib.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise SpecError("there is no such file", where=file, next_step="check --config") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SpecError("not a TOML file", where=file, found=error) from None
    options = {p.name: p for p in context.command.params if isinstance(p, click.Option) and p.name is not None}
    known = [name for name in options if name not in _NOT_IN_FILES]
    values: dict[str, Any] = {}
    for key, value in found.items():
        name = key.replace("-", "_")
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            raise SpecError("unknown option", where=f"{file}: {key}", found=key,
                            next_step=f"did you mean {near[0].replace('_', '-')}?" if near else "see --help")
        if isinstance(value, dict):
            raise SpecError("an option is no table", where=f"{file}: {key}", next_step=f"write `{key} = value`")
        try:
            options[name].type_cast_value(context, value)
        except click.BadParameter as error:
            raise SpecError("not a value of this option", where=f"{file}: {key}", found=error.message.rstrip("."),
                            next_step="see --help") from None
        values[name] = value
    context.default_map = {**(context.default_map or {}), **values}


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return str(value)
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_toml(item) for item in value) + "]"
    return "unset" if value is None else '"' + str(value).replace("\\", "\\\\").replace('"', '\\"') + '"'
