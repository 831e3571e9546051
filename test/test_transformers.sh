#!/usr/bin/env bash
# Imports and checkpoints against transformers; the Python is `make golden`'s, or GOLDEN_PYTHON.
root=${LLM8_ROOT:-$(cd "$(dirname "$0")/.." && pwd)}
python=${GOLDEN_PYTHON:-$root/.venv/bin/python}
if ! "$python" -c 'import torch, transformers' >/dev/null 2>&1; then
    echo "  skipped: $python lacks torch or transformers (make golden installs them)"
    echo "0 passed, 0 failed, 1 skipped"
    exit 0
fi
mkdir -p work && cd work || exit 1
exec "$python" "$root/test/transformers_tests.py"
