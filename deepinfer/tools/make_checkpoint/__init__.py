"""Random checkpoints of any size in exactly the official names, shapes and storage formats.

What a tensor holds follows from how the model's graph uses it (``laws``), how it is stored from its declared dtype
(``codes``); shards are written as they are made (``shards``), so memory does not grow with the checkpoint.
"""
