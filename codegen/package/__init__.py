"""Engine packages: what a compile leaves behind, written once and checked on loading.

Entry functions: ``write.write_engine`` and ``load.load_engine``.
"""
