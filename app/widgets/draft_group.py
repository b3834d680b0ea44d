"""The drafters' part of the Run panel: limits, n-gram sizes, synthetic acceptance."""

from __future__ import annotations

from PySide6.QtCore import Signal
from PySide6.QtWidgets import QSpinBox, QWidget

from app.widgets.fields import choice, real, side_by_side, text, whole
from app.widgets.form_group import FormGroup
from engine.errors import OptionError
from engine.options import ACCEPT_RULES, MODEL_DRAFTERS, SpecOptions
from engine.options.ngram_options import NgramModOptions, NgramSizes

_DEFAULTS = SpecOptions()
_SIZED = {"ngram-simple": "ngram_simple", "ngram-map-k": "ngram_map_k"}


class DraftGroup(FormGroup):
    """A form over SpecOptions but for the drafters themselves and their longest draft."""

    changed = Signal()

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__("Drafter options", parent)
        self._types: tuple[str, ...] = ()
        self.n_min = whole(0, 64, 0)
        self.p_min = real(0.0, 1.0, 0.0)
        self.accept_rule = choice(ACCEPT_RULES, "match")
        self.sizes = {
            "ngram-simple": _size_fields(_DEFAULTS.ngram_simple),
            "ngram-map-k": _size_fields(_DEFAULTS.ngram_map_k),
            "ngram-map-k4v": {
                **_size_fields(_DEFAULTS.ngram_map_k4v),
                "hits": _count(_DEFAULTS.ngram_map_k4v.min_hits),
            },
            "ngram-mod": {
                "n": _count(_DEFAULTS.ngram_mod.n_match),
                "min": whole(0, 1024, _DEFAULTS.ngram_mod.n_min),
                "max": whole(0, 1024, _DEFAULTS.ngram_mod.n_max),
            },
        }
        self.cache_static, self.cache_dynamic = text("file"), text("file")
        self.synth_rates = text("0.8, 0.6, 0.4")
        self.synth_len = real(0.0, 1025.0, 0.0, special="off")
        self._rows = {name: side_by_side(fields) for name, fields in self.sizes.items()}
        self._add_rows()
        for spin in (self.n_min, *(f for row in self.sizes.values() for f in row.values())):
            spin.valueChanged.connect(self._on_changed)
        for number in (self.p_min, self.synth_len):
            number.valueChanged.connect(self._on_changed)
        for line in (self.synth_rates, self.cache_static, self.cache_dynamic):
            line.textChanged.connect(self._on_changed)
        self.accept_rule.currentTextChanged.connect(self._on_changed)
        self.set_types(())

    def set_types(self, types: tuple[str, ...]) -> None:
        """Show what these drafters have to set."""
        self._types = types
        self._on_changed()

    def options(self, n_max: int) -> SpecOptions:
        """Options of the drafters. Raises OptionError where they contradict each other."""
        matches = self.accept_rule.currentText() == "match"
        mod = self.sizes["ngram-mod"]
        k4v = self.sizes["ngram-map-k4v"]
        return SpecOptions(
            types=self._types,
            n_max=n_max,
            n_min=min(self.n_min.value(), n_max) if matches else 0,
            p_min=self.p_min.value(),
            accept=self.accept_rule.currentText(),
            ngram_simple=self._sizes("ngram-simple"),
            ngram_map_k=self._sizes("ngram-map-k"),
            ngram_map_k4v=NgramSizes(k4v["n"].value(), k4v["m"].value(), k4v["hits"].value()),
            ngram_mod=NgramModOptions(mod["n"].value(), mod["min"].value(), mod["max"].value()),
            lookup_cache_static=self.cache_static.text().strip() or None,
            lookup_cache_dynamic=self.cache_dynamic.text().strip() or None,
            synth_rates=self._rates() if self._types else (),
            synth_len=(self.synth_len.value() or None) if self._types else None,
        )

    def _add_rows(self) -> None:
        for label, field, option in (
            ("n_min", self.n_min, "--spec-draft-n-min: shorter drafts are thrown away"),
            ("p_min", self.p_min, "--spec-draft-p-min: the draft ends below this confidence"),
            ("accept", self.accept_rule, "--spec-accept: draw the same token, or p/q"),
        ):
            self.add(label, field, option)
        for name, row in self._rows.items():
            sizes = "n-match, -n-min, -n-max" if name == "ngram-mod" else "size-n, -size-m"
            tip = f"--spec-{name}-{sizes}: tokens looked up, longest draft"
            self.add(name.removeprefix("ngram-"), row, tip, name)
        lines: tuple[tuple[str, QWidget, str], ...] = (
            ("static cache", self.cache_static, "--lookup-cache-static: 2-grams of a corpus"),
            ("dynamic cache", self.cache_dynamic, "--lookup-cache-dynamic: earlier output"),
            ("synth rates", self.synth_rates, "--spec-synth-rates: the output is invalid"),
            ("synth len", self.synth_len, "--spec-synth-len: mean length; output is invalid"),
        )
        for label, line, option in lines:
            self.add(label, line, option)

    def _sizes(self, name: str) -> NgramSizes:
        fields = self.sizes[name]
        hits = getattr(_DEFAULTS, _SIZED[name]).min_hits
        return NgramSizes(fields["n"].value(), fields["m"].value(), hits)

    def _rates(self) -> tuple[float, ...]:
        words = self.synth_rates.text().replace(",", " ").split()
        try:
            return tuple(float(word) for word in words)
        except ValueError as error:
            raise OptionError(
                "--spec-synth-rates has a word that is no number.", "Write it like 0.8, 0.6, 0.4."
            ) from error

    def _on_changed(self) -> None:
        types, matches = self._types, self.accept_rule.currentText() == "match"
        with_model = bool(set(types) & set(MODEL_DRAFTERS))
        self.set_relevant(self.n_min, with_model and matches)
        self.set_relevant(self.p_min, with_model)
        for field in (self.accept_rule, self.synth_rates, self.synth_len):
            self.set_relevant(field, bool(types))
        for name, row in self._rows.items():
            self.set_relevant(row, name in types)
        for line in (self.cache_static, self.cache_dynamic):
            self.set_relevant(line, "ngram-cache" in types)
        synthetic = bool(types) and (
            bool(self.synth_rates.text().strip()) or self.synth_len.value() > 0
        )
        self.summarise("output invalid" if synthetic else "")
        self.changed.emit()


def _count(value: int) -> QSpinBox:
    return whole(1, 1024, value)


def _size_fields(sizes: NgramSizes) -> dict[str, QSpinBox]:
    return {"n": _count(sizes.size_n), "m": _count(sizes.size_m)}
