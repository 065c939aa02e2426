"""Python's garbage collector in a process that has loaded what it needs and now serves."""

from __future__ import annotations

import gc


def spare_what_was_loaded() -> None:
    """Let the collector look only at what requests leave behind.

    A request is a cycle of objects, which only a full collection frees. Python puts one off until the objects that wait
    for it are a quarter of all: beside a vocabulary that is several hundred requests, and looking at all of them stops
    a step for tens of milliseconds. Beside the few objects that are left a look costs little, so it comes often.
    """
    gc.collect()
    gc.freeze()
    gc.collect()  # tells the collector how few objects are left, from which it takes how often to look
    young, middle, _ = gc.get_threshold()
    gc.set_threshold(young, middle, 1)
