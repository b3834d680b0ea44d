"""How fast the kernels are on this machine: python -m kernels.bench."""
