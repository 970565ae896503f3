#!/usr/bin/env bash
# docs/codec.md, Trained score; writes calibrations with the scorers to the folder that comes first
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

python benchmark/scorer.py --out "$@"
