"""What all tests share."""

from __future__ import annotations

import os

# before torch is imported: the tests' models are too small to gain from a second thread
os.environ.setdefault("OMP_NUM_THREADS", "1")
