# shellcheck shell=bash disable=SC2034 # what is defined here is used there
# What the tests of the GPU trainer's whole runs share: programs, data, checks. With LLM8_BIN, which
# test/gpu.sh sets, they run on the GPU: train_gpt, train_gptcu and tokenize are there. Without it,
# the GPU trainer over the stand-ins of test/standin, which compute with kernels/cpu.c and round
# where the device rounds. Tests run in a folder of their own.
if [[ -n ${LLM8_BIN:-} ]]; then LLM8_BIN=$(realpath -m "$LLM8_BIN"); fi
if [[ -n ${LLM8_COMPARE:-} ]]; then LLM8_COMPARE=$(realpath -m "$LLM8_COMPARE"); fi
# shellcheck source=test/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
BIN=${LLM8_BIN:-$root}
COMPARE=${LLM8_COMPARE:-$root/build/plain/compare_tensors}
export LLM8_GUARD=1 # an overrun of a planned buffer ends a run (model/plan.h)
if [[ -n ${LLM8_BIN:-} ]]; then
    trainer=$BIN/train_gptcu graphs=""
else
    trainer=$standin graphs=--no-cuda-graphs
    export MALLOC_PERTURB_=128 # what is read before it is written is about 3.4e38, never by luck 0
fi
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
if [[ ! -x $trainer ]]; then skip_all "no $trainer; make test-gpu or make test builds it"; fi
if [[ -n ${LLM8_BIN:-} ]]; then
    if ! "$trainer" --verify >verify.log 2>&1; then
        if grep -q "no GPU" verify.log; then skip_all "no GPU"; fi
        cat verify.log
        failed=1
        summary
        exit
    fi
    cat verify.log
    for i in $(seq 1 3000); do
        echo "Line $i of the text: $((i % 7)) times $((i % 11)) is $(((i % 7) * (i % 11)))."
    done >text
else
    make_text 1 4000 >text
fi
"$BIN/tokenize" --output-prefix d/x text >/dev/null
mkdir lines # a document each
split -l 1 -a 4 text lines/
"$BIN/tokenize" --output-prefix d/lines lines/* >/dev/null
cpu=$BIN/train_gpt gpu="$trainer $graphs"
small="--vocab-size 301 --untie-embeddings-and-output-weights --make-vocab-size-divisible-by"
qwen3="--num-attention-heads 4 --num-query-groups 2 --qk-layernorm --logit-softcap 5
    --z-loss-coeff 0.01"
qwen2="--num-attention-heads 4 --num-query-groups 2 --add-qkv-bias --z-loss-coeff 0.01"
documents="--data d/lines_train.bin --reset-attention-mask --reset-position-ids"
rates="--embedding-lr-mult 3 --head-lr-mult 0.5 --vector-lr-mult 0.25"
if [[ -z ${LLM8_BIN:-} ]]; then
    gpt2="--model gpt2-tiny --seq-length 48"
    llama="--model llama-tiny --seq-length 48 --hidden-size 64 --num-attention-heads 4
        --num-query-groups 2 --ffn-hidden-size 176"
    untied="$llama --num-layers 4 $small 16"
fi
# weights and rates with which the tests' tolerances were measured
DATA="--data d/x_train.bin --valid-data d/x_val.bin --log-interval 1 --init-method-std 0.02
    --lr-warmup-iters 0"
export LLM8_TEST_SMALL_FP8=1 # train/gpu/support.c: FP8 in models too small to gain from it
number_in() { # kind, field, folder
    grep "\"kind\":\"$1\"" "$3/metrics.jsonl" | grep -o "\"$2\":[0-9]*" | cut -d : -f 2
}
# Options that move 4 bytes a parameter of the optimizer's state, of which it has 8 at least, from
# the device to host memory.
offload() { # a run's folder, its ranks
    local spare
    spare=$(grep -hoP '^#define FIT_OVERHEAD_BYTES \(\(int64_t\)\K[0-9]+' "$root"/*.cu "$root"/train/*.h "$root"/train/gpu/*.h)
    : "${spare:?nothing defines FIT_OVERHEAD_BYTES}"
    awk -v plan="$(number_in run memory_bytes "$1" | tail -n 1)" -v ranks="${2:-1}" \
        -v parameters="$(number_in run parameters "$1" | tail -n 1)" -v spare="$spare" 'BEGIN {
            printf "--optimizer-cpu-offload --device-memory-gib %.9f",
                (plan + spare * 2 ^ 20 - 4 * parameters / ranks) / 2 ^ 30
        }'
}
is_offloaded() { # what a run has printed
    grep '  host memory .*, with state of the optimizer' "$1"
}
losses() { # the step records of a run without their times
    grep '"kind":"step"' "$1/metrics.jsonl" | sed 's/,"seconds.*//'
}
# The largest difference between the losses of two runs' steps; 99 where the steps differ.
apart() {
    paste <(losses "$1") <(losses "$2") | awk -F'"loss":' '
        {
            d = $2 - $3
            if (d < 0) d = -d
            if (!(d <= most)) most = d
            if (NF != 3) bad = 1
        }
        END { print (bad || NR == 0) ? 99 : most + 0 }'
}
fp8_elements() { # of the tensors of a run, whose codes were counted
    grep '"kind":"fp8"' "$1/metrics.jsonl" | grep -o '[^"]*":{"elements":[0-9]*'
}
valid_loss() { # of a metrics.jsonl, the last one in all its digits
    grep '"eval"' "$1" | tail -n 1 | grep -oE '"valid_loss":[^,}]*'
}
same_losses() {
    [[ -n $(losses "$1") ]] && diff <(losses "$1") <(losses "$2") && echo "$(losses "$1" | wc -l) steps alike"
}
same_end() { # bit for bit: all tensors of the last checkpoint, and every step
    local file
    for file in "$1"/latest/*.safetensors; do cmp "$file" "$2/latest/${file##*/}" || return; done
    same_losses "$1" "$2"
}
same_run() { # in all that the last checkpoint has, and in every step
    same_checkpoint {"$1","$2"}/latest && same_losses "$1" "$2"
}
train() { # folder, options
    rm -rf "$1"
    train_more "$@"
}
# ends_as WHOLE SAME OPTIONS LEG...: the run `parts`, each leg of which resumes the one before with
# options of its own (after the word cpu: by the CPU trainer), ends as the run WHOLE by the check SAME.
ends_as() {
    local leg by
    rm -rf parts
    for leg in "${@:4}"; do
        by=$gpu
        if [[ $leg == 'cpu '* ]]; then by=$cpu; fi
        # shellcheck disable=SC2086 # words
        $by $3 --save parts --resume latest ${leg#cpu} || return
    done
    "$2" "$1" parts
}
train_more() { # what is in the folder stays
    local folder=$1
    shift
    # shellcheck disable=SC2086 # an option or none
    "$trainer" $graphs --save "$folder" "$@"
}
