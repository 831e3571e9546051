#!/usr/bin/env bash
# Runs test programs, each in an empty folder of its own, and adds up their last lines:
#   test/run.sh PROGRAM...                a path from the top of the tree, or an absolute one
# A program that does not end with a summary (a crash, a sanitizer's report) counts as one failure.
set -u
passed=0 failed=0 skipped=0
root=$(cd "$(dirname "$0")/.." && pwd)
export LLM8_ROOT=$root
export OMP_WAIT_POLICY=passive # threads that spin cost minutes where the cores are busy
for program in "$@"; do
    folder=$(mktemp -d)
    name=${program#"$root/"} name=${name#build/}
    begin=$(date +%s.%N)
    log=$folder/log
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
    printf '%-36s %4d passed %3d failed %3d skipped  %6ss\n' "$name" "$p" "$f" "$s" "$took"
    if [[ $f -gt 0 ]]; then sed 's/^/    /' "$log"; fi
    grep -h -e 'skipped: ' -e '^  measured: ' "$log"
    passed=$((passed + p)) failed=$((failed + f)) skipped=$((skipped + s))
    rm -rf "$folder"
done
echo "$passed passed, $failed failed, $skipped skipped"
[[ $failed -eq 0 ]]
