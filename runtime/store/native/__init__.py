"""The native part of the store: records read, proved, copied and assembled without the interpreter's lock."""

LIBRARY = "store.so"  # in the folder lib/ of an engine
