#!/usr/bin/env bash
# README, and docs/codec.md, What it costs (hours; --device cpu where there is another device)
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

python benchmark/quality.py --split report --copies 4 --no-layers --formats csa2-2x,csa2-4x,csa2-8x,k8v4,fp4,int4 \
    --kinds language-reference,stdlib-docstrings,stdlib-comments,stdlib-code,torch-docstrings,readmes \
    --csa2-calibration csa2/calibrations/smollm2-135m-instruct "$@"
