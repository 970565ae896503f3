#!/usr/bin/env bash
# docs/performance.md, What it costs in quality
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

python benchmark/fidelity.py --prompts 5 "$@"
