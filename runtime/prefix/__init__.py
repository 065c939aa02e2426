"""The prefix cache: keys of blocks, and the tier in memory."""
