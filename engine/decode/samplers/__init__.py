"""The parts of the sampler chain."""
