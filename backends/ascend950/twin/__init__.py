"""A CPU machine that runs generated AscendC and reports what a device would get wrong."""
