"""Memory of the decoder: attention cells, recurrent states, checkpoints."""
