"""Re-scoring: tokens that another engine emitted, judged by this one on the same file."""
