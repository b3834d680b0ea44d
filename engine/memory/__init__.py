"""What the decoder remembers: attention cells, recurrent states, checkpoints."""
