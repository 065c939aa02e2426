"""Checkpoints: safetensors in the official names and formats, read from headers, mapped and bound, never copied."""

from deepinfer.runtime.checkpoint.checkpoint import Checkpoint, fetch_weights, open_checkpoint

__all__ = ["Checkpoint", "fetch_weights", "open_checkpoint"]
