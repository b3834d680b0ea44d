"""The Lab panel: what makes runs fail on purpose, where they pause, and checks of builds
and kernels."""
