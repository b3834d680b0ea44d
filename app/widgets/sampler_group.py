"""The sampler's part of the Run panel."""

from __future__ import annotations

from PySide6.QtCore import Signal
from PySide6.QtWidgets import QCheckBox, QWidget

from app.widgets.fields import real, text, whole
from app.widgets.form_group import FormGroup
from engine.options import SamplerOptions
from engine.options.bias_text import parse_bias


class SamplerGroup(FormGroup):
    """A form over SamplerOptions, whether the end token counts, and logits that are none."""

    changed = Signal()

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__("Sampling", parent, plain="greedy")
        self.temp = real(0.0, 5.0, 0.0, special="0 (greedy)")
        self.top_k = whole(0, 100_000, 40, special="off")
        self.typical_p = real(0.01, 1.0, 1.0)
        self.top_p = real(0.01, 1.0, 0.95)
        self.min_p = real(0.0, 1.0, 0.05)
        self.seed = whole(0, 2**31 - 1, 42)
        self.repeat_penalty = real(0.01, 10.0, 1.0)
        self.presence_penalty = real(-10.0, 10.0, 0.0)
        self.frequency_penalty = real(-10.0, 10.0, 0.0)
        self.repeat_last_n = whole(-1, 100_000, 64, special="all")
        self.logit_bias = text("302+1.5, 15-100")
        self.ignore_eos = QCheckBox("ignore end of text")
        self.allow_non_finite = QCheckBox("go on behind NaN")
        for label, field, option in (
            ("temperature", self.temp, "--temp: 0 takes the most probable token"),
            ("top_k", self.top_k, "--top-k: keep this many candidates"),
            ("typical_p", self.typical_p, "--typical: keep tokens near the expected surprise"),
            ("top_p", self.top_p, "--top-p: keep candidates up to this total probability"),
            ("min_p", self.min_p, "--min-p: drop candidates below this share of the best"),
            ("seed", self.seed, "--seed: start of the random numbers"),
            ("repeat", self.repeat_penalty, "--repeat-penalty: divides logits of recent tokens"),
            ("presence", self.presence_penalty, "--presence-penalty: off a recent token's logit"),
            ("frequency", self.frequency_penalty, "--frequency-penalty: the same per occurrence"),
            ("last_n", self.repeat_last_n, "--repeat-last-n: tokens that count as recent"),
            ("logit bias", self.logit_bias, "--logit-bias: token ids and what to add to them"),
        ):
            self.add(label, field, option)
        self.add("", self.ignore_eos, "--ignore-eos: go on after the end token", "end of text")
        self.add(
            "",
            self.allow_non_finite,
            "--allow-non-finite: go on where logits are NaN or infinite",
            "non-finite logits",
        )
        for number in (
            self.temp,
            self.top_p,
            self.typical_p,
            self.min_p,
            self.repeat_penalty,
            self.presence_penalty,
            self.frequency_penalty,
            self.top_k,
            self.seed,
            self.repeat_last_n,
        ):
            number.valueChanged.connect(self._on_changed)
        self.logit_bias.textChanged.connect(self._on_changed)
        self.ignore_eos.toggled.connect(self._on_changed)
        self.allow_non_finite.toggled.connect(self._on_changed)
        self._on_changed()

    def options(self) -> SamplerOptions:
        """The sampler as set. Raises OptionError for a bias that cannot be read."""
        words = self.logit_bias.text().replace(",", " ").split()
        return SamplerOptions(
            temp=self.temp.value(),
            top_k=self.top_k.value(),
            top_p=self.top_p.value(),
            min_p=self.min_p.value(),
            seed=self.seed.value(),
            typical_p=self.typical_p.value(),
            repeat_penalty=self.repeat_penalty.value(),
            repeat_last_n=self.repeat_last_n.value(),
            presence_penalty=self.presence_penalty.value(),
            frequency_penalty=self.frequency_penalty.value(),
            logit_bias=tuple(parse_bias(word) for word in words),
        )

    def _on_changed(self) -> None:
        draws = self.temp.value() > 0
        for field in (self.top_k, self.typical_p, self.top_p, self.min_p, self.seed):
            self.set_relevant(field, draws)
        penalised = (
            self.repeat_penalty.value(),
            self.presence_penalty.value(),
            self.frequency_penalty.value(),
        ) != (1.0, 0.0, 0.0)
        self.set_relevant(self.repeat_last_n, penalised)
        self.summarise()
        self.changed.emit()
