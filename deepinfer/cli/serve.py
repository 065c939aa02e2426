"""`deepinfer serve`: an engine behind the APIs of OpenAI and Anthropic clients."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import Any

import click

from deepinfer.cli.config_file import config_option, print_config, print_config_option
from deepinfer.cli.failure import Command
from deepinfer.cli.placement import NAMES as PLACEMENT
from deepinfer.cli.placement import placement_options
from deepinfer.cli.subject import Subject, resolve_subject
from deepinfer.errors import ArtifactError, SpecError, ToolchainError

KEY_VARIABLE = "DEEPINFER_API_KEY"
_ENGINE_OPTIONS = ("prefix_cache", "prefix_snapshots", "num_speculative_tokens", "schedule_drafts", "decode_stretch")
_LOOPBACK = ("127.0.0.1", "::1", "localhost")


@click.command(cls=Command, context_settings={"help_option_names": ["-h", "--help"],
                                              "auto_envvar_prefix": "DEEPINFER_SERVE"})
@click.argument("subject", metavar="ENGINE_OR_MODEL")
@click.option("--checkpoint", metavar="DIR_OR_HUB_ID",
              help="Weights for an engine. Default: those packed with it, else what it was compiled from.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on; the default is reachable "
              "from this machine only.")
@click.option("--port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="0 takes a free one.")
@click.option("--served-model-name", multiple=True, metavar="NAME",
              help="Name that clients ask for; can be repeated. Default: the folder's or hub id's own.")
@click.option("--api-key-file", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE",
              help=f"File with one API key a line. {KEY_VARIABLE} holds keys too, separated by commas. There is no "
              "flag for a key: it would show in the list of processes.")
@click.option("--max-model-len", type=click.IntRange(min=2), metavar="TOKENS",
              help="Longest prompt and answer together; at most what the engine was compiled for.")
@click.option("--max-num-seqs", type=click.IntRange(min=1), metavar="N",
              help="Requests that run at the same time; at most what the engine was compiled for.")
@click.option("--num-blocks", type=click.IntRange(min=1), metavar="N",
              help="Cache blocks. Default: enough for all requests, or half of the free memory.")
@placement_options
@click.option("--seed", type=int, help="Of requests that bring none. Default: from the system.")
@click.option("--prefix-cache/--no-prefix-cache", default=True, show_default=True,
              help="Keep what was computed for later requests that begin with the same tokens.")
@click.option("--prefix-snapshots", type=click.IntRange(min=0), metavar="N", help="Window snapshots kept for that. "
              "Default: four for each sequence, but no more than a tenth of the free memory.")
@click.option("--prefix-store", metavar="FOLDER",
              help="Keep cache blocks there, for this and other servers; may lie on a shared mount.")
@click.option("--store-quota", metavar="SIZE", help="Most bytes of the store, as 500GiB. Default: 64GiB.")
@click.option("--store-retention", metavar="CLASS=TIME,...", help="How long it keeps blocks at least. Default: "
              "agent=3d,chat=7d. Requests with tools are of the class agent; the header x-cache-class overrides that.")
@click.option("--store-backend", type=click.Choice(["auto", "threads", "io_uring", "usrbio", "mooncake"]),
              help="What moves its bytes; where it does not work, threads do. Default: auto. mooncake: a Mooncake "
              "store holds them, which MOONCAKE_CONFIG_PATH names.")
@click.option("--num-speculative-tokens", type=click.IntRange(min=0), metavar="N",
              help="Drafts verified in a step at most. Default: all that the engine drafts; 0: none.")
@click.option("--schedule-drafts/--no-schedule-drafts", default=True, show_default=True,
              help="Verify only as many as pay, by costs measured at the first start; else always all.")
@click.option("--decode-stretch", type=click.FloatRange(min=1, min_open=True), default=2.0, show_default=True,
              help="A step that reads prompts lasts at most so many times as long as one that only decodes.")
@click.option("--allow-priority/--no-allow-priority", default=False, show_default=True,
              help="Take the field `priority` of requests; without it such a request is refused.")
@click.option("--front-ends", type=click.IntRange(min=1, max=256), default=1, show_default=True, metavar="N",
              help="Processes that read and write for clients, beside the engine's. One carries about 5,000 tokens a "
              "second of streams.")
@click.option("--max-queue", type=click.IntRange(min=0), default=256, show_default=True, metavar="N",
              help="Requests that wait beside the running ones; further ones get 429.")
@click.option("--allow-origin", multiple=True, metavar="ORIGIN",
              help="Origin of web pages whose scripts may use the server, as https://chat.example; can be repeated, * "
              "allows all. Default: none but the server's own page.")
@click.option("--max-body", type=click.IntRange(min=1024), default=48 << 20, show_default=True, metavar="BYTES",
              help="Largest request.")
@click.option("--keep-alive", type=click.FloatRange(min=0.1), default=10.0, show_default=True, metavar="SECONDS",
              help="Silence after which a stream gets a comment and another answer an empty line.")
@click.option("--stream-buffer", type=click.IntRange(min=16), default=4096, show_default=True, metavar="TOKENS",
              help="Tokens of one answer that wait for a slow reader before it is cut off.")
@click.option("--drain", type=click.FloatRange(min=0), default=30.0, show_default=True, metavar="SECONDS",
              help="Time for running answers after SIGTERM.")
@click.option("--tokenizer", type=click.Path(path_type=Path, exists=True), metavar="PATH",
              help="tokenizer.json or its folder. Default: the checkpoint's.")
@click.option("--dialect", type=click.Choice(["v4", "v4.1"]),
              help="Prompt format. Default: the one whose control tokens the tokenizer has.")
@click.option("--default-thinking/--no-default-thinking", default=True, show_default=True,
              help="Whether answers begin with reasoning where a request does not say.")
@click.option("--repair-tool-calls", is_flag=True, help="Read malformed tool calls for what they mean; without it "
              "they pass as the model wrote them.")
@click.option("--self-check/--no-self-check", default=True, show_default=True,
              help="Compare a short greedy answer with the one of the first start before serving.")
@click.option("--profile", type=click.IntRange(min=0), default=0, show_default=True, metavar="STEPS",
              help="Write a trace of the first steps with requests, for ui.perfetto.dev, into the current folder.")
@click.option("--log-format", type=click.Choice(["auto", "text", "json"]), default="auto", show_default=True,
              help="auto: text on a terminal, else JSON lines.")
@click.option("--log-level", type=click.Choice(["debug", "info", "warning", "error"]), default="info",
              show_default=True)
@config_option
@print_config_option
@click.pass_context
def main(context: click.Context, /, subject: str, **options: Any) -> None:
    """Serve ENGINE_OR_MODEL over HTTP for OpenAI, Anthropic and plain completion clients.

    ENGINE_OR_MODEL is an engine folder; or a checkpoint folder or hub id, which is compiled into the
    cache first, and the equal deepinfer-compile line is printed. Every flag can also be set as
    DEEPINFER_SERVE_<FLAG> or in the file of --config: flag before environment before file.

    \b
    Examples:
      deepinfer serve engines/my_engine --checkpoint ./my-checkpoint
      deepinfer serve ./my-checkpoint --port 8080 --served-model-name small
      curl http://127.0.0.1:8000/v1/models

    \b
    SIGTERM: no new requests, running answers get --drain seconds. A second signal ends at once.
    """
    if options.pop("print_config"):
        print_config(context)
        return
    server = _server_modules()
    keys = _keys(options["api_key_file"])
    log_format = options["log_format"]
    as_json = log_format == "json" or (log_format == "auto" and not sys.stderr.isatty())
    server.logs.start_logging(options["log_level"], as_json=as_json)
    sock = server.run.open_socket(options["host"], options["port"])
    if not keys and options["host"] not in _LOOPBACK:
        click.echo(f"warning: {options['host']} is reachable from other machines and no API key is set "
                   f"({KEY_VARIABLE} or --api-key-file)", err=True)
    limits = {name: options[name] for name in ("max_model_len", "max_num_seqs")}
    found = resolve_subject(subject, options["checkpoint"], limits)
    from deepinfer.codegen.cache import cache_root

    engine = server.engine_process.EngineSettings(
        endpoint="", engine=str(found.engine), checkpoint=found.checkpoint, max_num_seqs=options["max_num_seqs"],
        num_blocks=options["num_blocks"], seed=options["seed"],
        **_store(options), **{name: options[name] for name in (*_ENGINE_OPTIONS, *PLACEMENT)}, log_json=as_json,
        records=str(cache_root() / "self-check") if options["self_check"] else None,
        log_level=options["log_level"], compile=_compilation(server, found),
        profile_steps=options["profile"], profile=str(Path(f"deepinfer-profile-{os.getpid()}.json").absolute()))
    store = server.engine_process.store_settings(engine)
    settings = server.service.ServerSettings(
        names=options["served_model_name"] or (found.name,), keys=keys, max_model_len=options["max_model_len"],
        max_queue=options["max_queue"], max_body=options["max_body"], keep_alive=options["keep_alive"],
        stream_buffer=options["stream_buffer"], tokenizer=options["tokenizer"], dialect=options["dialect"],
        default_thinking=options["default_thinking"], repair=options["repair_tool_calls"], drain=options["drain"],
        priorities=options["allow_priority"], retention=None if store is None else dict(store.retention),
        front_ends=options["front_ends"], origins=options["allow_origin"])
    context.exit(server.run.run_server(settings, engine, sock))


def _store(options: dict[str, Any]) -> dict[str, Any]:
    """Settings of the prefix store, as the engine process takes them."""
    from deepinfer.runtime.store.settings import parse_retention, parse_size

    folder, quota, kept = (options[name] for name in ("prefix_store", "store_quota", "store_retention"))
    if folder is None and any(options[name] for name in ("store_quota", "store_retention", "store_backend")):
        raise SpecError("a setting of a prefix store without one", where="deepinfer serve",
                        next_step="name its folder with --prefix-store")
    if folder is not None and (not folder or (os.path.exists(folder) and not os.path.isdir(folder))):
        raise SpecError("not a folder", where="--prefix-store", found=repr(folder),
                        next_step="name a folder of the store's own; it is made where it is missing")
    if folder is not None and not options["prefix_cache"]:
        raise SpecError("a prefix store lies below the prefix cache", where="deepinfer serve",
                        found="--prefix-store with --no-prefix-cache", next_step="leave one of them out")
    return {"prefix_store": None if folder is None else str(Path(folder).absolute()),
            "store_quota": None if quota is None else parse_size(quota, "--store-quota"),
            "store_retention": None if kept is None else parse_retention(kept, "--store-retention"),
            "store_backend": options["store_backend"]}


def _compilation(server: Any, found: Subject) -> Any:
    """What the engine process compiles before it starts: the front end answers probes meanwhile."""
    if found.compile is None:
        return None
    return server.engine_process.Compilation(found.compile.model, found.compile.target, dict(found.compile.options))


class _server_modules:
    """The modules that need the extra `server`; one sentence when it is not installed."""

    def __init__(self) -> None:
        try:
            for name in ("logs", "run", "service", "engine_process"):
                setattr(self, name, importlib.import_module(f"deepinfer.runtime.server.{name}"))
        except ModuleNotFoundError as error:
            raise ToolchainError("the packages of the server are not installed", found=f"no {error.name}",
                                 next_step="pip install 'deepinfer-aot[server]'") from None

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)


def _keys(file: Path | None) -> tuple[str, ...]:
    """API keys of the environment and the file."""
    keys = [key.strip() for key in os.environ.get(KEY_VARIABLE, "").split(",")]
    if file is not None:
        try:
            lines = file.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ArtifactError("the file of API keys cannot be read", where=file, found=error) from None
        found = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
        if not found:
            raise SpecError("the file holds no API key", where=file, next_step="write one key a line")
        keys += found
    return tuple(dict.fromkeys(key for key in keys if key))
