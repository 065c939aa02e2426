"""The `deepinfer` command."""

from __future__ import annotations

import click


@click.group()
def main() -> None:
    """Compile a described model into an engine, look at it, and run it."""
