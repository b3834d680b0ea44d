"""Pure functions on tensors, no model knowledge; one folder per operation."""

from kernels import torch_start
from kernels.processor import limit_libraries

limit_libraries()
torch_start.leave_out()
