"""The dock of estimated speeds by n_max and p_min."""
