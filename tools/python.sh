# Sourced by tools/up and tools/check: finds a Python 3.11 and runs one of our modules under it.
# PYTHON names another interpreter.

find_python() {
    local candidate candidates=(python3.11 python3 python)
    [ -z "${PYTHON:-}" ] || candidates=("$PYTHON")
    for candidate in "${candidates[@]}"; do
        # A name on the PATH may be a shim that finds nothing: only running it tells.
        if "$candidate" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' >/dev/null 2>&1; then
            echo "$candidate"
            return
        fi
    done
    if [ -n "${PYTHON:-}" ]; then
        echo "estafet: PYTHON=$PYTHON is no Python 3.11; name another, or unset it to have one looked for" >&2
    else
        echo "estafet: needs Python 3.11 and found none as python3.11, python3 or python; install it (Debian," >&2
        echo "Ubuntu: apt install python3.11 python3.11-venv) or name one: PYTHON=/path/to/python3.11 $0" >&2
    fi
    exit 3
}

run_module() {  # MODULE [ARGUMENTS...]
    local python
    python=$(find_python)
    # The root not by PYTHONPATH, which every child would inherit.
    exec "$python" -c '
import importlib, sys
sys.path[0], module = sys.argv[1:3]
from tools import interrupts
interrupts.at_once()
main = importlib.import_module(module).main
sys.exit(interrupts.guarded(lambda: main(sys.argv[3:])))
' "$root" "$@"
}
