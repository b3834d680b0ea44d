"""Tuning: whether to speculate, with which drafter and draft length; recorded once, simulated,
confirmed."""
