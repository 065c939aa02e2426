"""One module per kernel family: KernelSpec -> CudaSource."""
