#!/usr/bin/env bash
# test/gpu.sh and test/sanitize_gpu.sh without a GPU: stand-ins for the programs, for nvidia-smi and
# for compute-sanitizer.
# shellcheck source=test/lib.sh
source "$(dirname "$0")/lib.sh"

# A program of a name that prints a text and ends with a status.
stand_in() {
    printf '#!/bin/sh\ncat <<"TEXT"\n%s\nTEXT\nexit %d\n' "$2" "${3:-0}" >"bin/$1"
    chmod +x "bin/$1"
}

# The GPU test programs all print the same.
tests_print() {
    local source
    for source in "$root"/test/test_gpu_*.cu; do
        stand_in "$(basename "$source" .cu)" "$@"
    done
}

programs=$(find "$root/test" -name 'test_gpu_*.cu' | wc -l)
scripts=2 # of whole runs, which end at once here

prepare() {
    mkdir -p bin
    stand_in nvidia-smi 'GPU 0: a stand-in'
    stand_in compute_sanitizer 'nothing'
    for program in train_gpt tokenize compare_tensors; do stand_in $program ''; done
    stand_in train_gptcu 'device BAD no GPU can be used here' 1 # ends the scripts of whole runs
}

gpu_tests() {
    env PATH="$PWD/bin:$PATH" LLM8_BIN=bin COMPUTE_SANITIZER="$PWD/bin/compute_sanitizer" "$@" \
        "$root/test/gpu.sh"
}

results_are_added_up() {
    tests_print '5 passed, 0 failed, 1 skipped'
    expect_status 0 gpu_tests || return
    local skips=$((programs + scripts))
    [[ $(tail -n 1 log) == "$((5 * programs)) passed, 0 failed, $skips skipped" ]] ||
        fail "$(cat log)"
    stand_in test_gpu_fp8 '4 passed, 2 failed, 0 skipped' 1
    expect_status 1 gpu_tests
    [[ $(tail -n 1 log) == "$((5 * programs - 1)) passed, 2 failed, "* ]] || fail "$(cat log)"
    stand_in test_gpu_fp8 'Segmentation fault' 139
    expect_status 1 gpu_tests
    rm bin/test_gpu_fp8
    expect_said 1 'bin/test_gpu_fp8: no such program; make test-gpu builds it' gpu_tests
}

no_gpu_is_no_success() {
    tests_print '0 passed, 0 failed, 1 skipped'
    expect_said 77 'nothing was tested' gpu_tests
    if [[ -e /dev/nvidiactl ]]; then return; fi
    mv bin/nvidia-smi bin/other
    expect_said 77 'no GPU here' gpu_tests
    mv bin/other bin/nvidia-smi
}

# What compute-sanitizer prints last and how it ends decide, together with the tests' own result.
sanitizer_says() {
    cat >bin/compute_sanitizer <<END
#!/bin/sh
[ "\$LLM8_SANITIZING" = "\$2" ] || exit 3
"\$5"
status=\$?
if [ "\$2" = memcheck ]; then
    echo '$1'
    [ $2 -eq 0 ] || exit $2
else
    echo '========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)'
fi
exit \$status
END
}

sanitizer_findings_are_failures() {
    local run=(gpu_tests SANITIZE_GPU=1) clean='========= ERROR SUMMARY: 0 errors'
    tests_print '5 passed, 0 failed, 0 skipped'
    sanitizer_says "$clean" 0
    expect_status 0 "${run[@]}"
    [[ $(tail -n 1 log) == "$((7 * programs)) passed, 0 failed, $scripts skipped" ]] ||
        fail "$(cat log)"
    sanitizer_says '========= ERROR SUMMARY: 2 errors' 9
    expect_status 1 "${run[@]}"
    [[ $(tail -n 1 log) == *" $programs failed, "* ]] || fail "2 errors: $(cat log)"
    sanitizer_says '========= ERROR SUMMARY: 2 errors' 0
    expect_status 1 "${run[@]}"
    sanitizer_says '' 0
    expect_status 1 "${run[@]}"
    sanitizer_says 'Error: Device not supported' 1
    expect_said 0 'compute-sanitizer does not support this device' "${run[@]}"
    sanitizer_says "$clean" 0
    stand_in test_gpu_kernels '4 passed, 1 failed, 0 skipped' 1
    expect_status 1 "${run[@]}" # alone, and under each tool
    [[ $(tail -n 1 log) == *" 3 failed, "* ]] || fail "a failing test: $(cat log)"
}

run prepare results_are_added_up no_gpu_is_no_success sanitizer_findings_are_failures
summary
