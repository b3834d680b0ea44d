"""A package index on the loopback with small wheels made here, and a record of what was fetched."""

from __future__ import annotations

import threading
import zipfile
from collections.abc import Mapping
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType


def write_wheel(
    folder: Path,
    name: str,
    version: str,
    files: Mapping[str, str],
    script: str | None = None,
    needs: str = "",
) -> Path:
    """A wheel of text files. script: `name = module:function` of a command that it installs.
    needs: further lines of its METADATA."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-{version}-py3-none-any.whl"
    info = f"{name}-{version}.dist-info"
    facts = {
        "METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}",
        "WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        "RECORD": "",
    }
    if script is not None:
        facts["entry_points.txt"] = f"[console_scripts]\n{script}\n"
    with zipfile.ZipFile(path, "w") as wheel:
        for place, text in files.items():
            wheel.writestr(place, text)
        for place, text in facts.items():
            wheel.writestr(f"{info}/{place}", text)
    return path


class PackageIndex:
    """Serves a folder whose folders are indexes (PEP 503) while it is entered.

    fetched: paths of the wheels that were sent. asked: all paths.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.asked: list[str] = []
        self._server = ThreadingHTTPServer(
            ("127.0.0.1", 0), partial(_Handler, self.asked, directory=str(folder))
        )
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    @property
    def fetched(self) -> list[str]:
        return [path for path in self.asked if path.endswith(".whl")]

    def add(self, index: str, name: str, version: str, files: Mapping[str, str]) -> None:
        write_wheel(self.folder / index / name, name, version, files)

    def __enter__(self) -> PackageIndex:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Handler(SimpleHTTPRequestHandler):
    def __init__(self, asked: list[str], *args: object, **kwargs: object) -> None:
        self._asked = asked
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]

    def log_message(self, format: str, *args: object) -> None:
        self._asked.append(self.path)
