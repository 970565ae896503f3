#!/usr/bin/env bash
# docs/check.md, lm-eval: needs lm_eval[api] in an environment of its own; LM_EVAL names its command (ten minutes)
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

python benchmark/harness.py --lm-eval "${LM_EVAL:-lm_eval}" --formats bf16,fp4,csa2-4x --samples 10 --json lm_eval.json "$@"
