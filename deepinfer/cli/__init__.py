"""The `deepinfer` command; one file per subcommand, each with a `main`."""

from __future__ import annotations

import click

import deepinfer

if getattr(deepinfer, "DISTRIBUTION", None) != "deepinfer-aot":
    raise SystemExit(
        "error: the package `deepinfer` in this environment is another project's and shadows DeepInfer-AOT; "
        "uninstall it, then reinstall `deepinfer-aot`, or use a fresh environment"
    )

from deepinfer.cli import bench as _bench
from deepinfer.cli import cache as _cache
from deepinfer.cli import chat as _chat
from deepinfer.cli import compile as _compile
from deepinfer.cli import doctor as _doctor
from deepinfer.cli import drift as _drift
from deepinfer.cli import explain as _explain
from deepinfer.cli import info as _info
from deepinfer.cli import profile as _profile
from deepinfer.cli import serve as _serve
from deepinfer.cli import tune as _tune
from deepinfer.cli.failure import Group


@click.group(cls=Group, invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(deepinfer.__version__, prog_name=deepinfer.DISTRIBUTION)
@click.pass_context
def main(context: click.Context) -> None:
    """Compile a described model into an engine, look at it, and run it.

    An engine is a Python package with compiled kernels, a launch table and a memory plan. It is
    made once, for one model and one target, and needs no compiler afterwards.

    \b
    First steps:
      deepinfer compile --model DIR_OR_HUB_ID --out engines/my_engine
      deepinfer info engines/my_engine --max-num-seqs 8 --max-model-len 4096
      deepinfer serve engines/my_engine --checkpoint DIR_OR_HUB_ID

    \b
    Exit codes: 0 done, 2 wrong option or model description, 3 does not fit, 4 compiler or driver,
    5 damaged or foreign file, 6 request refused, 70 a bug of ours, 130 interrupted.
    """
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


main.add_command(_compile.main, "compile")
main.add_command(_info.main, "info")
main.add_command(_explain.main, "explain")
main.add_command(_profile.main, "profile")
main.add_command(_serve.main, "serve")
main.add_command(_chat.main, "chat")
main.add_command(_bench.main, "bench")
main.add_command(_cache.main, "cache")
main.add_command(_doctor.main, "doctor")
main.add_command(_drift.main, "drift")
main.add_command(_tune.main, "tune")
