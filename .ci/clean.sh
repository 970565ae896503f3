#!/usr/bin/env bash
# Removes caches of the tools and the environment at $VENV, if `make setup` made it. The demo model stays.
set -euo pipefail
STEP=clean
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
cd "$ROOT"

if [ -e "$VENV" ]; then
    grep -qs '^prompt *=.*sglang-csa2' "$VENV/pyvenv.cfg" || fail "$VENV was not made by \`make setup\`: remove it yourself if you mean it"
    rm -rf "$VENV"
fi
rm -rf .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist
find benchmark csa2 python sgl_kernels test -name __pycache__ -prune -exec rm -rf {} +
echo "clean: done (the demo model stays; \`csa2 demo-model\` prints where)"
