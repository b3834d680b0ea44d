"""The Lab panel: deliberate faults, break rules, and checks of builds and kernels."""
