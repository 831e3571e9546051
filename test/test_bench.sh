#!/usr/bin/env bash
# scripts/bench and scripts/results without a GPU: a stand-in for the GPU trainer runs the CPU
# trainer on a tiny model and sets the times and the memory.
# shellcheck source=test/lib.sh
source "$(dirname "$0")/lib.sh"

gpu_name="NVIDIA H200"
bench() {
    env PATH="$PWD/bin:$PATH" LLM8_BIN=bin RESULTS=bench.jsonl COMMIT=abc "$@" "$root/scripts/bench"
}

# Steps 6 to 25: eleven of 0.1 s, nine of 0.5 s; those before take 9 s. So the median is 0.1 s, and
# neither the mean nor the median of all is.
write_stand_ins() {
    mkdir -p bin
    cat >bin/train_gptcu <<STAND_IN
#!/usr/bin/env bash
if [[ \$1 == --verify ]]; then
    echo "  cuBLASLt                 ok   compiled against 130000, running 130102"
    echo "  cuDNN                    ok   compiled against 91400, running 91900"
    echo "  device                   \${VERDICT:-ok   \${GPU:-$gpu_name}}, compute capability 9.0"
    [[ -z \${VERDICT:-} ]]
    exit
fi
metrics=\$(sed 's/.*--metrics \([^ ]*\).*/\1/' <<<"\$*")
if [[ "\$*" == *"\${FAILING:-nothing}"* ]]; then
    echo "error: out of something"
    exit 1
fi
"$root/train_gpt" "\$@" --num-layers 1 --hidden-size 16 --num-attention-heads 2 \\
    --num-query-groups 2 --ffn-hidden-size 32 --seq-length 16 --micro-batch-size 2 || exit
python3 - "\$metrics" "\$*" <<'END'
import json, os, sys
path, words = sys.argv[1:]
records = [json.loads(line) for line in open(path)]
# in FP8 norms and losses are multiplied by these; 0: of the first two steps, 5: of the timed ones
spoil = os.environ.get("SPOIL") if "fp8" in words else None
norm, loss, after = map(float, (spoil or "1 1 0").split())
for r in records:
    if r["kind"] == "run":
        r.update(peak_flops=1e12, memory_bytes=2**31)
        r["fp8_flops_share"] = float(os.environ.get("SHARE", r["fp8_flops_share"]))
    elif r["kind"] == "end":
        r["memory_used_bytes"] = 46 * 2**30
    elif r["kind"] == "step":
        n = r["step"]
        r["seconds"] = 9 if n <= 5 else 0.5 if n % 20 < 9 else 0.1
        if after < n <= (25 if after else 2):
            r["norm"] *= norm
            r["loss"] *= loss
        r["skipped"] |= str(n) == os.environ.get("SKIP")
records.append({"kind": "profile", "matmuls": 61.5, "optimizer": 20.25})
with open(path, "w") as file:
    file.writelines(json.dumps(r) + "\\n" for r in records)
END
STAND_IN
    printf '#!/bin/sh\ncase $1 in --query*) echo 580.1 ;; -L) seq ${LISTED:-0} ;; esac\n' >bin/nvidia-smi
    chmod +x bin/*
}

# expect FILE EXPRESSION...: Python expressions over the file's records `r`, a list.
expect() {
    python3 - "$@" <<'END' || fail "$1: not so"
import json, sys
r = [json.loads(line) for line in open(sys.argv[1])]
wrong = [expression for expression in sys.argv[2:] if not eval(expression)]
sys.exit("\n".join(wrong) or 0)
END
}

test_records_what_was_measured() {
    rm -f bench.jsonl
    MODELS=gpt2-124m expect_status 0 bench || return
    expect bench.jsonl \
        'len(r) == 6' \
        '[(x["precision"], x["recipe"], x["lm_head"]) for x in r] == [("bf16", None, "bf16"),
        ("fp8", "delayed", "bf16"), ("fp8", "delayed", "fp8"), ("fp8", "tensorwise", "bf16"),
        ("fp8", "blockwise", "bf16"), ("fp8", "blockwise", "fp8")]' \
        'all(x["model"] == "gpt2-124m" and x["seq_length"] == 16 for x in r)' \
        'all((x["micro_batch"], x["gpus"], x["steps"]) == (2, 1, 20) for x in r)' \
        'all(x["step_ms"] == 100 and x["tokens_per_s"] == 320 for x in r)' \
        'all(abs(x["mfu"] - x["tflops"]) < 1e-9 and x["mfu"] > 0 for x in r)' \
        'all(x["peak_memory_gib"] == 46 and x["planned_memory_gib"] == 2 for x in r)' \
        'all(x["families_ms"] == {"matmuls": 61.5, "optimizer": 20.25} for x in r)' \
        'all(abs(sum(x["floors_ms"].values()) / x["step_ms"] / x["floor_share"] - 1) < 1e-4
        for x in r)' \
        'r[0]["machine"] == {"gpu": "NVIDIA H200", "driver": "580.1", "cublaslt": "13.1.2",
        "cudnn": "9.19.0"} and r[0]["commit"] == "abc"' \
        '"--fp8-lm-head" in r[2]["command"] and r[2]["command"].startswith("train_gptcu ")' \
        'all(x["arguments"] == "" for x in r)' \
        'r[0]["fp8_flops_share"] == 0 and 0 < r[1]["fp8_flops_share"] < r[2]["fp8_flops_share"]' \
        'all(5 < x["loss"] < 15 for x in r) and r[0]["beside_bf16"] is None' \
        'all(abs(ratio - 1) < 0.03 for x in r[1:] for part in ("first", "timed")
        for ratio in x["beside_bf16"][part])' 'r[1]["loss"] != r[0]["loss"]'
    says '!not judged'
    grep -qE '^gpt2-124m +fp8-head +320 +1\.00 ' log || fail "no row: $(cat log)"
    grep -qE ' matmuls 61\.50 / [0-9.]+; optimizer 20\.25 / ' log || fail "no families: $(cat log)"
    ! passes expect bench.jsonl 'r[0]["tokens_per_s"] == 321' || fail "the checker passes anything"
}

test_other_devices_have_no_floor() {
    GPU="NVIDIA H100" MODELS=llama-1b PRECISIONS=bf16 RESULTS=other.jsonl expect_status 0 \
        env PATH="$PWD/bin:$PATH" LLM8_BIN=bin "$root/scripts/bench" --seed 3 --gpus 1 || return
    expect other.jsonl 'r[0]["floor_share"] is None and r[0]["floors_ms"] is None' \
        'r[0]["arguments"] == "--seed 3"' \
        'r[0]["mfu"] > 0 and r[0]["machine"]["gpu"] == "NVIDIA H100"'
}

# refused STATUS TEXT VARIABLE=VALUE...: by a bench that leaves the records as they are
refused() {
    local before
    before=$(cksum bench.jsonl)
    expect_message "$1" "$2" bench "${@:3}"
    is "$(cksum bench.jsonl)" "$before"
}

# It is timed where there are four, or where it is named.
test_the_job_on_four_gpus() {
    expect_message 1 'llama-3-8b-finetune: left out: it takes 4 GPUs, and nvidia-smi lists 0' \
        bench PRECISIONS=bf16 FAILING=--data
    says '!llama-3-8b-finetune +bf16'
    expect_message 1 'llama-3-8b-finetune  bf16' bench PRECISIONS=bf16 FAILING=--data LISTED=4
    says '!left out'
    MODELS=llama-3-8b-finetune PRECISIONS=bf16 RESULTS=job.jsonl expect_status 0 \
        env PATH="$PWD/bin:$PATH" LLM8_BIN=bin "$root/scripts/bench" --gpus 1 --global-batch-size 4 || return
    expect job.jsonl '(r[0]["global_batch"], r[0]["recompute"]) == (4, "block")' 'r[0]["arguments"] != ""' \
        '"--micro-batch-size 4 --global-batch-size 128 --recompute block" in r[0]["command"]'
}

# The options that the recipe and the benchmark share are the same.
test_the_job_is_the_recipe() {
    local option
    DRY=1 GPUS=4 PRECISION=bf16 "$root/scripts/run_llama3_8b_finetune.sh" >recipe || return
    grep -A3 '^    "llama-3-8b-finetune"' "$root/scripts/llm8/bench.py" | tr -d '"\n' | tr -s ' ' >job
    while IFS= read -r option; do
        grep -qF -e "$option" recipe || fail "not in the recipe: $option"
    done < <(grep -oE -e '--[a-z-]+ [^ ,]+' job)
    is "$(grep -oE -e '--[a-z-]+ [^ ,]+' job | wc -l)" 7
}

# A run with a fault leaves no record, and does not stop the other runs.
test_bad_runs_leave_no_record() {
    local one=(MODELS=gpt2-124m PRECISIONS=fp8)
    refused 1 'FAILED: the loss or norm of step 7 is not finite' "${one[@]}" SKIP=7
    refused 1 'FAILED: FP8 was requested, but no layer was in FP8' "${one[@]}" SHARE=0
    refused 77 'no GPU can be used here: nothing was measured' VERDICT='BAD  no GPU can be used here'
    refused 2 '' VERDICT='BAD  a wrong matmul'
    refused 2 'error: ITERS=24: must be a whole number, 25 or more' ITERS=24
    refused 2 'error: MODELS=gpt5: must be of gpt2-124m gpt2-1558m' MODELS='gpt2-124m gpt5'
    expect_message 1 'FAILED: exit status 1: out of something' bench "${one[@]}" \
        PRECISIONS='fp8-tensorwise bf16' FAILING=tensorwise
    expect bench.jsonl 'len(r) == 7'
    expect_message 2 'error: scripts/bench: --bf16 is not for the trainer here; use PRECISIONS=' \
        env PATH="$PWD/bin:$PATH" LLM8_BIN=bin "${one[@]}" "$root/scripts/bench" --bf16
    expect_message 2 '--train-iters is not for the trainer here; use ITERS=' \
        env PATH="$PWD/bin:$PATH" LLM8_BIN=bin "${one[@]}" "$root/scripts/bench" --train-iters=9
}

# A fault is found by its effect on norms and losses (SPOIL), where the run in BF16 did not fail.
# scripts_tests.py has the limits.
test_losses_are_judged_beside_bf16() {
    local words=(MODELS=gpt2-124m PRECISIONS='bf16 fp8' RESULTS=judged.jsonl) fault='FAILED: it does not train as'
    expect_status 1 bench "${words[@]}" SPOIL='10 1 5'
    grep -qE "^gpt2-124m +fp8 .*$fault BF16 does: steps 1-2 norm .* median norm x(9|10)\.[0-9]+, loss" log ||
        fail "$(cat log)"
    expect judged.jsonl 'len(r) == 1'
    rm judged.jsonl
    expect_status 1 bench "${words[@]}" FAILING=--bf16 SPOIL='9 9 0'
    grep -qE '^gpt2-124m +fp8 .* not judged$' log || fail "$(cat log)"
    expect judged.jsonl 'len(r) == 1 and r[0]["beside_bf16"] is None and r[0]["loss"] > 0'
}

# ---- the tables ----------------------------------------------------------------------------------

write_fixture() {
    mkdir -p records && python3 - >records/bench.jsonl <<'END'
import json
# date, model, precision, recipe, head, tokens a second
ROWS = """
    2026-02-02 big bf16 - bf16 500
    2026-01-01 big bf16 - bf16 111
    2026-01-01 gpt2-124m fp8 delayed fp8 900000
    2026-01-01 gpt2-124m fp8 delayed bf16 750000
    2026-01-01 gpt2-124m bf16 - bf16 600000
    2026-01-01 gpt2-124m fp8 tensorwise bf16 690000
    2026-01-01 llama-1b fp8 delayed fp8 9000
    2026-01-01 llama-1b fp8 delayed bf16 8000
    2026-01-01 llama-1b bf16 - bf16 6000
    2026-03-03 gpt2-124m fp8 delayed bf16 780000
    2026-03-03 gpt2-124m bf16 - bf16 1200000
    2027-04-04 big fp8 delayed bf16 700
    2026-03-03 gpt2-124m bf16 - bf16 650000"""
records = []
for row in ROWS.split("\n")[1:]:
    date, model, precision, recipe, head, rate = row.split()
    records.append({
        "date": date + "T00:00:00Z", "machine": {"gpu": "G", "driver": "1", "cublaslt": "2",
        "cudnn": "3"}, "commit": "c" + date[:4], "model": model, "seq_length": 1024,
        "micro_batch": 64, "gpus": 1, "precision": precision,
        "recipe": None if recipe == "-" else recipe, "lm_head": head, "tokens_per_s": float(rate),
        "steps": 20, "tflops": 530.4, "mfu": 0.536, "floor_share": 0.714, "peak_memory_gib": 45.25,
        "planned_memory_gib": 4.0})
# the second is older, though later in the file; the last but one is of another commit, alone in it,
# by a driver that is not known
records[10].update(gpus=4, peak_memory_gib=None)
records[11]["machine"] = dict(records[11]["machine"], driver=None)
records[12].update(arguments="--seed 2")
for record in records:
    print(json.dumps(record))
END
    printf '# Title\n\nbefore\n<!-- bench -->\nold\n<!-- /bench -->\nafter\n' >readme
    printf '<!-- results -->\n<!-- /results -->\n<!-- scaling -->\n<!-- /scaling -->\n' >front
}

results=$root/scripts/results
# shows PAGE TEXT...: as of `says`
shows() {
    cp "$1" log
    says "${@:2}"
}
page_of() { "$results" "$@" --records records readme front; }

# Both pages: together the newest record of each kind, compared with that of its commit. A column
# that no row has is not shown.
test_tables_are_the_newest_of_each() {
    write_fixture
    expect_message 2 'readme: not what the records in records say' page_of --check
    has readme old || fail "--check changed the file"
    expect_status 0 page_of || return
    cat >expected <<'END'
# Title

before
<!-- bench -->
| model, batch | program | tokens/s | x BF16 | TFLOP/s | MFU | of the roofline | memory |
| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |
| GPT-2 124M, 64 x 1024 | llm8.c BF16 | 600,000 | 1.00 | 530 | 53.6% | 71% | 45.2 GiB |
| GPT-2 124M, 64 x 1024 | llm8.c FP8 | 780,000 | 1.30 | 530 | 53.6% | 71% | 45.2 GiB |
| GPT-2 124M, 64 x 1024 | llm8.c FP8, FP8 head | 900,000 | 1.50 | 530 | 53.6% | 71% | 45.2 GiB |
| Llama 1B, 64 x 1024 | llm8.c BF16 | 6,000 | 1.00 | 530 | 53.6% | 71% | 45.2 GiB |
| Llama 1B, 64 x 1024 | llm8.c FP8 | 8,000 | 1.33 | 530 | 53.6% | 71% | 45.2 GiB |
| Llama 1B, 64 x 1024 | llm8.c FP8, FP8 head | 9,000 | 1.50 | 530 | 53.6% | 71% | 45.2 GiB |

Medians of 20 steps on G (driver 1, cuBLASLt 2, cuDNN 3); 2026-01-01, 2026-03-03; commit c2026.

| model, batch | program | tokens/s | TFLOP/s | MFU | of the roofline | memory |
| --- | --- | ---: | ---: | ---: | ---: | ---: |
| big, 64 x 1024 | llm8.c FP8 | 700 | 530 | 53.6% | 71% | 45.2 GiB |

Medians of 20 steps on G (cuBLASLt 2, cuDNN 3); 2027-04-04; commit c2027.

| model, batch | program | tokens/s | x BF16 | x 1 GPU | TFLOP/s | MFU | of the roofline | memory |
| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |
| GPT-2 124M, 64 x 1024 | llm8.c BF16, --seed 2 | 650,000 | 1.08 | 1.00 | 530 | 53.6% | 71% | 45.2 GiB |
| GPT-2 124M, 4 GPUs, 64 x 1024 | llm8.c BF16 | 1,200,000 | 1.00 | 2.00 | 530 | 53.6% | 71% | 4.0 GiB planned |
| big, 64 x 1024 | llm8.c BF16 | 500 | 1.00 | 1.00 | 530 | 53.6% | 71% | 45.2 GiB |
| GPT-2 124M, 64 x 1024 | llm8.c FP8 tensorwise | 690,000 | 1.15 | 1.00 | 530 | 53.6% | 71% | 45.2 GiB |

Medians of 20 steps on G (driver 1, cuBLASLt 2, cuDNN 3); 2026-01-01, 2026-02-02, 2026-03-03; commit c2026.
<!-- /bench -->
after
END
    diff expected readme >difference || fail "the table: $(cat difference)"
    shows front '| llm8.c BF16 | 600,000 | 1.00 |' '| llm8.c FP8 | 780,000 | 1.30 |' \
        '| llm8.c FP8, FP8 head | 900,000 | 1.50 |' '| llm8.c FP8, FP8 head | 9,000 | 1.50 |' \
        '4 GPUs, 64 x 1024 | llm8.c BF16 | 1,200,000 | 1.00 | 2.00 |'
    expect_status 0 page_of --check
    expect_status 0 page_of
    cmp -s expected readme || fail "a second time changes it"
    # with several GPUs, the newest commit that also has one GPU
    sed -n 's/1200000/1500000/; s/2026/2029/gp' records/bench.jsonl >newer
    cat newer >>records/bench.jsonl
    expect_status 0 page_of || return
    shows front '| 1,500,000 | 1.00 | 2.50 |'
    grep -v '"gpus": *[2-9]' records/bench.jsonl >one && mv one records/bench.jsonl
    expect_status 0 page_of || return
    shows front '!1 GPU'
}

# The recipe's job on four GPUs: a table and a sentence, and a run on one GPU is not estimated by it.
test_the_job_on_four_gpus_is_shown() {
    write_fixture
    printf '<!-- job -->\n<!-- /job -->\n' >>front
    expect_status 0 page_of || return
    shows front '!Llama 3 8B'
    sed -n '/"gpus": 1,/s/"gpt2-124m"/"llama-3-8b-finetune"/p' records/bench.jsonl | sed 's/2026/2027/g' |
        sed 's/"gpus": 1,/"gpus": 4, "global_batch": 2048, "recompute": "block",/' >job
    cat job >>records/bench.jsonl
    expect_status 0 page_of || return
    shows front '| Llama 3 8B fine-tuning, 4 GPUs, 8 x 64 x 1024 recomputed | llm8.c FP8 | 780,000 | 1.30 | 530 |' \
        '**Llama 3 8B trains at 780,000 tokens/s on 4 Gs in FP8 with an FP8 head, 1.30 times as fast as in BF16**: 64 x 1,024 tokens a GPU, accumulated to 2,097,152 a step'
    "$root/scripts/estimate" --model llama-3-8b --tokens 1B --bench records/bench.jsonl >log
    says 'by the TFLOP/s of llama-1b'
}

test_results_refuse_what_they_cannot_read() {
    echo 'no markers' >plain
    expect_message 2 'error: plain: has none of' "$results" --records records plain
    sed 's,<!-- /bench -->,,' readme >torn
    expect_message 2 'error: torn: needs one <!-- bench -->' "$results" --records records torn
    expect_message 2 'No such file' "$results" --records nowhere readme
    cp records/bench.jsonl good
    grep -v '"llama-1b", .*"bf16", "recipe"' good >records/bench.jsonl
    expect_message 2 'error: records/bench.jsonl: no commit has all of gpt2-124m and llama-1b' page_of
    echo '{"date": ' >>records/bench.jsonl
    expect_message 2 'not a record: without a JSON object' page_of
    sed 's/"recipe"/"recipes"/' good >records/bench.jsonl
    expect_message 2 'error: records/bench.jsonl, line 1: not a record: without recipe' page_of
    : >records/bench.jsonl
    expect_message 2 'error: records/bench.jsonl: no records; make bench' page_of
}

# What scripts/bench writes is what scripts/results reads.
test_results_read_what_bench_writes() {
    write_fixture
    cat bench.jsonl >>records/bench.jsonl
    sed -i 's/"gpt2-124m"\(.*"seq_length": 16,\)/"tiny"\1/' records/bench.jsonl
    expect_status 0 page_of || return
    grep -qE '^\| tiny, 2 x 16 \| llm8.c BF16 \| 320 \| 1\.00 ' readme || fail "$(cat readme)"
}

# Of other/$1, `held`.
change_report() { # folder, statement of Python
    python3 - "$@" <<'END'
import json, sys
path = f"other/{sys.argv[1]}/report.json"
held = json.load(open(path))
exec(sys.argv[2])
json.dump(held, open(path, "w"))
END
}

# The pages and the front page's figure are what the records say, and another record is seen in
# each of them.
test_pages_are_what_the_records_say() {
    local page fastest='/"gpt2-124m".*"recipe": "delayed", "lm_head": "fp8"/'
    expect_status 0 "$results" --check || fail "$(cat log)"
    rm -rf other && cp -r "$root/test/results" other
    sed -i "${fastest}s/\"tokens_per_s\": [0-9]*/\"tokens_per_s\": 999999/" other/bench.jsonl
    for page in README.md docs/benchmarks.md docs/results.svg; do
        expect_status 2 "$results" --check --records other "$root/$page"
    done
    grep -v -- '--bf16' "$root/docs/options.md" >page
    expect_message 2 'page: not what' "$results" --check page
    cp "$root/test/results/bench.jsonl" other
    change_report fp8_gpt2_124m_adamw 'for j in held["judgements"]: j["change"] = 100.2 if j["variant"] == "head" else j["change"]'
    expect_status 0 "$results" --check --records other "$root/docs/benchmarks.md"
    cp "$root/README.md" page
    expect_status 0 "$results" --records other page || return
    shows page '| FP8, FP8 head | +100.20% ± 0.09 | +0.24% ± 0.12 |'
    change_report fp8_gpt2_124m_adamw 'del held["judgements"]'
    expect_message 2 'report.json: not a report of this scripts/compare' "$results" --records other page
}

