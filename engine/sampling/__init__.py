"""What is drawn from the logits: distributions, the filters before a draw, the sampler."""
