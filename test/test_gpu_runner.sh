#!/usr/bin/env bash
# test/gpu.sh and test/sanitize_gpu.sh without a GPU, in a tree with a few of the tests: stand-ins
# for the programs, for nvidia-smi and for compute-sanitizer.
# shellcheck source=test/lib.sh
source "$(dirname "$0")/lib.sh"

# A program of a name that prints a text and ends with a status.
stand_in() {
    printf '#!/bin/sh\ncat <<"TEXT"\n%s\nTEXT\nexit %d\n' "$2" "${3:-0}" >"bin/$1"
    chmod +x "bin/$1"
}

tests=(test_gpu_fp8 test_gpu_kernels test_gpu_large)
sanitized=2                   # not the last one's whole models
programs=$((${#tests[@]} + 1)) # and the one of PTX alone
scripts=5                   # of whole runs, and of transformers, which end at once here

# The GPU test programs all print the same.
tests_print() {
    local test
    for test in "${tests[@]}" test_gpu_kernels_ptx80; do stand_in "$test" "$@"; done
}

prepare() {
    mkdir -p bin tree/test
    ln -s "$root"/test/*.{sh,py} tree/test
    for test in "${tests[@]}"; do ln -s "$root/test/$test.cu" tree/test || fail "$test.cu"; done
    stand_in nvidia-smi 'GPU 0: a stand-in'
    stand_in compute_sanitizer 'nothing'
    for program in train_gpt tokenize make_corpus compare_tensors gpu_logits logits_tool \
        sanitizer_faults; do
        stand_in $program ''
    done
    stand_in train_gptcu 'device BAD no GPU can be used here' 1 # ends the scripts of whole runs
}

gpu_tests() {
    env PATH="$PWD/bin:$PATH" LLM8_BIN=bin GOLDEN_PYTHON=false \
        COMPUTE_SANITIZER="$PWD/bin/compute_sanitizer" "$@" \
        tree/test/gpu.sh
}

test_results_are_added_up() {
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

# What needs the device's memory has it alone, and all cores.
test_programs_run_side_by_side() {
    local test
    for test in "${tests[@]}" test_gpu_kernels_ptx80; do
        cat >"bin/$test" <<'END'
#!/usr/bin/env bash
touch "$LLM8_TESTS/running.$$"
for i in {1..30}; do
    others=("$LLM8_TESTS"/running.*)
    case $0,${#others[@]},${OMP_NUM_THREADS:-} in *large,1, | *[^e],[2-9],*[1-9]) passed=1 ;; esac
    sleep 0.01
done
rm "$LLM8_TESTS/running.$$"
echo "${passed:-0} passed, $((1 - ${passed:-0})) failed, 0 skipped"
END
        chmod +x "bin/$test"
    done
    expect_said 0 "$programs passed, 0 failed, $scripts skipped" gpu_tests JOBS=8
    expect_said 1 "1 passed, $((programs - 1)) failed, $scripts skipped" gpu_tests JOBS=1
}

test_no_gpu_is_no_success() {
    tests_print '0 passed, 0 failed, 1 skipped'
    expect_said 77 'nothing was tested' gpu_tests
    if [[ -e /dev/nvidiactl ]]; then return; fi
    mv bin/nvidia-smi bin/other
    expect_said 77 'no GPU here' gpu_tests
    mv bin/other bin/nvidia-smi
}

# What compute-sanitizer prints last and how it ends decide, together with the tests' own result.
# A tool that prints this text and ends so, for memcheck; the others are right. FINDS is the planted
# faults that they find.
sanitizer_says() {
    cat >bin/compute_sanitizer <<END
#!/bin/sh
case "\$5" in
*/sanitizer_faults)
    [ "\$6" = "\$2" ] || exit 3
    case " \${FINDS-memcheck racecheck initcheck synccheck} " in
    *" \$2 "*) echo '========= ERROR SUMMARY: 1 error' && exit 9 ;;
    *) echo '========= ERROR SUMMARY: 0 errors' && exit 0 ;;
    esac
    ;;
esac
[ "\$LLM8_SANITIZING" = "\$2" ] || exit 3
"\$5"
status=\$?
case "\$2" in
memcheck)
    echo '$1'
    [ $2 -eq 0 ] || exit $2
    ;;
racecheck) echo '========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)' ;;
*) echo '========= ERROR SUMMARY: 0 errors' ;;
esac
exit \$status
END
}

sanitizer() { # VARIABLE=VALUE...
    env LLM8_ROOT="$PWD/tree" LLM8_TESTS="$PWD/bin" \
        COMPUTE_SANITIZER="$PWD/bin/compute_sanitizer" "$@" tree/test/sanitize_gpu.sh
}

test_sanitizer_findings_are_failures() {
    local clean='========= ERROR SUMMARY: 0 errors' all=$((4 * sanitized + 4))
    tests_print '5 passed, 0 failed, 0 skipped'
    sanitizer_says "$clean" 0
    expect_status 0 gpu_tests SANITIZE_GPU=1
    [[ $(tail -n 1 log) == "$((5 * programs + all)) passed, 0 failed, $scripts skipped" ]] ||
        fail "$(cat log)"
    expect_said 1 'FAIL synccheck finds its planted fault' \
        sanitizer FINDS='memcheck racecheck initcheck'
    sanitizer_says '========= ERROR SUMMARY: 2 errors' 9
    expect_said 1 ", $sanitized failed, " sanitizer
    sanitizer_says '========= ERROR SUMMARY: 2 errors' 0
    expect_said 1 ", $sanitized failed, " sanitizer
    sanitizer_says '' 0
    expect_said 1 ", $sanitized failed, " sanitizer
    printf '#!/bin/sh\necho "Error: Device not supported"\nexit 1\n' >bin/compute_sanitizer
    expect_said 0 "0 passed, 0 failed, $all skipped" sanitizer
    sanitizer_says "$clean" 0
    stand_in test_gpu_fp8 '0 passed, 0 failed, 1 skipped'
    expect_said 0 "$((4 * sanitized)) passed, 0 failed, 4 skipped" sanitizer
    sanitizer_says 'Error: Target application terminated before first instrumented API call' 1
    expect_said 1 ' 1 failed, 4 skipped' sanitizer # memcheck of the other program
    stand_in test_gpu_fp8 '5 passed, 0 failed, 0 skipped'
    sanitizer_says "$clean" 0
    stand_in test_gpu_kernels '4 passed, 1 failed, 0 skipped' 1
    expect_said 1 ', 4 failed, ' sanitizer # under each tool
}

run_tests
