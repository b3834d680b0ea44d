"""What a run did, checked against plain decoding of its text."""
