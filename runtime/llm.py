"""The front door: an engine with weights that turns prompts into answers."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from deepinfer.accelerator import require_runnable
from deepinfer.errors import PlanError, RequestError
from deepinfer.runtime import events
from deepinfer.runtime.backend import Engine, Package
from deepinfer.runtime.checkpoint.checkpoint import LOCAL_VARIABLE
from deepinfer.runtime.checkpoint.room import available_memory
from deepinfer.runtime.engine_core import EngineCore
from deepinfer.runtime.metrics import Metrics
from deepinfer.runtime.outputs import RequestOutput
from deepinfer.runtime.placement import Placement
from deepinfer.runtime.plan import OFF, EnginePlan, ReplayOption
from deepinfer.runtime.prefix.cache import MemoryCache
from deepinfer.runtime.prefix.chain import digest
from deepinfer.runtime.prefix.identity import identity_of
from deepinfer.runtime.prefix.roots import Roots
from deepinfer.runtime.progress import GenerationProgress
from deepinfer.runtime.sampling_params import (
    SamplingParams,
    check_text,
    is_whole,
    require_seed,
    require_switches,
    require_whole,
)
from deepinfer.runtime.sequence import Request
from deepinfer.runtime.session import Session
from deepinfer.runtime.speculation.choose import draft_policy
from deepinfer.runtime.tokenizer import end_ids, load_text_side

if TYPE_CHECKING:
    from deepinfer.runtime.store.opening import AnyTier
    from deepinfer.runtime.store.settings import StoreSettings

Prompt = str | Sequence[int]
_NO_PROMPT = "a prompt is a text or a list of token ids"
_CACHE_SHARE = 0.5  # of the memory that is free, unless num_blocks says otherwise
_SNAPSHOT_SHARE = 0.1  # likewise, for window snapshots


class LLM:
    """An engine, started with a checkpoint.

    Args:
        engine: an engine folder, the imported engine, or what ``deepinfer.load_engine`` returned.
        checkpoint: a checkpoint folder or a hub id; None: the folder that ``DEEPINFER_HF_MODEL_DIR`` names, else the
            hub id that the engine was compiled from.
        tokenizer: None for the checkpoint's own, a path, or an object with ``encode`` and ``decode``. Without any,
            prompts are token ids and answers have no text.
        max_num_seqs: sequences with memory at the same time, sessions among them; at most what was compiled for.
        num_blocks: cache blocks; None: enough for all sequences at full length, or half of the free memory.
        threads: of a CPU engine; None: one for each processor that is named, else for each that this process may
            use, fewer for a small model.
        cpus, numa: its processors and memory nodes, see ``runtime.placement``; None: as the environment says.
        seed: of requests that bring none: their answers are then the same in every run; None: from the system.
        spill_bytes: host memory for sequences that give up theirs when blocks run out.
        prefix_cache: keep what was computed for later requests that begin with the same tokens. Answers depend on
            it only where bounded replay is asked for (``SamplingParams.replay`` as a number); see docs/runtime.md.
        prefix_snapshots: window snapshots that are kept at most, so that a hit runs no row again; None: four for each
            sequence, but no more than a tenth of the free memory.
        prefix_store: folder of a prefix store below the cache, shared with other processes and hosts, or
            ``StoreSettings``; None: what gives way in memory is gone.
        loop: ``overlapped``: the next step is planned while one runs, for which the engine has to be compiled with
            ``--host-lag 1``; ``plain``: it is planned afterwards. Answers are the same. None: overlapped where the
            engine can.
        num_speculative_tokens: drafts that are verified in a step at most; None: all that the engine drafts, 0: none.
            Seeded and greedy answers do not depend on it.
        schedule_drafts: verify as many of them as are worth their time by what steps cost on this machine, measured
            at the first start, and none where they do not pay; False: the same number in every step.
        decode_stretch: a step that reads prompts lasts at most so many times as long as one that only decodes, while
            anybody decodes; None: steps are filled with prompt rows.
        progress: show what takes long while loading.

    Raises:
        ArtifactError: an engine or checkpoint that cannot be used. PlanError: not enough memory, or a size that the
        engine cannot have. RequestError: an argument of the wrong kind.
    """

    def __init__(self, engine: str | Path | ModuleType | Package, checkpoint: str | Path | None = None, *,
                 tokenizer: Any = None, max_num_seqs: int | None = None, num_blocks: int | None = None,
                 threads: int | None = None, cpus: str | None = None, numa: str | None = None,
                 seed: int | None = None, spill_bytes: int = 1 << 30,
                 prefix_cache: bool = True, prefix_snapshots: int | None = None,
                 prefix_store: str | Path | StoreSettings | None = None, loop: str | None = None,
                 num_speculative_tokens: int | None = None, schedule_drafts: bool = True,
                 decode_stretch: float | None = 2.0, progress: bool = True) -> None:
        _check_arguments(checkpoint, max_num_seqs=max_num_seqs, num_blocks=num_blocks, threads=threads, seed=seed,
                         spill_bytes=spill_bytes, prefix_snapshots=prefix_snapshots,
                         num_speculative_tokens=num_speculative_tokens)
        require_switches(prefix_cache=prefix_cache, schedule_drafts=schedule_drafts, progress=progress)
        _check_prefix(prefix_cache, prefix_store=prefix_store, prefix_snapshots=prefix_snapshots)
        package = _package(engine)
        self.plan: EnginePlan = package.plan
        lag, drafts = _lag(self.plan, loop), _drafts(self.plan, num_speculative_tokens)
        _check_stretch(decode_stretch)
        require_runnable(self.plan.target, str(getattr(package, "path", self.plan.model)))
        place = Placement.wanted(cpus, numa)
        threads = place.threads(threads)
        name, slots = checkpoint or os.environ.get(LOCAL_VARIABLE) or None, _slots(self.plan, max_num_seqs)
        blocks = _blocks(package, slots, num_blocks)
        running = package.start(name, slots=slots, blocks=blocks, threads=threads, placement=place,
                                progress=progress)
        prefix = None
        self._classes: tuple[str, ...] = ()  # of the prefix store
        try:
            text, ends = load_text_side(tokenizer, running.checkpoint), end_ids(running.checkpoint)
            if prefix_cache and self.plan.paged:
                roots, store, window_store = _store(package, running, prefix_store)
                self._classes = tuple(store.settings.retention) if store is not None else ()
                snapshots = _snapshots(self.plan, slots, prefix_snapshots)
                prefix = MemoryCache(self.plan, snapshots=snapshots, roots=roots, tier=store, window_tier=window_store)
            policy = draft_policy(self.plan, running, getattr(package, "manifest", {}), slots=slots, blocks=blocks,
                                  limit=drafts, threads=threads, scheduled=schedule_drafts)
            self.core = EngineCore(self.plan, running, slots=slots, blocks=blocks, ends=ends, text=text, seed=seed,
                                   spill_bytes=spill_bytes, prefix=prefix, lag=lag, policy=policy,
                                   stretch=decode_stretch)
        except BaseException:
            if prefix is not None:
                prefix.close()
            running.close()
            raise
        self._ids = itertools.count()
        events.info("engine_started", model=self.plan.model, target=self.plan.target, slots=slots, blocks=blocks,
                    block_tokens=self.plan.block_tokens, max_model_len=self.plan.max_model_len)

    @property
    def metrics(self) -> Metrics:
        """Counters of everything that ran; ``metrics.text()`` is the Prometheus form."""
        self.core.gauges()
        return self.core.metrics

    # ---- requests -----------------------------------------------------------------------------------------------
    def generate(self, prompts: Prompt | Sequence[Prompt],
                 sampling_params: SamplingParams | Sequence[SamplingParams] | None = None, *,
                 priority: Sequence[int] | None = None, progress: bool = True,
                 use_tqdm: bool | None = None) -> list[RequestOutput]:
        """Answer prompts; the results have the order of the prompts.

        Args:
            prompts: a text, a list of token ids, or a list of such. A text is encoded as the tokenizer does it, so
                that a control token's spelling becomes that token: text of people who must not place such tokens
                goes through ``deepinfer.recipe``.
            sampling_params: one for all, or one for each prompt; None: the defaults.
            priority: one number a prompt, smaller goes first.
            progress: show a progress bar. ``use_tqdm``: the same switch under vLLM's name.

        Raises:
            RequestError: a prompt or parameter that cannot be served; nothing has run then. A request that fails
            while it runs ends with finish_reason ``error`` and its sentence; the others go on.
        """
        requests = self._requests(prompts, sampling_params, priority, stream=False)
        show = progress if use_tqdm is None else use_tqdm
        results: dict[str, RequestOutput] = {}
        with GenerationProgress(len(requests), show) as bar:
            for output in self._serve(requests, bar):
                results[output.request_id] = output
        return [results[r.request_id] for r in requests]

    def stream(self, prompts: Prompt | Sequence[Prompt],
               sampling_params: SamplingParams | Sequence[SamplingParams] | None = None, *,
               priority: Sequence[int] | None = None) -> Iterator[RequestOutput]:
        """Like ``generate``, one result for every new token of every request as it is there.

        A result holds the answer so far; ``outputs[i].delta`` is the text that is new. Requests that are not finished
        when the iterator is closed are aborted.
        """
        requests = self._requests(prompts, sampling_params, priority, stream=True)
        return self._serve(requests, None)

    def abort(self, request_id: str) -> bool:
        """End a running request with finish_reason ``abort`` before its next step, from any thread. False: it is not
        running."""
        return self.core.abort(request_id)

    def session(self, replay: ReplayOption = OFF) -> Session:
        """One sequence driven by hand: feed, draft, adopt, fork, rewind.

        ``replay``: rows of what one ``feed`` brings that all layers compute: ``off`` (all), ``exact`` or a number.
        """
        return Session(self.core, replay)

    def close(self) -> None:
        """Give the engine's memory back."""
        self.core.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- inside -------------------------------------------------------------------------------------------------
    def _requests(self, prompts: Prompt | Sequence[Prompt],
                  params: SamplingParams | Sequence[SamplingParams] | None, priority: Sequence[int] | None,
                  stream: bool) -> list[Request]:
        """All requests of a call, checked before any is queued."""
        self.core.require_open()
        listed = _listed(prompts)
        each = list(params) if isinstance(params, Sequence) else [params or SamplingParams()] * len(listed)
        if priority is not None and not (isinstance(priority, list | tuple | np.ndarray)
                                         and all(is_whole(p) for p in priority)):
            raise RequestError("whole numbers, one for each prompt, are needed", where="priority",
                               found=repr(priority))
        for name, given in (("sampling_params", each), ("priority", priority)):
            if given is not None and len(given) != len(listed):
                raise RequestError(f"one of {name} for each prompt is needed", where=name, found=len(given),
                                   allowed=len(listed))
        made = []
        for at, (prompt, p) in enumerate(zip(listed, each, strict=True)):
            where = f"prompts[{at}]" if len(listed) > 1 else "prompt"
            if not isinstance(p, SamplingParams):
                raise RequestError("SamplingParams are needed", where=f"sampling_params[{at}]", found=type(p).__name__)
            if self._classes and p.cache_class not in (None, *self._classes):
                raise RequestError("the prefix store has no such class", where="cache_class", found=p.cache_class,
                                   allowed=", ".join(self._classes))
            text = prompt if isinstance(prompt, str) else None
            ids = self._encode(prompt, where) if isinstance(prompt, str) else prompt
            made.append(self.core.make(str(next(self._ids)), ids, p, prompt=text, where=where, stream=stream,
                                       priority=priority[at] if priority else 0))
        return made

    def _encode(self, prompt: str, where: str) -> list[int]:
        check_text(prompt, where)
        if self.core.text is None:
            raise RequestError("a text prompt needs a tokenizer", where=where,
                               next_step="give LLM a tokenizer, or prompt with token ids")
        return self.core.text.encode(prompt)

    def _serve(self, requests: list[Request], bar: GenerationProgress | None) -> Iterator[RequestOutput]:
        """Run steps until all of ``requests`` are finished; their results as they come."""
        open_requests = list(requests)
        try:
            for r in requests:
                self.core.add(r)
            while open_requests:
                if not any(r.updates for r in open_requests):
                    self.core.step_for(open_requests)
                for r in list(open_requests):
                    while r.updates:
                        output = r.updates.popleft()
                        if output.finished:
                            open_requests.remove(r)
                        yield output
                if bar is not None:
                    bar.show(requests)
        finally:
            for r in open_requests:
                self.core.abort(r.request_id)
            self.core.settle()


