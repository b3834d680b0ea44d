"""One target and one drafter in two engines: what makes the drafts, or their acceptance, differ."""
