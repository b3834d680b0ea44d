"""Results of the suite, of sweeps and of tune: one file, written row by row, read and resumed."""