def _package(engine: str | Path | ModuleType | Package) -> Package:
    if isinstance(engine, ModuleType):
        engine = Path(engine.__file__ or "").parent
    if isinstance(engine, str | Path):
        from deepinfer.runtime import load_engine

        loaded: Package = load_engine(engine)
        return loaded
    if not isinstance(getattr(engine, "plan", None), EnginePlan):
        raise RequestError("not an engine", where="engine", found=type(engine).__name__,
                           allowed="an engine folder, an imported engine, or what load_engine returned")
    return engine


def _check_arguments(checkpoint: Any, **numbers: Any) -> None:
    """What no engine has to be asked about: kinds of the arguments, and numbers that are never right."""
    if checkpoint is not None and not isinstance(checkpoint, str | os.PathLike):
        raise RequestError("a folder or a hub id is needed", where="checkpoint", found=repr(checkpoint))
    for name, value in numbers.items():
        if value is not None:
            require_whole(name, value)
    if numbers["seed"] is not None:
        require_seed(numbers["seed"])
    if numbers["threads"] is not None and numbers["threads"] < 1:
        raise PlanError("an engine runs on at least one thread", where="threads", found=numbers["threads"],
                        allowed=">= 1", next_step="leave it out for all processors that this process may use")
    if numbers["spill_bytes"] is None or numbers["spill_bytes"] < 0:
        raise PlanError("memory cannot be less than nothing", where="spill_bytes", found=numbers["spill_bytes"],
                        allowed=">= 0", next_step="0 spills nothing")


