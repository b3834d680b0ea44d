"""A script that plays one fault again without this program: a Python archive for the author of the
kernel, which needs torch and triton alone."""

from __future__ import annotations

import zipfile
from dataclasses import asdict, replace
from pathlib import Path

import engine
from engine.conform.checks import Fault
from engine.files import written_whole

_FILES = ("__init__.py", "errors.py", "plain_text.py")
_LEFT_OUT = ("own", "report", "repeat_script")
_MAIN = '''"""Plays one check of a kernel again and prints what differs: {kernel}, {check}: {cause}.

python3 {file} [TARGET]

TARGET is the package, its wheel or folder, or the adapter (FILE.py:FUNCTION); without it that of
the first time: {target!r}. Needs torch and triton.
"""

import os
import sys

if len(sys.argv) > 1 and sys.argv[1] in ("-h", "--help"):
    sys.exit(__doc__)
if {device!r} == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"

from engine.conform.runner import play_again

lines = list(play_again(sys.argv[1] if len(sys.argv) > 1 else {target!r}, {fault!r}, {device!r}))
print("\\n".join(lines))
sys.exit(not lines[0].startswith("0 "))
'''


def write_script(path: Path, fault: Fault, target: str, device: str) -> None:
    """Write the archive that plays `fault` of `target` again on `device` (cpu or cuda).

    Raises OptionError where the system does not let us write.
    """
    folder = Path(engine.__file__).parent
    # infinity has no spelling in Python's source
    fields = asdict(replace(fault, error=0.0, row_errors=(), depth_errors=()))
    if Path(target.rpartition(":")[0]).is_file() or Path(target).exists():
        target = str(Path(target).absolute())
    main = _MAIN.format(
        kernel=fault.kernel, check=fault.check, cause=fault.cause, file=path.name, target=target,
        device=device, fault=fields,
    )  # fmt: skip
    with written_whole(path) as part, part.open("wb") as file:
        file.write(b"#!/usr/bin/env python3\n")
        with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("__main__.py", main)
            checks = [f for f in (folder / "conform").rglob("*.py") if f.stem not in _LEFT_OUT]
            for source in (*(folder / name for name in _FILES), *sorted(checks)):
                archive.write(source, f"engine/{source.relative_to(folder)}")
