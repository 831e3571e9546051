#!/usr/bin/env bash
# Our own kernels under the tools of compute-sanitizer, over the kernel tests at small shapes:
# memcheck (addresses), racecheck (shared memory), initcheck (what is read before it is written) and
# synccheck (barriers). LLM8_TESTS is the folder of the test programs; part of SANITIZE_GPU=1 make
# test-gpu.
export LLM8_TESTS=${LLM8_TESTS:-$(realpath "$(dirname "$0")/../build/plain")}
# shellcheck source=test/lib.sh
source "$(dirname "$0")/lib.sh"
export OMP_NUM_THREADS=$((($(nproc) + 3) / 4)) # of each tool
sanitizer=${COMPUTE_SANITIZER:-compute-sanitizer}
if ! command -v "$sanitizer" >/dev/null; then
    skip_all "no compute-sanitizer; it comes with the CUDA toolkit"
fi

finds_nothing() { # tool, program and its arguments
    "$sanitizer" --tool "$1" --error-exitcode 9 "${@:2}" >log 2>&1 &&
        grep -qE '(ERROR SUMMARY: 0 errors|RACECHECK SUMMARY: 0 hazards)' log
}

result() { # 0 or not, text
    if grep -q '^0 passed, 0 failed' log; then # the tool may not even have seen a call to CUDA
        echo "  skipped: $2"
        skipped=$((skipped + 1))
    elif [[ $1 -eq 0 ]]; then
        echo "  ok   $2"
        passed=$((passed + 1))
    elif grep -qiE 'device (is )?not supported' log; then
        echo "  skipped: $2: compute-sanitizer does not support this device or its driver"
        skipped=$((skipped + 1))
    else
        echo "  FAIL $2"
        grep -vE '^ +ok ' log | head -n 25 | sed 's/^/       /'
        failed=$((failed + 1))
    fi
}

check() { # tool
    local tool=$1 status=0 source program sources
    # whole models are too slow; their kernels are tested each on their own
    mapfile -t sources < <(grep -L gpu_trainer.h "$root"/test/test_gpu_*.cu)
    finds_nothing "$tool" "$LLM8_TESTS/sanitizer_faults" "$tool" && status=1
    if grep -qiE 'device (is )?not supported' log; then status=1; fi
    result $status "$tool finds its planted fault"
    for source in "${sources[@]}"; do # the program's own tests must pass, too
        program=$(basename "$source" .cu)
        status=0 SECONDS=0
        LLM8_SANITIZING=$tool finds_nothing "$tool" "$LLM8_TESTS/$program" || status=1
        result $status "$tool $program: $(grep -E '^[0-9]+ passed' log), $SECONDS s"
    done
    echo "$passed $failed $skipped" >counts
}

tools=(memcheck racecheck initcheck synccheck) # at the same time: each leaves most of the GPU idle
for tool in "${tools[@]}"; do
    rm -rf "$tool"
    (mkdir "$tool" && cd "$tool" && check "$tool" >lines) &
done
wait
for tool in "${tools[@]}"; do
    cat "$tool/lines"
    read -r p f s <"$tool/counts"
    passed=$((passed + p)) failed=$((failed + f)) skipped=$((skipped + s))
done
summary
