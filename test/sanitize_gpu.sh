#!/usr/bin/env bash
# Our own kernels under compute-sanitizer: memcheck (addresses) and racecheck (shared memory), over
# the kernel tests at small shapes. LLM8_TESTS is the folder of the test programs; part of
# SANITIZE_GPU=1 make test-gpu.
# shellcheck source=test/lib.sh
source "$(dirname "$0")/lib.sh"
unset OMP_NUM_THREADS
tests=${LLM8_TESTS:-$root/build/plain}
sanitizer=${COMPUTE_SANITIZER:-compute-sanitizer}
if ! command -v "$sanitizer" >/dev/null; then
    skip_all "no compute-sanitizer; it comes with the CUDA toolkit"
fi

# Passes when the sanitizer's summary counts no error and the program's own tests pass.
check() { # tool, program
    local name
    name="$1 $(basename "$2")"
    if LLM8_SANITIZING=$1 "$sanitizer" --tool "$1" --error-exitcode 9 "$2" >log 2>&1 &&
        grep -qE '(ERROR SUMMARY: 0 errors|RACECHECK SUMMARY: 0 hazards)' log; then
        echo "  ok   $name: $(grep -E '^[0-9]+ passed' log)"
        passed=$((passed + 1))
    elif grep -qiE 'device (is )?not supported' log; then
        echo "  skipped: $name: compute-sanitizer does not support this device or its driver"
        skipped=$((skipped + 1))
    else
        echo "  FAIL $name"
        grep -vE '^ +ok ' log | head -n 25 | sed 's/^/       /'
        failed=$((failed + 1))
    fi
}

for tool in memcheck racecheck; do
    for source in "$root"/test/test_gpu_*.cu; do
        check $tool "$tests/$(basename "$source" .cu)"
    done
done
summary
