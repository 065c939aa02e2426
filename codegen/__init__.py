"""The compiler: from a Graph to a Plan, from a Plan to kernels, from kernels to an engine folder."""
