"""The first page of Lab: what it sets is an option of the next run, and scenarios open from it."""

from __future__ import annotations

import pytest
from PySide6.QtWidgets import QApplication

from app.window.dialogs.runs import ScenarioDialog
from app.window.window import MainWindow

pytestmark = pytest.mark.shares_window


def test_what_is_set_in_lab_is_an_option_of_the_next_run(window: MainWindow) -> None:
    window.docks.enter("faults")
    lab, panel = window.panels.lab, window.run_panel
    assert lab.isVisible()
    fault, rates = panel.faults["faults"], panel.synthetic["synth_rates"]
    assert lab.isAncestorOf(fault) and fault.isVisible()
    assert lab.isAncestorOf(rates) and rates.isVisible()
    fault.set_names(["stale-plane"])
    rates.setText("0.9 0.5 0.1")
    assert panel.options().faults == ("stale-plane",)
    assert panel.options().spec.synthetic == (0.9, 0.5, 0.1)
    assert "invalid" in panel.message.text(), "said where runs are started"
    panel.drafter.set_names([])
    assert not fault.isVisible() and not rates.isVisible(), "nothing is drafted"
    assert panel.options().faults == () and not panel.options().spec.synthetic
    panel.drafter.set_names(["draft-mtp"])
    fault.set_names([])
    rates.clear()


def test_nothing_of_it_is_a_window_of_its_own(window: MainWindow) -> None:
    QApplication.processEvents()
    tops = [type(widget).__name__ for widget in QApplication.topLevelWidgets()]
    assert "ProvokingGroup" not in tops
    assert all(window.isAncestorOf(group) for group in window.run_panel.provoking)


def test_scenarios_open_from_it(window: MainWindow) -> None:
    window.docks.enter("faults")
    window.panels.lab.button.click()
    assert window.findChild(ScenarioDialog) is not None
