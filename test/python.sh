#!/usr/bin/env bash
# python_tests NAME: runs test/NAME.py under .venv/scripts, which is made where that is possible;
# where it is not, the tests count as one that was skipped.
root=${LLM8_ROOT:-$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)}

python_tests() {
    unset MAKEFLAGS MFLAGS
    if ! make -s -C "$root" scripts >make.log 2>&1; then
        echo "  skipped: no .venv/scripts, and make scripts fails: $(tail -n 1 make.log)"
        echo "0 passed, 0 failed, 1 skipped"
        exit 0
    fi
    mkdir -p work && cd work || exit 1 # test/run.sh keeps its log in the folder above
    exec "$root/.venv/scripts/bin/python" "$root/test/$1.py"
}
