# Sourced by tools/up and tools/check: finds a Python 3.11 and runs one of our modules under it.
# PYTHON names another interpreter.

find_python() {
    local candidate
    for candidate in ${PYTHON:+"$PYTHON"} python3.11 python3 python; do
        # A name on the PATH may be a shim that finds nothing: only running it tells.
        if "$candidate" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' >/dev/null 2>&1; then
            echo "$candidate"
            return
        fi
    done
    echo "Estafet needs Python 3.11 and found none as python3.11, python3 or python." >&2
    echo "Install it (Debian, Ubuntu: apt install python3.11 python3.11-venv; macOS: brew install" >&2
    echo "python@3.11) or name one: PYTHON=/path/to/python3.11 $0" >&2
    exit 3
}

run_module() {  # MODULE [ARGUMENTS...]
    local python
    python=$(find_python)
    # Not by PYTHONPATH, which every child would inherit.
    exec "$python" -c '
import importlib, sys
sys.path[0], module = sys.argv[1:3]
sys.exit(importlib.import_module(module).main(sys.argv[3:]))
' "$root" "$@"
}
