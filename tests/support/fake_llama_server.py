"""A program that answers as llama-server and computes how long it would have taken, from the flags
of speculation: `python fake_llama_server.py --port P --spec-type T --spec-draft-n-max N …`."""

from __future__ import annotations

import argparse
import json
import random
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


def tokens_per_round(rate: float, n_max: int) -> float:
    """Expected, with one probability at every place."""
    return sum(rate**i for i in range(n_max + 1))


def main() -> None:
    """Serve until it is ended."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--rate", type=float, default=0.7)
    parser.add_argument("--width-ms", type=float, default=2.0)
    parser.add_argument("--started", type=Path)
    parser.add_argument("--spec-type", default="none")
    parser.add_argument("--spec-draft-n-max", type=int, default=3)
    parser.add_argument("--spec-draft-p-min", type=float, default=0.0)
    parser.add_argument("--spec-synth-rates")
    parser.add_argument("--text", default="one two three")
    args = parser.parse_args()
    n_max = 0 if args.spec_type == "none" else args.spec_draft_n_max
    if args.started:
        with args.started.open("a") as file:
            file.write(f"{args.spec_type} {n_max} {args.spec_draft_p_min:g}\n")
    # the floor costs a little here
    round_ms = 20.0 + args.width_ms * n_max + args.spec_draft_p_min
    ms = round_ms / tokens_per_round(args.rate, n_max)
    dice = random.Random(args.port)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = b'{"data": [{"id": "fake"}]}' if self.path == "/v1/models" else b"{}"
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body)

        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            n = asked["max_tokens"]
            timings = {
                "predicted_n": n - 1,
                "predicted_ms": ms * (n - 1) * dice.uniform(0.99, 1.01),
            }
            if n_max:
                timings |= {"draft_n": 10 * n_max, "draft_n_accepted": int(10 * n_max * args.rate)}
            events = [
                {"choices": [{"text": args.text}]},
                {"choices": [], "usage": {"completion_tokens": n}, "timings": timings},
            ]
            self.send_response(200)
            self.end_headers()
            for event in events:
                self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
            self.wfile.write(b"data: [DONE]\n\n")

        def log_message(self, *_: object) -> None:
            pass

    ThreadingHTTPServer(("127.0.0.1", args.port), Handler).serve_forever()


if __name__ == "__main__":
    main()
