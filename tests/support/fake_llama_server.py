"""A program that answers as llama-server and computes how long it would have taken, from the flags
of speculation: `python fake_llama_server.py --port P --spec-type T --spec-draft-n-max N …`."""

from __future__ import annotations

import argparse
import json
import random
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


def tokens_per_round(rate: float, n_max: int, fade: float = 1.0) -> float:
    """Expected, with a probability at each place that is `fade` times that of the place before."""
    return sum(rate**i * fade ** (i * (i - 1) // 2) for i in range(n_max + 1))


def round_ms(n_max: int, width_ms: float, jump_at: int = 1 << 20, jump_ms: float = 0.0) -> float:
    """What a round takes; more from a width of verification on, as where a kernel changes."""
    return 20.0 + width_ms * n_max + jump_ms * (n_max + 1 >= jump_at)


def drawn_rounds(rate: float, fade: float, n_max: int, n: int, dice: random.Random) -> list[int]:
    """Tokens accepted in each round of n tokens."""
    found = []
    while n > 0:
        accepted = 0
        while accepted < n_max and dice.random() < rate * fade**accepted:
            accepted += 1
        found.append(accepted)
        n -= accepted + 1
    return found


def main() -> None:
    """Serve until it is ended."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--rate", type=float, default=0.7)
    parser.add_argument("--width-ms", type=float, default=2.0)
    parser.add_argument("--jump-at", type=int, default=1 << 20)
    parser.add_argument("--jump-ms", type=float, default=0.0)
    parser.add_argument("--fade", type=float, default=1.0)
    parser.add_argument("--silent", action="store_true")
    parser.add_argument("--started", type=Path)
    parser.add_argument("--wait-s", type=float, default=0.0)
    parser.add_argument("--slow-after", type=int, default=0, help="requests to all servers")
    parser.add_argument("--requests", type=Path, help="a byte for each, where they are counted")
    parser.add_argument("--event-s", type=float, default=0.0)
    parser.add_argument("--spec-type", default="none")
    parser.add_argument("--spec-draft-n-max", type=int, default=3)
    parser.add_argument("--spec-draft-p-min", type=float, default=0.0)
    parser.add_argument("--spec-synth-rates")
    parser.add_argument("--text", default="one two three")
    parser.add_argument("--api-key")
    parser.add_argument("--n-params", type=int, default=0)
    parser.add_argument("-md", default="")
    args = parser.parse_args()
    n_max = 0 if args.spec_type == "none" else args.spec_draft_n_max
    if args.started:
        with args.started.open("a") as file:
            file.write(
                f"{args.spec_type} {n_max} {args.spec_draft_p_min:g} {args.md}".strip() + "\n"
            )
    # the floor costs a little here
    takes_ms = round_ms(n_max, args.width_ms, args.jump_at, args.jump_ms) + args.spec_draft_p_min
    ms = takes_ms / tokens_per_round(args.rate, n_max, args.fade)
    dice = random.Random(args.port)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            is_known = (
                args.api_key is None or self.headers["Authorization"] == f"Bearer {args.api_key}"
            )
            listed = {"data": [{"id": "fake", "meta": {"n_params": args.n_params}}]}
            self.send_response(200 if is_known else 401)
            self.end_headers()
            self.wfile.write(json.dumps(listed if self.path == "/v1/models" else {}).encode())

        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            n = asked["max_tokens"]
            timings = {
                "predicted_n": n - 1,
                "predicted_ms": ms * (n - 1) * dice.uniform(0.99, 1.01),
            }
            if n_max:
                timings |= {"draft_n": 10 * n_max, "draft_n_accepted": int(10 * n_max * args.rate)}
            chunks = [{"choices": [{"text": args.text}]}]
            if asked.get("timings_per_token") and not args.silent:
                rounds = drawn_rounds(args.rate, args.fade, n_max, n, dice)
                step_ms = timings["predicted_ms"] / len(rounds)
                timings |= {"draft_n": len(rounds) * n_max, "draft_n_accepted": sum(rounds)}
                chunks = [
                    {
                        "choices": [{"text": args.text if i == 0 else ""}],
                        "timings": {
                            "predicted_n": i + sum(rounds[:i]) + 1,
                            "predicted_ms": step_ms * i,
                            "draft_n": i * n_max,
                            "draft_n_accepted": sum(rounds[:i]),
                        },
                    }
                    for i in range(len(rounds))
                ]
            events = [
                *chunks,
                {"choices": [], "usage": {"completion_tokens": n}, "timings": timings},
            ]
            if args.requests:
                with args.requests.open("ab") as file:
                    file.write(b".")
            is_slow = not args.requests or args.requests.stat().st_size > args.slow_after
            time.sleep(args.wait_s * is_slow)
            self.send_response(200)
            self.end_headers()
            for event in events * (1 + 1000 * bool(args.event_s)):
                time.sleep(args.event_s)
                self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
            self.wfile.write(b"data: [DONE]\n\n")

        def log_message(self, *_: object) -> None:
            pass

    ThreadingHTTPServer(("127.0.0.1", args.port), Handler).serve_forever()


if __name__ == "__main__":
    main()
