# shellcheck shell=bash disable=SC2034 # what is defined here is used there
# What the GPU tests of whole runs share: programs, data, checks. Needs train_gpt,
# train_gptcu and tokenize in $LLM8_BIN, and compare_tensors. Tests run in a folder of their own.
root=${LLM8_ROOT:-$(cd "$(dirname "$0")/.." && pwd)}
BIN=$(realpath -m "${LLM8_BIN:-$root}")
COMPARE=$(realpath -m "${LLM8_COMPARE:-$root/build/plain/compare_tensors}")
# shellcheck source=test/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
unset OMP_NUM_THREADS # the CPU trainer computes the larger models' yardsticks
export LLM8_GUARD=1   # an overrun of a planned buffer ends a run (model/plan.h)
check() { # name, command...
    local name=$1
    shift
    if "$@" >log 2>&1; then
        passed=$((passed + 1))
        echo "  ok   $name${NOTE:-}: $(tail -n 1 log | cut -c1-150)"
    else
        failed=$((failed + 1))
        echo "  FAIL $name"
        tail -n 15 log | sed 's/^/       /'
    fi
}
if [[ ! -x $BIN/train_gptcu ]]; then skip_all "no train_gptcu here; make test-gpu builds it"; fi
if ! "$BIN/train_gptcu" --verify >verify.log 2>&1; then
    if grep -q "no GPU" verify.log; then skip_all "no GPU"; fi
    cat verify.log
    failed=1
    summary
    exit
fi
cat verify.log

for i in $(seq 1 3000); do
    echo "Line $i of the text: $((i % 7)) times $((i % 11)) is $(((i % 7) * (i % 11)))."
done >text.txt
"$BIN/tokenize" --output-prefix d text.txt >/dev/null
DATA="--data d_train.bin --valid-data d_val.bin --log-interval 1"
export LLM8_TEST_SMALL_FP8=1 # train/gpu/support.c: FP8 in models too small to gain from it
losses() { # the step records of a run without their times
    grep '"kind":"step"' "$1/metrics.jsonl" | sed 's/,"seconds.*//'
}
same_losses() {
    diff <(losses "$1") <(losses "$2") && echo "$(losses "$1" | wc -l) steps alike"
}
same_weights() {
    cmp "$1/latest/optimizer-0-of-1.safetensors" "$2/latest/optimizer-0-of-1.safetensors" &&
        same_losses "$1" "$2"
}
train() { # folder, options
    local folder=$1
    shift
    rm -rf "$folder"
    "$BIN/train_gptcu" --save "$folder" "$@"
}