def _check_prefix(cache: bool, **parts: Any) -> None:
    for name, value in parts.items():
        if value not in (None, 0) and not cache:
            raise PlanError("it is a part of the prefix cache", where=name, found="prefix_cache=False",
                            next_step=f"leave prefix_cache on, or {name} out")


def _lag(plan: EnginePlan, loop: str | None) -> int:
    """Steps that the loop plans ahead."""
    if loop not in (None, "plain", "overlapped"):
        raise RequestError("unknown loop", where="loop", found=repr(loop), allowed="plain, overlapped")
    if loop == "overlapped" and not plan.host_lag:
        raise PlanError("the engine's rings have no room for a step that is planned before the one before it has ended",
                        where="loop", found=loop, allowed="plain", next_step="compile with --host-lag 1")
    return int(loop != "plain" and plan.host_lag > 0)


def _drafts(plan: EnginePlan, asked: int | None) -> int:
    """Drafts that are verified in a step at most."""
    most = plan.draft_tokens if "draft" in plan.entries else 0
    if asked is not None and not 0 <= asked <= most:
        raise PlanError("the engine drafts fewer tokens at a time" if most else "the engine has no draft head",
                        where="num_speculative_tokens", found=asked, allowed=f"0..{most}",
                        next_step="leave it out for as many as there are")
    return most if asked is None else asked


