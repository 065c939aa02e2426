"""One module per kernel family: KernelSpec -> AscendSource."""
