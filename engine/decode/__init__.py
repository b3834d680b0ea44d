"""The decoding loop: sampling, verification, slots, scheduling."""
