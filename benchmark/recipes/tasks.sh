#!/usr/bin/env bash
# docs/check.md, Tasks (half an hour)
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

csa2 check --model "$(csa2 demo-model)" --tasks needle,multi-needle,copy --context 1024 --samples 12 \
    --formats fp4,csa2-2x,csa2-4x,csa2-8x --csa2-warm-tokens 128 --dtype auto --device cpu \
    --csa2-calibration csa2/calibrations/smollm2-135m-instruct --json tasks.json --kvpress results "$@"
