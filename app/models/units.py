"""Figures as text with their unit."""


def format_bytes(n: int) -> str:
    """Three significant digits with a decimal unit: 0 B, 512 kB, 9.41 MB."""
    value = float(n)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 999.5:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.3g} TB"
