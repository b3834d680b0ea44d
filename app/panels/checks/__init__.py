"""The Checks panel: rollback of llama.cpp builds, and kernels of other engines."""
