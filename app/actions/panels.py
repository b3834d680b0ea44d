"""One action for each dock."""

from __future__ import annotations

from app.actions.spec import ActionSpec

PANELS = (
    ActionSpec(
        "view.panel_model",
        "&Model",
        "Show or hide the model's layers and memory",
        "Ctrl+1",
        checkable=True,
    ),
    ActionSpec(
        "view.panel_run",
        "Run &Settings",
        "Show or hide the prompt and options",
        "Ctrl+2",
        checkable=True,
    ),
    ActionSpec(
        "view.panel_rollback",
        "R&ollback Depth",
        "Show or hide the plot of undone tokens",
        "Ctrl+3",
        checkable=True,
    ),
    ActionSpec(
        "view.panel_ring",
        "R&ing Occupancy",
        "Show or hide the states of the snapshot slots",
        "Ctrl+4",
        checkable=True,
    ),
    ActionSpec(
        "view.panel_divergence",
        "Di&vergence",
        "Show or hide the lanes side by side",
        "Ctrl+5",
        checkable=True,
    ),
    ActionSpec(
        "view.panel_findings",
        "Fi&ndings",
        "Show or hide the failures that were recognised",
        "Ctrl+6",
        checkable=True,
    ),
    ActionSpec(
        "view.panel_inspector",
        "Step Inspe&ctor",
        "Show or hide one round in full",
        "Ctrl+7",
        checkable=True,
    ),
    ActionSpec(
        "view.panel_runs", "R&uns", "Show or hide the list of runs", "Ctrl+8", checkable=True
    ),
    ActionSpec(
        "view.panel_breaks",
        "&Break Rules",
        "Show or hide the conditions at which the run pauses",
        "Ctrl+9",
        checkable=True,
    ),
    ActionSpec(
        "view.panel_conversation",
        "Conve&rsation",
        "Show or hide the turns of a conversation and what each took from memory",
        checkable=True,
    ),
    ActionSpec(
        "view.panel_acceptance",
        "&Acceptance",
        "Show or hide how many drafted tokens are accepted",
        checkable=True,
    ),
    ActionSpec(
        "view.panel_timing",
        "Tim&e per Round",
        "Show or hide what the time of each round was spent on",
        checkable=True,
    ),
    ActionSpec(
        "view.panel_verify",
        "Verify Wi&dth",
        "Show or hide the tokens of each forward pass",
        checkable=True,
    ),
    ActionSpec(
        "view.panel_kv", "&KV Cells", "Show or hide the attention cells in use", checkable=True
    ),
    ActionSpec(
        "view.panel_what_if",
        "&What If",
        "Show or hide estimates for shorter drafts",
        checkable=True,
    ),
    ActionSpec(
        "view.panel_drafter",
        "Dra&fter",
        "Show or hide whether the drafter's confidence can be trusted and how far its drafts come",
        checkable=True,
    ),
    ActionSpec(
        "view.panel_tune",
        "&Tune",
        "Show or hide estimated speeds by n_max and p_min",
        checkable=True,
    ),
    ActionSpec(
        "view.panel_results",
        "Resu&lts",
        "Show or hide the results of a sweep or of draftscope tune",
        checkable=True,
    ),
)
