"""One package for each target family; each announces its targets as `TARGETS` and its state as `BUILT`."""
