#!/usr/bin/env bash
# Runs test programs, each in an empty folder of its own, and adds up their last lines:
#   test/run.sh PROGRAM... [-- PROGRAM...]     a path from the top of the tree, or an absolute one
# JOBS (1): how many run at the same time; what comes after -- begins when those before it have ended,
# JOBS_LAST (1) at the same time, on all cores. A program that does not end with a summary (a crash, a
# sanitizer's report) counts as one failure. LLM8_TEST_GPUS=N: each program sees N GPUs, and its first
# one is the next in turn.
set -um # -m: a job gets SIGINT as a program does that is started from a shell
root=$(cd "$(dirname "$0")/.." && pwd)
export LLM8_ROOT=$root
export OMP_WAIT_POLICY=passive # threads that spin cost minutes where the cores are busy
# freed memory that is kept out of use: 256 MB of it, the default, would be copied at each fork
export ASAN_OPTIONS=${ASAN_OPTIONS:-quarantine_size_mb=16}
if [[ $(head -c 2 "$(command -v python3)") == '#!' ]]; then # pyenv's looks for Python at every call
    PATH=$(python3 -c 'import sys; print(sys.base_exec_prefix)')/bin:$PATH
fi
results=$(mktemp -d)
: >"$results/counts"
# The programs' folders are in memory, where it has room and programs may run: most of the time of
# some is a disk's fsync.
memory=$results
if [[ $(df --output=avail /dev/shm 2>/dev/null | tail -n 1) -gt $((2 << 20)) ]]; then # KiB
    memory=$(mktemp -d -p /dev/shm)
    printf '#!/bin/sh\n' >"$memory/runs" && chmod +x "$memory/runs"
    "$memory/runs" 2>/dev/null || { rm -rf "$memory" && memory=$results; }
fi
trap 'rm -rf "$results" "$memory"' EXIT
# shellcheck disable=SC2046 # a word for each job
trap 'kill -- $(jobs -p | sed "s/^/-/"); exit 130' INT TERM

# Its report goes to standard output as a whole, its counts to the file $results/counts.
run_one() {
    local program=$1 folder name begin log status took summary p f s command
    folder=$(mktemp -d -p "$memory")
    # their many short parallel regions take longer to share than to compute
    case $program in */standin_* | */emulated_*) export OMP_NUM_THREADS=1 ;; esac
    name=${program#"$root/"} name=${name#build/}
    begin=$(date +%s.%N)
    log=$folder.log
    if [[ $program != /* ]]; then program=$root/$program; fi
    command=("$program")
    if [[ $program == *.py ]]; then command=("$root/test/python.sh" "$program"); fi
    (cd "$folder" && "${command[@]}") >"$log" 2>&1
    status=$?
    took=$(echo "$(date +%s.%N) $begin" | awk '{printf "%.1f", $1 - $2}')
    summary=$(tail -n 1 "$log")
    if [[ $summary =~ ^([0-9]+)\ passed,\ ([0-9]+)\ failed,\ ([0-9]+)\ skipped$ ]]; then
        p=${BASH_REMATCH[1]} f=${BASH_REMATCH[2]} s=${BASH_REMATCH[3]}
        if [[ $status -ne 0 && $f -eq 0 ]]; then f=1; fi
    else
        p=0 f=1 s=0
    fi
    {
        flock 9
        printf '%-36s %4d passed %3d failed %3d skipped  %6ss\n' "$name" "$p" "$f" "$s" "$took"
        if [[ $f -gt 0 ]]; then sed 's/^/    /' "$log"; fi
        grep -h -e 'skipped: ' -e '^  measured: ' "$log"
        echo "$p $f $s" >&9
    } 9>>"$results/counts"
    rm -rf "$folder" "$log"
}

started=0
for program in "$@"; do
    if [[ $program == -- ]]; then
        wait
        JOBS=${JOBS_LAST:-1}
        unset OMP_NUM_THREADS
        continue
    fi
    if [[ $(jobs -pr | wc -l) -ge ${JOBS:-1} ]]; then wait -n; fi
    if [[ -n ${LLM8_TEST_GPUS:-} ]]; then
        CUDA_VISIBLE_DEVICES=$(seq "$LLM8_TEST_GPUS" |
            awk -v n="$LLM8_TEST_GPUS" -v k="$started" '{ print ($1 + k - 1) % n }' | paste -sd ,)
        export CUDA_VISIBLE_DEVICES
        started=$((started + 1))
    fi
    run_one "$program" </dev/null &
done
wait
awk '{ p += $1; f += $2; s += $3 }
    END { printf "%d passed, %d failed, %d skipped\n", p, f, s; exit f > 0 }' "$results/counts"
