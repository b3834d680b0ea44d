"""The drafter diff: one target and drafter in two engines; why drafts, or their acceptance,
differ."""
