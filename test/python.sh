#!/usr/bin/env bash
# python.sh FILE: runs a test that is in Python, in the environment of `make scripts`, which this
# makes; tests against transformers need what `make golden` adds to it, or GOLDEN_PYTHON. Where that
# is missing, the file counts as one skipped test.
# shellcheck source=test/lib.sh
source "$(dirname "$0")/lib.sh"
unset OMP_NUM_THREADS
python=$root/.venv/bin/python
if [[ $1 == */transformers_*.py ]]; then
    python=${GOLDEN_PYTHON:-$python}
    "$python" -c 'import torch, transformers' >/dev/null 2>&1 ||
        skip_all "$python lacks torch or transformers (make golden installs them)"
else
    need_scripts
fi
exec "$python" "$1"
