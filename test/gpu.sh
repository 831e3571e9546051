#!/usr/bin/env bash
# The GPU tests, in under ten minutes, JOBS (a quarter of the cores) at the same time, on all GPUs in
# turn; those of several ranks need two GPUs:
#   make test-gpu                          builds them and runs this
#   LLM8_BIN=FOLDER test/gpu.sh            programs built elsewhere, all in one folder
#   SANITIZE_GPU=1 make test-gpu           compute-sanitizer besides (test/sanitize_gpu.sh)
#   test/gpu.sh --has-gpu                  only says whether there is one
# The last line is "N passed, N failed, N skipped". Exit status 77: no GPU, nothing was tested.
set -u
root=$(cd "$(dirname "$0")/.." && pwd)

if ! nvidia-smi -L >/dev/null 2>&1 && [[ ! -e /dev/nvidiactl ]]; then
    echo "no GPU here: this needs one of compute capability 8.0 (A100) or newer; \`make test\`" \
        "needs none" >&2
    exit 77
fi
if [[ ${1:-} == --has-gpu ]]; then exit 0; fi

if [[ -n ${LLM8_BIN:-} ]]; then
    LLM8_BIN=$(cd "$LLM8_BIN" && pwd) || exit 1
    tests=$LLM8_BIN
else
    LLM8_BIN=$root
    tests=$root/build/plain
fi
export LLM8_BIN LLM8_TESTS=$tests LLM8_COMPARE=$tests/compare_tensors
export GOLDEN_PYTHON=${GOLDEN_PYTHON:-python3} # of transformers_gpu.py
programs=() alone=()
for source in "$root"/test/test_gpu_*.cu; do
    program=$tests/$(basename "$source" .cu)
    if grep -q 'bool has_room' "$source"; then # it needs most of the device's memory
        alone+=("$program")
    else
        programs+=("$program")
    fi
done
programs+=("$tests/test_gpu_kernels_ptx80")
for program in "${programs[@]}" "${alone[@]}" "$LLM8_COMPARE" \
    "$tests"/{gpu_logits,logits_tool,sanitizer_faults} \
    "$LLM8_BIN"/{train_gpt,train_gptcu,tokenize,make_corpus}; do
    if [[ ! -x $program ]]; then
        echo "error: $program: no such program; make test-gpu builds it" >&2
        exit 1
    fi
done
# these take longest
programs=(test/test_gpu_{train,against_cpu,combinations}.sh test/transformers_gpu.py "${programs[@]}")
alone+=(test/test_gpu_ranks.sh) # waits for time limits to pass
if [[ ${SANITIZE_GPU:-0} != 0 ]]; then alone+=(test/sanitize_gpu.sh); fi
cores=$(nproc)
export JOBS=${JOBS:-$(((cores + 3) / 4))}
export OMP_NUM_THREADS=$(((cores + JOBS - 1) / JOBS)) # more would wait for each other
# in turn where all GPUs are alike, unless the caller has chosen some
unset LLM8_TEST_GPUS
names=$(nvidia-smi --query-gpu=name --format=csv,noheader)
if [[ -z ${CUDA_VISIBLE_DEVICES+chosen} && $(sort -u <<<"$names" | wc -l) -eq 1 ]]; then
    LLM8_TEST_GPUS=$(wc -l <<<"$names")
    export LLM8_TEST_GPUS
fi
log=$(mktemp)
trap 'rm -f "$log"' EXIT
"$root/test/run.sh" "${programs[@]}" -- "${alone[@]}" | tee "$log"
status=${PIPESTATUS[0]}
if tail -n 1 "$log" | grep -q '^0 passed, 0 failed'; then
    echo "the GPU cannot be used, as said above: nothing was tested" >&2
    exit 77
fi
exit "$status"
