"""llama-server of the `xllamacpp` wheel as a program: `python xllamacpp_server.py -m MODEL …`.

Takes those of llama-server's options that the tests use, and serves until it is ended.
"""

from __future__ import annotations

import argparse
import os
import sys
import threading


def main() -> None:
    """Serve; what is logged goes to --log-file too, as llama-server does it."""
    import xllamacpp

    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("-m", required=True)
    parser.add_argument("-md", default="")
    parser.add_argument("-np", type=int, default=1)
    parser.add_argument("-c", type=int, default=2048)
    parser.add_argument("-t", type=int, default=1)
    parser.add_argument("-lv", type=int, default=3)
    parser.add_argument("--log-file")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--metrics", action="store_true")
    parser.add_argument("--spec-type", default="none")
    parser.add_argument("--spec-draft-n-max", type=int, default=3)
    parser.add_argument("--spec-draft-p-min", type=float, default=0.0)
    parser.add_argument("--spec-draft-sampling", default="greedy")
    parser.add_argument("--spec-synth-rates", default="")
    parser.add_argument("--spec-ngram-mod-n-match", type=int, default=8)
    args = parser.parse_args()
    if args.log_file:
        file = os.open(args.log_file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, sys.stderr.fileno())
    params = xllamacpp.CommonParams()
    params.model.path = args.m
    params.n_parallel, params.n_ctx, params.port = args.np, args.c, args.port
    params.cpuparams.n_threads, params.verbosity = args.t, args.lv
    params.endpoint_metrics = params.endpoint_slots = params.endpoint_props = True
    params.warmup = False
    name = f"COMMON_SPECULATIVE_TYPE_{args.spec_type.upper().replace('-', '_')}"
    params.speculative.types = [getattr(xllamacpp.common_speculative_type, name)]
    params.speculative.draft.n_max = args.spec_draft_n_max
    params.speculative.draft.p_min = args.spec_draft_p_min
    params.speculative.draft.probabilistic = args.spec_draft_sampling == "probabilistic"
    if args.spec_synth_rates:
        params.speculative.synth_rates = [float(r) for r in args.spec_synth_rates.split(",")]
    params.speculative.ngram_mod.n_match = args.spec_ngram_mod_n_match
    if args.md:
        params.speculative.draft.mparams.path = args.md
    _server = xllamacpp.Server(params)  # it serves as long as it is referred to
    threading.Event().wait()


if __name__ == "__main__":
    main()
