"""Checkpoints: safetensors in the official names and formats, read from headers, mapped and bound, never copied."""

from deepinfer.runtime.checkpoint.checkpoint import Checkpoint, open_checkpoint

__all__ = ["Checkpoint", "open_checkpoint"]
