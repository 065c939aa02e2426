"""Which spec describes a checkpoint, by what its ``config.json`` calls itself."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from types import ModuleType

from deepinfer.dsl import Config, EngineOptions, Model, StoredTensor
from deepinfer.errors import SpecError
from deepinfer.model_specs.depth import cut_config, cut_model

# The first one's first hub id is the checkpoint that a user gets who names none.
SPECS = ("deepinfer.model_specs.deepseek_v41_flash", "deepinfer.model_specs.deepseek_v4")
_STATED = ("ARCHITECTURE", "MODEL_TYPES", "HUB_IDS", "IGNORED_KEYS", "build")


def specs() -> Iterator[ModuleType]:
    """Every spec of this project.

    A spec is a module with ``ARCHITECTURE`` and ``MODEL_TYPES`` (what ``architectures`` and ``model_type`` of its
    configs hold), ``HUB_IDS`` (checkpoints, the default first), ``IGNORED_KEYS`` (config key -> why it is not
    read) and ``build(config, options, headers=None) -> Model``. With ``first_layers(config, layers)``, which gives the
    config of its first layers, it serves ``--layers``.
    """
    return (load_spec(name) for name in SPECS)


def load_spec(spec: str | ModuleType) -> ModuleType:
    """A spec from its dotted module name. Raises SpecError when there is none or it lacks what a spec states."""
    if isinstance(spec, str):
        try:
            spec = importlib.import_module(spec)
        except ModuleNotFoundError as e:
            if not f"{spec}.".startswith(f"{e.name}."):
                raise  # the spec is there and needs something that is not
            raise SpecError("there is no spec of this name", found=e.name, allowed=SPECS,
                            next_step="give the dotted name of a module that Python finds") from None
    if missing := [name for name in _STATED if not hasattr(spec, name)]:
        raise SpecError("the module is not a spec", where=spec.__name__, found=f"no {', '.join(missing)}",
                        allowed=f"a module with {', '.join(_STATED)}")
    return spec


def find_spec(config: Config) -> ModuleType:
    """The spec that a config's ``architectures`` names, or without that key its ``model_type``.

    Raises SpecError with what the config says and what is supported.
    """
    architectures, model_type = config.get("architectures", None) or [], config.get("model_type", None)
    for spec in specs():
        if spec.ARCHITECTURE in architectures and model_type not in (None, *spec.MODEL_TYPES):
            raise SpecError("architectures and model_type name different models", where="config.json",
                            found=f"{spec.ARCHITECTURE} and {model_type!r}", allowed=spec.MODEL_TYPES)
        if spec.ARCHITECTURE in architectures or (not architectures and model_type in spec.MODEL_TYPES):
            return spec
    known = list(specs())
    named = ", ".join(map(str, architectures)) or f"model_type {model_type!r}"
    raise SpecError("no spec describes this model", where="config.json", found=named,
                    allowed=", ".join(s.ARCHITECTURE for s in known),
                    next_step=f"use a checkpoint such as {known[0].HUB_IDS[0]}, or name a spec of your own")


def default_hub_id() -> str:
    """The hub checkpoint that is meant when none is named."""
    return str(next(specs()).HUB_IDS[0])


def build_model(config: Config, options: EngineOptions, headers: Mapping[str, StoredTensor] | None = None,
                spec: str | ModuleType | None = None) -> Model:
    """The described model of a config.

    Args:
        config: of the checkpoint.
        options: chosen at compile time.
        headers: name -> what the checkpoint's safetensors headers hold; None: the official storage.
        spec: module, or its dotted name, that describes the model; None: the one the config names.
    """
    chosen = find_spec(config) if spec is None else load_spec(spec)
    cut = config if options.layers is None else Config(cut_config(chosen, config.raw, options.layers))
    model = chosen.build(cut, options, headers)
    if not isinstance(model, Model):
        raise SpecError("build() did not return a Model", where=chosen.__name__, found=type(model).__name__,
                        allowed="deepinfer.dsl.Model")
    return model if options.layers is None else cut_model(chosen, model, config, options.layers)
