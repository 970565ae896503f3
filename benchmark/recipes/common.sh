# Sourced by the recipes: the repository's own directory, its environment, one OpenMP thread.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
VENV="${VENV:-.venv}"
[ ! -d "$VENV/bin" ] || PATH="$VENV/bin:$PATH"