def _check_stretch(value: Any) -> None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or not value > 1):
        raise PlanError("a step with prompt rows lasts longer than one without", where="decode_stretch",
                        found=repr(value), allowed="> 1, or None for no bound")


def _slots(plan: EnginePlan, asked: int | None) -> int:
    if asked is not None and not 1 <= asked <= plan.max_num_seqs:
        raise PlanError("the engine was compiled for another number of sequences", where="max_num_seqs", found=asked,
                        allowed=f"1..{plan.max_num_seqs}", next_step="compile with a larger --max-num-seqs")
    return asked or plan.max_num_seqs


def _blocks(package: Package, slots: int, asked: int | None) -> int:
    """Cache blocks: what was asked for, else all that can be used, else what half of the free memory holds."""
    plan = package.plan
    least, most = plan.blocks_per_sequence, slots * plan.blocks_per_sequence
    if asked is not None:
        if asked < least:
            raise PlanError("one sequence of full length does not fit", where="num_blocks", found=asked,
                            allowed=f">= {least}",
                            next_step="raise num_blocks, or compile with a smaller --max-model-len")
        return asked
    free = available_memory() * _CACHE_SHARE
    fixed, all_of_them = package.memory(slots, 0).total, package.memory(slots, most).total
    if all_of_them <= free or not plan.paged:
        return most
    blocks = int((free - fixed) * most / (all_of_them - fixed))
    if blocks < least:
        raise PlanError("one sequence of full length does not fit into half of the free memory", where="cache blocks",
                        found=f"{free / 1e9:.2f} GB for {max(0, blocks)} blocks", allowed=f">= {least} blocks",
                        next_step="free memory, pass num_blocks, or compile with a smaller --max-model-len")
    events.warn("cache_limited", blocks=blocks, wanted=most, reason="half of the free memory")
    return blocks


