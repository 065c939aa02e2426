"""`deepinfer compile`, also installed as `deepinfer-compile`."""

from __future__ import annotations

import click


@click.command()
def main() -> None:
    """Compile an engine."""
