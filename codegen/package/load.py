"""``load_engine``: an engine folder, checked file by file, ready to be started with a checkpoint."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any

from deepinfer.accelerator import backend_of, require_runnable, uses_stand_in
from deepinfer.codegen.package.interface import Interface
from deepinfer.codegen.package.manifest import read_manifest, rebuild_command
from deepinfer.codegen.plan.memory_plan import Footprint
from deepinfer.errors import ArtifactError
from deepinfer.model_specs.depth import cut_config
from deepinfer.model_specs.registry import load_spec
from deepinfer.runtime import events
from deepinfer.runtime.checkpoint import Checkpoint, fetch_weights, open_checkpoint
from deepinfer.runtime.checkpoint.bind import bar, bind_weights, require_same_config, require_tensors
from deepinfer.runtime.checkpoint.packed import FOLDER
from deepinfer.runtime.checkpoint.room import Need, require_device_memory
from deepinfer.runtime.native.build import HOST, runner_abi
from deepinfer.runtime.native_engine import Device, Memory, NativeEngine, Runner
from deepinfer.runtime.placement import Placement, processors
from deepinfer.runtime.plan import EnginePlan

# With less weights than this a thread is done sooner than the threads of a step have met.
_WEIGHTS_PER_THREAD = 4 << 20


class EnginePackage:
    """A compiled engine that is not running yet. Fulfils ``runtime.backend.Package``.

    ``path``: its folder; ``manifest``: everything it says of itself; ``plan``: what the runtime schedules by.
    """

    def __init__(self, path: Path, manifest: dict[str, Any]) -> None:
        self.path, self.manifest = path, manifest
        self.plan = EnginePlan.from_dict(manifest["plan"], str(path))
        self.interface = Interface.from_dict(manifest["interface"])
        self.footprint = Footprint.from_dict(manifest["footprint"], str(path))
        self._asked: Runner | None = None  # open while sizes are asked for

    @property
    def lib(self) -> Path:
        return self.path / "lib"

    @property
    def usual_threads(self) -> int:
        """Threads where none are asked for: the processors of this process, fewer for a small model."""
        return max(1, min(processors(), self.footprint.sizes.weight_bytes // _WEIGHTS_PER_THREAD))

    def memory(self, slots: int, blocks: int, threads: int | None = None) -> Memory:
        """Bytes for ``slots`` sequences and ``blocks`` cache blocks; nothing is allocated."""
        return self._runner().memory(slots, blocks, threads or self.usual_threads)

    def _runner(self) -> Runner:
        if self._asked is None:
            self._asked = Runner(self.lib)
        return self._asked

    def _device(self) -> Device | None:
        """The device that has to hold the engine; None: this host."""
        return None if backend_of(self.manifest["target"]).runner == HOST else self._runner().device()

    def checkpoint(self, asked: str | Path | None = None, *, revision: str | None = None) -> Checkpoint:
        """The checkpoint to run with: the one asked for, else the weights packed with the engine, else the hub id that
        it was compiled from.

        Only its headers are fetched. Raises ArtifactError when its config or its tensors are not the engine's.
        """
        model = self.manifest["model"]
        if asked is None and (self.path / FOLDER).is_dir():
            asked = self.path / FOLDER
        if asked is None:
            asked, revision = model["hub_id"], revision or model["revision"]
        if asked is None:
            raise ArtifactError("no checkpoint is named", where=str(self.path),
                                allowed=["a checkpoint folder", *model["hub_ids"]],
                                next_step="give one, or set DEEPINFER_HF_MODEL_DIR")
        found = open_checkpoint(asked, revision=revision)
        self.require_fit(found)
        return found

    def require_fit(self, checkpoint: Checkpoint) -> None:
        """ArtifactError when a checkpoint's config or tensors are not the engine's."""
        model, config, layers = self.manifest["model"], checkpoint.config, self.manifest["options"].get("layers")
        if layers is not None:
            config = cut_config(load_spec(model["spec"]), config, layers)
        require_same_config(model["config"], config, model["unread_keys"], str(self.path),
                            rebuild_command(self.manifest, self.path))
        if checkpoint.headers:
            require_tensors(checkpoint, self.interface.params, model)

    def start(self, checkpoint: str | Path | Checkpoint | None = None, *, slots: int, blocks: int,
              threads: int | None = None, placement: Placement | None = None, progress: bool = True,
              check: str = "weights") -> NativeEngine:
        """Take the memory, bind a checkpoint's weights, look at each once.

        ``placement``: of its threads and pages; None: as the environment says. ``threads``: of the engine; None: as
        many as processors are named there, else ``usual_threads``. ``check``: how far weights are looked at for
        NaN, see ``runtime.checkpoint.scan``. Raises ArtifactError, PlanError in one sentence.
        """
        if isinstance(checkpoint, Checkpoint):
            self.require_fit(checkpoint)
        else:
            checkpoint = self.checkpoint(checkpoint)
        if self.manifest["options"].get("layers") is not None:
            events.warn("reduced_depth", engine=self.path.name, layers=self.manifest["options"]["layers"],
                        answers="of the first layers alone, without sense")
        sizes, placement = self.footprint.sizes, placement or Placement.wanted()
        threads = placement.threads(threads) or self.usual_threads
        memory, device = self.memory(slots, blocks, threads), self._device()
        self._asked = None
        if device is None:
            need = Need(sizes.weight_bytes, sizes.table_bytes, memory.total)
        else:
            require_device_memory(device.name, device.free, Need(sizes.weight_bytes + sizes.table_bytes, 0,
                                                                 memory.on_device))
            need = Need(0, sizes.weight_bytes + sizes.table_bytes, memory.drawing)
        checkpoint = fetch_weights(checkpoint, need)
        engine = NativeEngine(self.lib, self.interface, slots=slots, blocks=blocks,
                              threads=threads, placement=placement)
        model = self.manifest["model"]
        try:
            weights = bind_weights(checkpoint, self.interface.params, model, threads=engine.threads, depth=check,
                                   progress=progress)
            with bar("copying weights to the device", sum(d + s for t in weights.sizes() for d, s in t),
                     progress and device is not None) as advance:
                engine.bind(weights, advance, tables_in_memory=weights.tables_in_memory)
            engine.checkpoint = checkpoint.folder
        except BaseException:
            engine.close()
            raise
        return engine


def _require_compiled(manifest: dict[str, Any], folder: Path) -> None:
    """Refuse an engine whose kernels no compiler of its target has seen, unless the stand-in was asked for."""
    if not manifest.get("compiled", True) and not uses_stand_in(manifest["target"]):
        variable = backend_of(manifest["target"]).stand_in
        raise ArtifactError("the engine holds sources only, which run on the CPU twin and on no device",
                            where=str(folder), found=f"an engine for {manifest['target']} that was not compiled for it",
                            next_step=f"set {variable}=1 to run it on the twin, which is slow and checks every access, "
                            f"or compile again where the target's compiler is: {rebuild_command(manifest, folder)}")


def load_engine(path: str | Path) -> EnginePackage:
    """The engine in a folder, or in the folder of an imported engine's ``__init__.py``.

    Raises ArtifactError in one sentence: no engine, another format (which version wrote it, which command rebuilds
    it), a damaged file by name, another target or machine.
    """
    folder = Path(path).expanduser()
    folder = folder.parent if folder.name == "__init__.py" else folder
    manifest = read_manifest(folder)
    _require_compiled(manifest, folder)
    require_runnable(manifest["target"], str(folder))
    if manifest["machine"] != platform.machine():
        raise ArtifactError("the engine was compiled on another kind of machine", where=str(folder),
                            found=manifest["machine"], allowed=platform.machine(),
                            next_step=f"compile again here: {rebuild_command(manifest, folder)}")
    if manifest["runner_abi"] != runner_abi():
        raise ArtifactError("the engine's runner speaks another ABI than this version", where=str(folder),
                            found=f"ABI {manifest['runner_abi']}, written by {manifest['version']}",
                            allowed=f"ABI {runner_abi()}",
                            next_step=f"compile again: {rebuild_command(manifest, folder)}")
    try:
        return EnginePackage(folder, manifest)
    except (KeyError, TypeError, ValueError) as error:
        raise ArtifactError("the engine's manifest lacks something", where=str(folder), found=error,
                            next_step=f"compile again: {rebuild_command(manifest, folder)}") from None
