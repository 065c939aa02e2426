"""One module per kernel family: KernelSpec -> Source."""
