"""What a recorded run would have done under other settings and rules of drafting."""
