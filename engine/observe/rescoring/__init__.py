"""What another engine chose, judged by this one on the same file; two runs beside each other."""
