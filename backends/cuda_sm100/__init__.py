"""NVIDIA Hopper and Blackwell: cubins for sm_90a and sm_100a, launched through the CUDA driver."""

TARGETS = ("sm100", "sm90")
BUILT = True
COMPILED_ONLY = ("sm100",)  # no engine for it has run yet
RUNNER = "cuda"
