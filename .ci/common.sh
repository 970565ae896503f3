# Shared by the scripts of this folder. Source it after `set -euo pipefail`.

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
PYTHON="${PYTHON:-python3}"
VENV="${VENV:-.venv}"

# One line on the error stream, then out.
fail() {
    echo "$STEP failed: $*" >&2
    exit 1
}

# check_python COMMAND HINT: the command is a Python this project runs on.
# SGLang 0.5.23 sets the lower bound, the versions of requirements.lock the upper one.
check_python() {
    local version
    command -v "$1" >/dev/null || fail "there is no $1: install Python 3.11 or 3.12, then $2"
    version="$("$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>&1)" ||
        fail "$1 does not run (${version##*$'\n'}): $2"
    case "$version" in
    3.11 | 3.12) ;;
    *) fail "$1 is Python $version, but SGLang 0.5.23 needs 3.11 or 3.12: $2" ;;
    esac
}
