#!/usr/bin/env bash
# docs/performance.md, Eviction, by the clock (a quarter of an hour)
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

python benchmark/trace_latency.py --trace agents --requests 120 --policies csa2 lru slru "$@"
python benchmark/trace_latency.py --trace agents --requests 120 --chunk-tokens 4096 "$@"
