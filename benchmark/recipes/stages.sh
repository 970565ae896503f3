#!/usr/bin/env bash
# docs/codec.md, tables of the stages
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

python benchmark/codec_stages.py --markdown "$@"
