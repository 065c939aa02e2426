"""The CPU backend: C++17 compiled ahead of time by g++; the embedded default."""

TARGETS = ("cpu",)
BUILT = True
