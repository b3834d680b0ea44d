"""GGUF files of real shapes with random weights, for benchmarks."""
