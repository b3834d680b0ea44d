"""Conformance of rollback kernels: rounds of draft, verify, accept and commit, played on an adapter
and compared with the recurrences in f64."""
