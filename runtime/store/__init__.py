"""The prefix store: cache blocks on disk, crash-safe, shared by processes and hosts."""
