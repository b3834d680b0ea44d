"""Many runs from one plan: jobs one after another or on a Ray cluster, results in one file."""
