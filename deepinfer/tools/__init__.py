"""Developer tools, each run as `python -m deepinfer.tools.NAME`."""
