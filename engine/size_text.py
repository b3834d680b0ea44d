"""How a number of bytes is written, wherever it is."""

from __future__ import annotations

_UNITS = ("B", "KiB", "MiB", "GiB")


def size_text(n_bytes: float) -> str:
    """Three significant digits with a binary unit: 0 B, 512 KiB, 9.41 MiB; below 1024 of a unit
    all its digits: 1,020 KiB."""
    value = float(n_bytes)
    for unit in _UNITS:
        if value < 1023.5:
            return _three_digits(value) + f" {unit}"
        value /= 1024
    return _three_digits(value) + " TiB"


def _three_digits(value: float) -> str:
    return f"{value:.3g}" if value < 999.5 else f"{value:,.0f}"
