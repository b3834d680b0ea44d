"""Scripts in place of llama-bench and llama-server, which say what a test tells them to."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

_BENCH = """#!{python}
import json, sys, time
words = sys.argv[1:]
with open({asked!r}, "a") as file:
    file.write(json.dumps(words) + "\\n")
sys.stderr.write({said!r})
time.sleep({seconds})
sys.stdout.write({out!r})
sys.exit({status})
"""

_SERVER = """#!{python}
import json, sys
from http.server import BaseHTTPRequestHandler, HTTPServer
words = sys.argv[1:]
with open({asked!r}, "a") as file:
    file.write(json.dumps(words) + "\\n")
sys.stderr.write({said!r})
if {status}:
    sys.exit({status})

class Handler(BaseHTTPRequestHandler):
    starts = 2

    def do_GET(self):
        Handler.starts -= 1  # not ready at first
        found = json.dumps({{"data": [{{"id": "fake"}}]}})
        self.answer(503 if Handler.starts > 0 else 200, found)

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with open({asked!r}, "a") as file:
            file.write(json.dumps(body) + "\\n")
        self.answer(200, "data: " + json.dumps({reply!r}) + "\\n\\ndata: [DONE]\\n\\n")

    def answer(self, status, text):
        raw = text.encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def log_message(self, *_):
        pass

HTTPServer(("127.0.0.1", int(words[words.index("--port") + 1])), Handler).serve_forever()
"""

FIGURES = [{"build_commit": "abc1234", "build_number": 7, "samples_ts": [30.0, 10.0, 20.0]}]
TIMINGS = {
    "timings": {"predicted_n": 10, "predicted_ms": 2000.0, "draft_n": 30, "draft_n_accepted": 20}
}


class FakePrograms:
    """A folder with both scripts. `bench` and `server` write them anew."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.bench()
        self.server()

    def bench(
        self, out: str = json.dumps(FIGURES), said: str = "", status: int = 0, seconds: float = 0.0
    ) -> None:
        """out, said: its output and error output. seconds: how long it takes in between."""
        self._write(_BENCH, "llama-bench", out=out, said=said, status=status, seconds=seconds)

    def server(self, reply: object = TIMINGS, said: str = "", status: int = 0) -> None:
        """reply: the one event of every answer. status: it ends with it at once, unless 0."""
        self._write(_SERVER, "llama-server", reply=reply, said=said, status=status)

    def asked(self, name: str) -> list[Any]:
        """The words that it was started with, each time, and the bodies of its requests."""
        return [json.loads(line) for line in self._log(name).read_text().splitlines()]

    def _write(self, script: str, name: str, **values: object) -> None:
        path = self.folder / name
        log = str(self._log(name))
        path.write_text(script.format(python=sys.executable, asked=log, **values))
        path.chmod(0o755)

    def _log(self, name: str) -> Path:
        return self.folder / f"{name}.log"