def _snapshots(plan: EnginePlan, slots: int, asked: int | None) -> int:
    """Window snapshots of the prefix cache: a prompt and an answer leave two each."""
    free = available_memory()
    if asked is not None:
        if asked < 0:
            raise PlanError("there cannot be less than none", where="prefix_snapshots", found=asked, allowed=">= 0",
                            next_step="0 keeps no windows: rows in front of every hit run again")
        if asked * plan.snapshot_bytes > free:
            raise PlanError("so many window snapshots do not fit into memory", where="prefix_snapshots", found=asked,
                            allowed=f"at most {int(free) // plan.snapshot_bytes}",
                            next_step="leave it out: four for each sequence, at most a tenth of the free memory")
        return asked
    return min(4 * slots, int(free * _SNAPSHOT_SHARE) // max(1, plan.snapshot_bytes))


def _store(package: Package, engine: Engine,
           asked: str | Path | StoreSettings | None) -> tuple[Roots, AnyTier | None, AnyTier | None]:
    """Keys of the prefix cache, the store that was asked for, and the one for windows of models that need them."""
    if asked is None:
        return Roots(), None, None
    from deepinfer.runtime.store.layout import KIND_WINDOWS, Layout, layout_of
    from deepinfer.runtime.store.native import LIBRARY
    from deepinfer.runtime.store.opening import opener
    from deepinfer.runtime.store.settings import StoreSettings

    plan, options = package.plan, getattr(package, "manifest", {}).get("options", {})
    identity = identity_of(plan, options, engine.checkpoint)
    settings = asked if isinstance(asked, StoreSettings) else StoreSettings(Path(asked))
    lib = getattr(package, "lib", None)  # of a compiled engine; one compiled before it had the part does without
    library = lib / LIBRARY if lib is not None and (lib / LIBRARY).exists() else None
    opens = opener(settings, library)
    store, windows = opens(layout_of(plan, digest(*identity))), None
    if not plan.licensed and plan.resume_bytes:
        windows = opens(Layout(digest(*identity), plan.block_tokens, (("windows", plan.resume_bytes),), KIND_WINDOWS))
    return Roots(identity, store.tenant_salt), store, windows


def _listed(prompts: Any) -> list[Any]:
    """A text or a list of ids is one prompt."""
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, bytes | bytearray | memoryview | Mapping) or not isinstance(prompts, Iterable):
        raise RequestError(_NO_PROMPT, where="prompts", found=type(prompts).__name__)
    listed = list(prompts)
    if not listed:
        raise RequestError("there is no prompt", where="prompts", next_step="send at least one token")
    if all(is_whole(p) for p in listed):
        return [listed]
    for at, p in enumerate(listed):
        if not isinstance(p, str) and not (isinstance(p, list | tuple | np.ndarray)
                                           and all(is_whole(i) for i in p)):
            found = type(p).__name__
            if isinstance(p, list | tuple | np.ndarray):
                found = f"{found} with {next(type(i).__name__ for i in p if not is_whole(i))}"
            raise RequestError(_NO_PROMPT, where=f"prompts[{at}]", found=found)
    return listed
