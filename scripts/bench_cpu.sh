#!/usr/bin/env bash
# make bench-cpu: the CPU trainer's step, and PyTorch's beside it where Python has it.
#   make bench-cpu ARGS="--micro-batch-size 8"   other options of the trainer (it alone)
#   make bench-cpu APPEND=results.txt            adds what is printed to a file, under the date
set -u
case " $* " in *' --help '* | *' -h '*) sed -n '2,/^set/s/^# \{0,1\}//p' "$0"; exit ;; esac
cd "$(dirname "$0")/.." || exit 1
[[ $(uptime) =~ load\ average:\ ([0-9]+) && ${BASH_REMATCH[1]} -gt 0 ]] &&
    echo "note: other programs are running; the times below are longer than they need be" >&2

bench() {
    read -ra options <<<"${ARGS:-}"
    build/plain/bench_cpu "${options[@]}" || return
    local python=.venv/bin/python
    if [[ ! -x $python ]]; then python=python3; fi
    if [[ -z ${ARGS:-} ]] && "$python" -c 'import torch' 2>/dev/null; then
        "$python" test/bench_cpu.py
    fi
}

if [[ -n ${APPEND:-} ]]; then
    { date -u +'%Y-%m-%d %H:%M UTC' && bench; } | tee -a -- "$APPEND"
    exit "${PIPESTATUS[0]}"
fi
bench
