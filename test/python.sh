#!/usr/bin/env bash
# python.sh FILE: runs a test that is in Python, in the environment of `make scripts`, which this
# makes; tests against transformers in that of `make golden`, or GOLDEN_PYTHON. Where there is no
# such environment, the file counts as one skipped test.
# shellcheck source=test/lib.sh
source "$(dirname "$0")/lib.sh"
unset OMP_NUM_THREADS
if [[ $1 == */transformers_*.py ]]; then
    python=${GOLDEN_PYTHON:-$root/.venv/bin/python}
    "$python" -c 'import torch, transformers' >/dev/null 2>&1 ||
        skip_all "$python lacks torch or transformers (make golden installs them)"
else
    python=$root/.venv/scripts/bin/python
    make_scripts || skip_all "no .venv/scripts, and make scripts fails: $(tail -n 1 scripts.log)"
    rm scripts.log
fi
exec "$python" "$1"
