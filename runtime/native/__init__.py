"""The fixed native runner: C++ sources, and how they become ``runner.so``."""