# That of the records on the front page.
front_commit() {
    sed -n '/<!-- results -->/,$s/^Medians.*commit \([0-9a-f]*\)\.$/\1/p;T;q' "$root/README.md"
}

# Other programs stand beside ours, and a note says if they were not timed in the same call.
test_peers_of_another_call_are_named_so() {
    local commit peer
    commit=$(front_commit)
    peer='{"date": "2026-11-22T05:00:00Z", "machine": {"gpu": "NVIDIA H200"}, "commit":
        "'$commit'", "program": "peer", "precision": "BF16", "model": "gpt2-124m", "seq_length":
        1024, "micro_batch": 64, "tokens_per_s": 500000, "steps": 20}'
    rm -rf other && cp -r "$root/test/results" other
    tr '\n' ' ' <<<"$peer" >other/peers.jsonl
    cp "$root/README.md" page
    expect_status 0 "$results" --records other page figure.svg || return
    shows page '| GPT-2 124M, 64 x 1024 | peer BF16 | 500,000 |' \
        'times as fast as peer, the fastest other program, timed right beside it'
    shows figure.svg '>peer BF16<'
    sed -i "s/$commit/x${commit:1}/" other/peers.jsonl
    expect_status 0 "$results" --records other page || return
    shows page '| peer BF16, another card | 500,000 |' \
        'times as fast as peer, the fastest other program, timed on another such card'
    sed -i 's/NVIDIA H200/NVIDIA H100/' other/peers.jsonl
    expect_status 0 "$results" --records other page figure.svg || return
    ! grep -q 'peer BF16' page figure.svg || fail "a peer on another GPU is shown"
}

# Another kind of GPU has a table of its own, and does not change the first one's.
test_each_gpu_has_a_table() {
    rm -rf other && cp -r "$root/test/results" other
    grep -v H100 "$root/test/results/bench.jsonl" >other/bench.jsonl
    cp "$root/README.md" front
    cp "$root/docs/benchmarks.md" one
    expect_status 0 "$results" --records other front one || return
    sed -n "/\"$(front_commit)\".*\"gpus\": 1,/"'{s/"date": "2026/"date": "2099/; s/NVIDIA H200/NVIDIA H100/
        s/"tokens_per_s": [0-9.]*/"tokens_per_s": 111/p}' other/bench.jsonl >newer
    cat newer >>other/bench.jsonl
    cp one both
    expect_status 0 "$results" --records other both || return
    shows both ' on NVIDIA H100' '| GPT-2 124M, 64 x 1024 | llm8.c FP8 | 111 |'
    grep -vxFf both one >lost && fail "lost: $(cat lost)"
    expect_status 0 "$results" --check --records other front || fail "another kind is on the front page"
}

need_scripts
write_stand_ins
run_tests
