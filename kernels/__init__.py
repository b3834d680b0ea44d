"""Pure functions on tensors, no model knowledge; one folder per operation."""

from kernels.processor import limit_libraries

limit_libraries()
