#!/usr/bin/env bash
# What the trainers and ./tokenize say: the one table of their messages, each with the command that
# gets it. Bad input ends with status 1 and one line that names what, which value and the remedy, and
# changes nothing. What else refuses has its tests beside what it does; test_options.c, test_data.c and
# test_damage.c have the other ways to be wrong.
# shellcheck source=test/lib.sh
source "$(dirname "$0")/lib.sh"
tiny=(--model llama-tiny --micro-batch-size 2 --train-iters 3 --bf16)
shape=(--num-layers 3 --hidden-size 48 --num-attention-heads 6 --num-query-groups 3 --ffn-hidden-size 80
    --untie-embeddings-and-output-weights --rope-theta 500 --seq-length 32 --max-position-embeddings 64)

prepare() {
    make_shards 1500
    expect_status 0 train --save s --save-interval 1 --keep 0 || return
    expect_status 0 train "${shape[@]}" --lr 1e-3 --save odd || return
    cp -r s/step_00000003 whole
    cp -r s/step_00000003 bad && poke bad/optimizer-0-of-1.safetensors 5000 '\252'
    cp -r s broken && for step in broken/step_*; do : >"$step/meta.json"; done
    cp -r whole weights && rm weights/optimizer-*
    cp text own_val.bin
    head -c 1500 d/x_train.bin >cut.bin
    cp d/x_train.bin alone.bin # without a tokenizer beside it
    : >empty.txt
    printf '\xef\xbb\xbf' >marked.txt
    for magic in 20240801 20261124 20261128 20240522; do # little-endian
        hex=$(printf %08x "$magic")
        printf %b "\\x${hex:6:2}\\x${hex:4:2}\\x${hex:2:2}\\x${hex:0:2}" >"$magic.bin"
    done
    printf 'valid-data a.bin\nvalid-data b.bin\n' >twice.txt
    printf '%s\n' 'data gone_train.bin' 'valid-data gone_val.bin' 'eval-choices gone.bin' >gone.txt
    printf 'one\n<|endoftext|>\ntwo, which is longer\n' >named
    printf 'o\0n\0e\0' >utf16
    printf '\xef\xbb\xbf[\n {"text": "one"},\n {"text": "two"}]\n' >rows
    mkdir -p taken/metrics.jsonl
    mkfifo pipe
}

tiny() { train_gpt "${tiny[@]}" "$@"; }
train() { tiny --data d/x_train.bin "$@"; }
from() { train_gpt --data d/x_train.bin --micro-batch-size 2 --bf16 "$@"; } # the shape is the checkpoint's
gpus() { $(trainers | tail -n 1) "$@"; } # the GPU trainer with two ranks, where it is built
tokenize() { "$root/tokenize" "$@"; }
files() { find s odd bad broken whole d -type f ! -name .lock -exec cksum {} + | sort; }

test_the_checker_sees_faults() {
    local row
    passes check_rows <<<'1|tiny --data no.bin|error: --data no.bin|!error: --data yes.bin' || fail "$(<complaints)"
    while IFS= read -r row; do
        ! passes check_rows <<<"$row" || fail "passes: $row"
    done <<'ROWS'
1|tiny --data no.bin|error: --data yes.bin
1|tiny --data no.bin|!error: --data no.bin
1|train_gpt --help|
0|tiny --data no.bin|
1|bash -c 'echo error: x >&2; exit 2'|
1|bash -c 'echo error: x >&2; echo y >&2; exit 1'|
1|bash -c 'printf "error: \033[2J\n" >&2; exit 1'|
ROWS
}

test_refusals() {
    ln -s /nowhere/at/all unmounted
    files >before
    check_rows <<'ROWS'
1|tiny --data 'missing_*.bin'|--data missing_*.bin: no such file; make shards of texts with ./tokenize, of other files with scripts/prepare_data|!match
1|tiny --data d/x_train.bin,d/x_val.bin|: no such file; make shards|; of several sources each has its weight before it
1|tiny --data 'd/x_train.bin 1 d/x_val.bin 2'|: no such file; make shards of texts with ./tokenize, of other files with scripts/prepare_data; of several sources each has its weight before it: '0.7 A 0.3 B'
1|tiny --data 'd/*.bin'|d/x_tokenizer.bin: magic number 20240328, not a token shard's 20240520; make shards of texts with ./tokenize, of other files with scripts/prepare_data; a pattern must match nothing else, and tokens of another program need a header (docs/data.md)
1|tiny --data d|--data d: a folder; give a pattern that only its token shards match, such as 'd/*train*.bin'
1|train --valid-data d|--valid-data d: a folder; give a pattern| or 'd/*val*.bin'
1|train --eval-choices d|--eval-choices d: a folder; give a pattern that only its multiple-choice sets match, such as 'd/hellaswag*.bin'
0|tiny --data 'd/*train*.bin'|
1|tiny --data cut.bin|--data cut.bin: the header says|the file holds 238|damaged or cut short
1|tiny --data alone.bin --vocab-size 100|--data alone.bin: token |outside the vocabulary of 100|--vocab-size
1|train --global-batch-size 500|--data d/x_train.bin: |sequences of 64 tokens, fewer than|--global-batch-size 500|or a shorter --seq-length
1|tiny --data d/x_val.bin --seq-length 512|--data d/x_val.bin: |tokens, fewer than one sequence of 512 (--seq-length)|; give more, or --seq-length
1|train --valid-data cut.bin|--valid-data cut.bin: the header
1|tiny|--data is missing: which shards to train on; --sample-only and --eval-only need none
1|train_gpt --load whole --sample-prompt a|--data is missing|--sample-only
1|tiny --data rows|--data rows: |too short for a token shard|with scripts/prepare_data; a pattern must match nothing else|!warning
1|train --eval-choices d/x_val.bin|prepare_choices makes them; a pattern must match nothing else|!header
0|train --iterations-to-skip 4-6|--iterations-to-skip 4-6: none of these steps is left to train
0|train --iterations-to-skip 3-6|!none of these steps
0|train --sample-interval 4|--sample-interval 4: the run ends at step 3, without a sample
0|train --sample-interval 3 --sample-length 1|!without a sample
0|train --reset-position-ids|--reset-position-ids has no effect without --arch gpt2
0|train --keep 2 --accept-data-change|--keep has no effect without --save|--accept-data-change has no effect without --resume
0|train --resume whole|nothing to train|!warning
0|train_gpt --config gone.txt --load whole --sample-only --sample-length 2|!error
0|train_gpt --config gone.txt --load whole --sample-only --plan|Memory plan
0|train_gpt --config gone.txt --load whole --sample-only --sample-length 2 --data=|!error
1|train_gpt --config gone.txt --load whole|--data gone_train.bin: no such file
1|train_gpt --config gone.txt --load whole --eval-only|--valid-data gone_val.bin: no such file
0|train_gpt --config gone.txt --load whole --eval-only --valid-data d/x_val.bin --eval-choices=|eval after
1|train_gpt --load whole --sample-only --data gone_train.bin|--data gone_train.bin: no such file
1|tiny --plan --data 'missing_*.bin'|--data missing_*.bin: no such file
1|gpus --model llama-tiny --plan --data '0.5 d/x_train.bin 0.5 missing.bin'|missing.bin: no such file
1|tiny --plan --data cut.bin|--data cut.bin: the header says
1|tiny --plan --data alone.bin --vocab-size 100|--data alone.bin: token |outside the vocabulary of 100
1|train --plan --valid-data cut.bin|--valid-data cut.bin: the header
1|train --plan --valid-data cut.bin --eval-only --load whole|--valid-data cut.bin: the header
1|train --plan --eval-choices no.bin|--eval-choices no.bin: no such file
1|train --plan --tokenizer text|--tokenizer text: not a tokenizer.bin
0|train --plan --seq-length 4096 --max-position-embeddings 4096 --global-batch-size 500|Memory plan
0|tiny --plan|Memory plan
1|train --tokenizer text|--tokenizer text: not a tokenizer.bin|./tokenize
1|train --tokenizer d/x_tokenizer.bin --vocab-size 250|--tokenizer d/x_tokenizer.bin: vocabulary 257|the model's 250 (--vocab-size)
1|train --resume bad|--resume bad/optimizer-0-of-1.safetensors: damaged: its checksum is|--list-checkpoints shows which
1|train --resume whole --hidden-size 32|--hidden-size 32: it is 64 in the checkpoint whole|leave the option out
1|train --resume weights|--resume weights/optimizer-0-of-1.safetensors: No such file or directory|--list-checkpoints shows which
0|from --load weights --train-iters 1|starting from the weights of weights
1|train --resume nowhere|--resume nowhere: no such folder|--list-checkpoints shows which
1|train --resume s/step_00000005|error: --resume s/step_00000005: no such folder; --list
1|train --resume latest|--resume latest: needs --save DIR
1|train --resume s|--resume s: a run's folder; give one of its checkpoints, such as s/latest
1|train_gpt --load s --sample-only|--load s: a run's folder; give one of its checkpoints, such as s/latest
1|train_gpt --save nowhere --list-checkpoints|--list-checkpoints: none under nowhere
1|train --save s --resume latest --hidden-size 32|it is 64 in the checkpoint s/step_00000003
1|tiny --save s --data no.bin|no such file
1|train --save s --num-attention-heads 3|must divide
1|train --save s|--save s: a run has saved there up to step 3|--resume latest|another --save
1|train_gpt --config s/config.txt|--save s: a run has saved there up to step 3
1|eval 'cd s && tiny --data ../d/x_train.bin --save .'|--save .: a run has saved there up to step 3; resume it 
1|train --save s --resume odd/latest|holds checkpoints of another run than --resume odd/latest
1|train --save s --resume odd/../odd/latest|holds checkpoints of another run than --resume odd/../odd/latest
1|from --resume latest --save broken|error: --resume broken/step_00000003/meta.json: damaged|--list-checkpoints shows which
1|from --resume latest --save broken --plan|error: --resume broken/step_00000003/meta.json: damaged
1|train_gpt --resume latest --save mistyped --model llama-tiny|which shards to train on; there is no checkpoint under mistyped that would
1|train --save text|--save text: the folder could not be made: a file of that name is in the way
1|train --save unmounted/x|--save unmounted: the folder could not be made: a link that leads nowhere is in the way
1|train --save odd/latest|--save odd/latest: a model's folder, which --load would refuse with checkpoints in it; give another
1|train --save odd/latest/new/run|--save odd/latest/new/run: lies in the checkpoint odd/latest; give another
1|train --save odd/latest --resume latest|--save odd/latest: a model's folder, 
1|from --load gpt2|--load gpt2: no such folder; scripts/convert_hf import makes one from a model of the Hub
1|from --load odd/latest/model.safetensors|--load odd/latest/model.safetensors: a file; give the folder that it is in
1|train --save taken|--save taken/metrics.jsonl: Is a directory
1|train --metrics taken|--metrics taken: Is a directory
1|train --metrics pipe|error: --metrics pipe: a pipe or a terminal
1|train --dump-gradients nowhere/g|--dump-gradients nowhere/g: No such file or directory
1|train --dump-gradients g --train-iters 0|--dump-gradients g: this run trains no step (--train-iters 0)
1|train --dump-gradients g --resume whole|nothing to train: step 3 is done|--dump-gradients g: this run trains no step (--train-iters 3)|!warning
1|train --dump-gradients g --load whole --sample-only|error: --dump-gradients: --sample-only is given too; leave one of them out
1|train --dump-gradients g --load whole --eval-only --valid-data d/x_val.bin|error: --dump-gradients: --eval-only is given too; leave one of them out|!eval after
1|train --load whole --export out --plan|error: --export: --plan is given too; leave one of them out
0|train --load whole --eval-only --valid-data d/x_val.bin --plan|Memory plan|!error
0|train --dump-gradients dumped --resume whole --train-iters 4|gradients in dumped|!nothing is saved
1|tokenize text|--output-prefix is missing|--help
1|tokenize --output-prefix e/x|no text files given|--help
1|tokenize --output-prefix e/x nothing.txt|nothing.txt: No such file
1|tokenize --output-prefix e/x text empty.txt|empty.txt: an empty file
1|tokenize --output-prefix e/x text marked.txt|marked.txt: an empty file
1|tokenize --output-prefix d/x text d/x_train.bin|d/x_train.bin: a shard or a tokenizer|name the texts alone
1|tokenize --output-prefix d/x text d/x_tokenizer.bin|d/x_tokenizer.bin: a shard or a tokenizer
1|tokenize --output-prefix e/x text 20240801.bin|20240801.bin: a shard or a tokenizer
1|tokenize --output-prefix e/x text 20261124.bin|20261124.bin: a shard or a tokenizer
1|tokenize --output-prefix e/x text 20261128.bin|20261128.bin: a shard or a tokenizer
1|tokenize --output-prefix e/x text 20240522.bin|20240522.bin: a shard or a tokenizer
1|tokenize --output-prefix e/x --valid-fraction 1 text|--valid-fraction 1: must be a number from 0 to below 1
1|tokenize --output-prefix e/x --valid-fraction 0x0.1 text|--valid-fraction 0x0.1: must be a number from 0 to below 1
1|tokenize --output-prefix own text own_val.bin|own_val.bin: a text, which --output-prefix own would overwrite; give another prefix
1|train --lr 0x10|--lr 0x10: must be a number from -1 to 100
1|train --sample-prompt "$(head -c 1100 text)"|--sample-prompt: longer than 1023 characters; --sample-tokens @FILE takes more
1|tokenize --prefix e/x text|--prefix: no such option|--help
1|tokenize --output-prefix|--output-prefix: |its value is missing|--help
1|tokenize --output-prefix text/x text|text: the folder could not be made
ROWS
    files | diff before - >difference || fail "changed: $(<difference)"
    [[ ! -e e && ! -e mistyped ]] || fail "left: $(ls)"
}

# What a file says, or is named, makes no second line and reaches no terminal.
test_messages_are_one_printable_line() {
    local gpt2='"architectures": ["GPT2LMHeadModel"], "n_layer": 2, "n_embd": 64, "n_head": 4, "n_positions": 64'
    odd=$'o\nd\e[2Jd' # of the rows below
    cp d/x_train.bin "$odd.bin"
    echo x >"$odd"
    printf 'arch %s\n' $'x\e[2J' >arch
    printf 'data "o\\nd\e[2Jd_*.bin"\n' >data
    mkdir -p type vocabulary
    printf '%s\n' '{"model_type": "o\nd\u001b[2Jd"}' >type/config.json
    printf '%s\n' "{\"model_type\": \"gpt2\", $gpt2, \"vocab_size\": \"o\\nd\\u001b[2Jd\"}" >vocabulary/config.json
    check_rows <<'ROWS'
1|tiny --data "${odd}_.bin"|--data o\nd\x1b[2Jd_.bin: no such file
1|tiny --data "$odd.bin" --vocab-size 100|--data o\nd\x1b[2Jd.bin: token 
1|train --tokenizer "${odd}_"|--tokenizer o\nd\x1b[2Jd_: No such file
1|train --tokenizer "$odd"|--tokenizer o\nd\x1b[2Jd: 
1|train --config arch|arch, line 1: --arch x\x1b[2J: must be
1|tiny --config data|--data o\nd\x1b[2Jd_*.bin: no such file
0|train_gpt --version --config no.txt|llm8.c|!no.txt
1|tiny "--$odd" 1|unknown option --o\nd\x1b[2Jd
1|train --load type|o\nd\x1b[2Jd
1|train --load vocabulary|vocab_size
ROWS
}

# Tokens for a sample to continue.
test_tokens_are_ids_of_the_vocabulary() {
    local given asked=(train_gpt --load s/latest --sample-only --quiet --sample-length 4 --sample-tokens)
    printf '1 2\n3\n' >ids && printf '1\t2\r\n3\r\n' >lines && printf '1 x' >no_ids
    for given in '1,2, 3' @ids @lines; do "${asked[@]}" "$given" >>continued || fail "$given"; done
    is "$(sort -u continued | wc -l) $(wc -w <continued)" '1 12'
    check_rows <<'ROWS'
1|"${asked[@]}" '1 2 x'|error: --sample-tokens|'x' is no token
1|"${asked[@]}" '1 400000 2'|error: --sample-tokens|'400000 2' is no token
1|"${asked[@]}" -1|error: --sample-tokens|'-1' is no token
1|"${asked[@]}" ' , '|error: --sample-tokens|no numbers
1|"${asked[@]}" 99999999999999999999|is no token of the vocabulary
1|"${asked[@]}" 1 --sample-prompt x|leave one
1|train --sample-tokens @ids|a file only with --sample-only
1|"${asked[@]}" @no_ids|error: --sample-tokens|'x' is no token
1|"${asked[@]}" @nowhere|error: --sample-tokens|nowhere: No such file
1|"${asked[@]}" @.|error: --sample-tokens|directory
ROWS
}

# Beside a checkpoint: its shape cannot be another; what changes no tensor may be.
test_contradictions_are_told() {
    local option given held way
    while read -r option given held; do
        echo "${option#--} $given" >other.txt
        for way in '--load odd/latest' '--resume odd/step_00000003' '--resume latest --save odd'; do
            check_rows <<ROWS
1|from $way $option=$given|error: $option $given: |it is $held in the checkpoint odd/
1|from $way --config other.txt|error: $option $given: |it is $held in the checkpoint odd/
ROWS
        done
    done <<'ROWS'
--num-layers 2 3
--hidden-size 60 48
--num-attention-heads 12 6
--num-query-groups 6 3
--kv-channels 16 8
--ffn-hidden-size 64 80
--vocab-size 300 257
--arch gpt2 llama
--untie-embeddings-and-output-weights false true
--qk-layernorm true false
--add-qkv-bias true false
ROWS
    expect_status 0 train --logit-softcap 30 --train-iters 0 --save capped || return
    check_rows <<'ROWS'
0|from --load odd/latest --seq-length 16 --plan|--seq-length 16|!warning:
0|from --load odd/latest --seq-length 64 --plan|!warning:
0|from --load odd/latest --seq-length 128 --plan|warning: --seq-length 128: the weights of the checkpoint odd/step_00000003 were trained with at most 64
0|from --load odd/latest --seq-length 128 --plan --max-position-embeddings 256|warning: --seq-length 128: the weights |--seq-length 128
0|from --resume odd/step_00000003 --seq-length 128 --plan|!were trained with
0|from --load odd/latest --rope-theta 1000 --plan|--rope-theta 1000 
0|from --load capped/latest --logit-softcap 0 --plan|warning: --logit-softcap 0: the weights
0|from --load odd/latest --model gpt2-tiny --plan|warning: --model gpt2-tiny: |--arch llama
0|from --load odd/latest --plan|!warning:|!gpt2
ROWS
}

test_schedules_that_do_not_fit_are_said() {
    local zero='warning: --lr-decay-iters 1: the learning rate is 0 from step 2 to 3; --min-lr sets it' style
    for style in cosine linear wsd; do
        check_rows <<ROWS
0|train --lr-decay-style $style --lr-decay-iters 1|$zero
0|train --lr-decay-style $style --lr-decay-iters 1 --min-lr 1e-5|!warning:
ROWS
    done
    check_rows <<'ROWS'
0|train --lr-decay-iters 1 --lr-warmup-iters 2|warning: --lr-decay-iters 1: the learning rate is 0 from step 3 to 3
0|train --lr-decay-style constant --lr-decay-iters 1|!warning:
0|train --lr-decay-iters 1 --lr 0|!warning:
0|train --lr-warmup-iters 20|warning: --lr-warmup-iters 20: training ends at step 3, before the rate reaches --lr
0|train --lr-warmup-iters 3|!warning:
0|train --lr-decay-iters 200|!warning:
ROWS
}

# The rates are 1e-3 in steps 2 to 7, and decay by a quarter in each later step.
test_a_rate_that_jumps_is_told() {
    local step says options
    expect_status 0 train --lr 1e-3 --lr-warmup-iters 2 --train-iters 10 --save-interval 1 --keep 0 \
        --save rate || return
    while IFS='|' read -r step says options; do
        # shellcheck disable=SC2086 # words
        expect_status 0 train_gpt --resume "rate/step_000000$step" $options || return
        grep 'warning: the learning rate' log >warnings
        if [[ -z $says ]]; then [[ ! -s warnings ]]; else grep -qE "rate $says" warnings; fi ||
            fail "$step $options: $(cat warnings)"
    done <<'ROWS'
10|rises from 0.00025 to 0.001 at step 11,|--train-iters 20
09|rises from 0.0005 to 0.001 at step 10|--train-iters 20
05||--train-iters 20
07||--train-iters 20
05|falls from 0.001 to 0.0005 at step 6|--train-iters 6
05||--train-iters 9
10||--train-iters 20 --lr 2e-4
05|rises from 0.001 to 0.003 at step 6|--lr 3e-3
05|falls from 0.001 to 0.0003 at step 6|--lr 3e-4
01||--lr-warmup-iters 0
05|falls from 0.001 to 0.0006|--lr-warmup-iters 10
05|falls from 0.001 to 0.000625 at step 6|--lr-decay-style linear
08|rises from 0.00075 to 0.001|--lr-decay-style constant
09|rises from 0.0005 to 0.00085|--min-lr 8e-4
05|falls from 0.001 to 0|--lr-decay-iters 4
05||
ROWS
    check_rows <<'ROWS'
0|train_gpt --resume rate/step_00000005 --lr-warmup-iters 4|  --lr-warmup-iters 4: over before step 6, so it changes no learning rate
0|train_gpt --resume rate/step_00000002 --lr-warmup-iters 4|!over before
0|train_gpt --resume rate/step_00000005 --lr-warmup-iters 4 --lr-decay-style cosine|!over before
0|train_gpt --resume rate/step_00000005 --lr-warmup-iters 2|!over before
ROWS
}

# What a start prints about what it will do; about options that do nothing; about what saves, or is
# not saved.
test_starts() {
    check_rows <<'ROWS'
0|train --global-batch-size 4|  schedule    3 steps of 256 tokens (2 x 128 micro-batches), |!warning
0|train --save-interval 2|  saves       nothing: no --save
0|train --save-interval 2 --save saved|  saves       every 2 steps to saved
0|train --resume latest --save saved --save-interval 1|  saves       every 1 step to saved|!warning
0|train --resume latest --save fresh|no checkpoint under fresh yet: starting from step 0
0|train --resume saved/latest --train-iters 4|warning: --resume saved/latest without --save: nothing is saved from here on|  saves       nothing: no --save
0|train --fp8-format hybrid|; delayed scaling, history 1024, margin 0 (E5M2: 5); fast accumulation
0|train --fp8-format hybrid --fp8-recipe tensorwise|; tensorwise scaling; fast accumulation forward, split backward
0|train --fp8-format e4m3 --fp8-recipe blockwise|; blockwise scaling, 1 x 128 and 128 x 128, power-of-two scales; split
0|train --fp8-lm-head|note: --fp8-lm-head has no effect without --fp8-format|!note: --fp8-recipe has no effect
0|train --load '' --resume= --lr 1e-3|note: --load is empty, in place of any value of a config file or checkpoint|note: --resume is empty|!--save is empty|!--lr is
1|train --data nowhere.bin|warning: --data is given twice: only nowhere.bin counts; several are one word: a pattern, or, of shards, a mixture|error: --data nowhere.bin
1|train --config twice.txt --eval-choices x.bin|warning: --valid-data is given twice: only b.bin counts|!--eval-choices is given|error: --valid-data b.bin
1|train --config twice.txt --valid-data c.bin|error: --valid-data c.bin|!is given twice
1|train --save odd/latest --list-checkpoints|--list-checkpoints: none under odd/latest
0|train --rope-scaling-factor 4|note: --rope-scaling-factor has no effect without --rope-scaling
0|train --rope-scaling linear --rope-scaling-factor 4 --rope-low-freq-factor 2|--rope-low-freq-factor has no effect without --rope-scaling llama3|!--rope-scaling-factor has
0|train --model gpt2-tiny --rope-theta 7 --rope-scaling linear --rope-scaling-factor 4|--rope-theta has no effect without --arch llama|--rope-scaling has no effect without --arch llama|--rope-scaling-factor has no effect without --arch llama
0|train --eval-precision bf16|note: --eval-precision has no effect without --fp8-format
0|train --eval-precision bf16 --rope-theta 7 --fp8-format hybrid|!no effect
0|train --lr-decay-style cosine --lr-wsd-decay-iters 1 --min-lr 1e-5|note: --lr-wsd-decay-iters has no effect without --lr-decay-style wsd|!--min-lr has
0|train --resume s/latest --lr-decay-style constant --min-lr 1e-5|note: --min-lr has no effect without --lr-decay-style cosine or --lr-decay-style linear or --lr-dec
0|train --lr-wsd-decay-iters 1 --min-lr 1e-5|!no effect
0|train --fp8-format hybrid --fp8-recipe tensorwise --fp8-margin 1|note: --fp8-margin has no effect without --fp8-recipe delayed
0|train --fp8-margin 1 --num-layers-at-start-in-bf16 0 --first-last-layers-bf16|--fp8-margin has no effect without --fp8-format|--num-layers-at-start-in-bf16 has no effect without --fp8-format
0|train --eval-interval 1 --eval-iters 1|note: --eval-interval has no effect without --valid-data or --eval-choices|note: --eval-iters has no effect without --valid-data
0|train --sample-length 5|note: --sample-length has no effect without --sample-interval or --sample-only
0|train --sample-length 5 --sample-interval 1 --eval-interval 1 --valid-data d/x_val.bin|!no effect
0|train --resume s/latest --init-method-std 0.5|warning: --init-method-std 0.5 has no effect: the weights are those of the checkpoint s/step_00000003
0|train --load s/latest --init-method-std 0.5|warning: --init-method-std 0.5 has no effect: the weights are those of the checkpoint s/
1|train --verify|error: --verify is for the GPU trainer: ./train_gptcu --verify
0|train --recompute block --no-fp8-lm-head|note: --recompute is for the GPU trainer; it has no effect here|!--fp8-lm-head has no effect
0|train --embedding-lr-mult 3 --head-lr-mult 0.5|note: --head-lr-mult has no effect without --untie-embeddings-and-output-weights| --embedding-lr-mult 3 --head-lr-mult 0.5|!embedding-lr-mult has
0|train --untie-embeddings-and-output-weights --head-lr-mult 0.5|!no effect
0|train --fp8-lm-head --fp8-format hybrid --fp8-recipe tensorwise|!no effect
0|train --resume s/latest|nothing to train: step 3 is done, and --train-iters is 3
0|train_gpt --resume s/latest --epochs 0.001|nothing to train: step 3 is done, and --epochs 0.001 ends at 3
1|train_gpt --sample-only --sample-prompt AB|--sample-prompt: no weights and no tokenizer: give --load or --resume
1|tiny --data d/x_val.bin --resume s/latest|error: --data |--accept-data-change|!nothing to train
0|train --resume s/latest --train-iters 1|nothing to train: step 3 is done, and --train-iters is 1
0|train --resume s/latest --eval-only --valid-data d/x_val.bin|eval after step 3 |!nothing to train|!(best)|!warning
0|train --load s/latest --eval-only --valid-data d/x_val.bin|eval after step 3 |!(best)|!warning
0|train --load s/latest --sample-only|!random
0|train --load s/latest --sample-only --save none|warning: --save none has no effect: --sample-only saves nothing
0|train --load s/latest --eval-only --valid-data d/x_val.bin --save none|warning: --save none has no effect: --eval-only saves nothing; --metrics FILE
0|train --resume latest --save s --eval-only --valid-data d/x_val.bin|eval after step 3 |!warning
0|train --sample-only|warning: the weights are random: no checkpoint is loaded (--load, --resume)
0|train --eval-only --valid-data d/x_val.bin|warning: the weights are random
0|train --resume latest --save none --sample-only|warning: the weights are random
0|train --sample-only --sample-length 2 --global-batch-size 100000|
0|from --resume odd/latest --load s/latest --train-iters 4|--load s/latest has no effect: the weights are those of the checkpoint 
0|from --resume odd/latest --load s/latest --sample-only|--load s/latest has no effect: the weights are those of the checkpoint 
0|from --load odd/latest --sample-only --sample-prompt 'Anna ' --seed 2 --sample-length 28|--sample-length 28: from token 28 of the sample on, the model does not see the beginning of the prompt: a sequence is 32 (--seq-length, at most 64)
0|from --load odd/latest --sample-only --sample-tokens '65 66' --sample-length 60|from token 32 of the sample on
0|from --load odd/latest --sample-only --sample-prompt "$(printf '%44s' '')" --sample-length 60|--sample-prompt: 45 tokens, more than a sequence of 32 (--seq-length, at most 64)
0|from --load odd/latest --sample-only --sample-prompt 'Anna ' --seed 2 --sample-length 27|!warning
0|from --load odd/latest --sample-only --sample-prompt 'Anna ' --seed 2|!warning
0|from --load odd/latest --sample-only --sample-prompt 'Anna ' --sample-length 59 --seq-length 64|!warning
0|from --load odd/latest --sample-only|!warning
0|from --load odd/latest --sample-only --sample-length 2 --sample-prompt $'<\x7cendoftext\x7c>A'|warning: --sample-prompt: it contains the end-of-text token's name
0|from --load odd/latest --train-iters 2 --sample-interval 2 --sample-prompt 'Anna '|!warning
0|train --vocab-size 5000|note: --vocab-size 5000 is far above the 257 tokens of d/x_tokenizer.bin: leave it out, or give --vocab-size 257
0|train --vocab-size 300|!far above
0|tokenize --output-prefix e/named named|warning: named: it contains the end-of-text token's name
0|tokenize --output-prefix e/utf16 utf16|warning: utf16: it has NUL bytes, as packed files and UTF-16 have; unpack, convert or clean it
0|tokenize --output-prefix e/rows rows|warning: rows: rows of JSON, which are trained on with their names and quotes; scripts/prepare_data reads rows
0|tokenize --output-prefix e/text text|!warning
0|train --valid-data alone.bin|warning: --valid-data: alone.bin is also in --data
0|train --valid-data d/x_val.bin|!is also in
0|eval 'OMP_NUM_THREADS=99999999 train'|OMP_NUM_THREADS
ROWS
    grep -q '^warning' log || fail # of the last
    is "$(readlink saved/latest)" step_00000003
}

test_a_bare_call_is_short() {
    expect_message 1 '--help lists every option' train_gpt # the program is called as it was
    [[ $(wc -l <log) -eq 5 && $(sed "s|$root|.|" log | wc -L) -le 100 ]] || fail
}

# Without them, a program's own files would get the numbers 0 to 2, and be printed into.
test_closed_streams_are_no_files() {
    local closed step
    for closed in '<&-' '>&-' '2>&-' '<&- >&-' '<&- >&- 2>&-'; do
        rm -rf closed
        eval '"$root/tokenize" --output-prefix closed/x text' "$closed" || fail "$closed: tokenize"
        cmp -s d/x_train.bin closed/x_train.bin || fail "$closed: another shard"
        eval '"$root/train_gpt" "${tiny[@]}" --data d/x_train.bin --log-interval 1 --save closed/s' \
            '--save-interval 1' "$closed" || fail "$closed: train_gpt"
        for step in 1 2 3; do
            [[ -e closed/s/step_0000000$step/meta.json ]] || fail "$closed: no step $step"
        done
        ! "$root/train_gpt" --save closed/s --list-checkpoints 2>&1 | grep -q damaged ||
            fail "$closed: damaged"
        same_checkpoint whole closed/s/step_00000003 || fail "$closed: another end"
        ! grep -rqaE '^step +[0-9]+/' closed || fail "$closed: steps in a file"
    done
}

# SIGXFSZ is ignored, so that a write beyond the limit fails.
test_a_full_disk_keeps_no_shard() {
    head -c 3000000 /dev/zero >large
    (trap '' XFSZ && ulimit -f 1000 && tokenize --output-prefix e/x large) >log 2>&1
    says 'error: e/x_train.bin.new: could not be written: File too large'
    [[ -z $(find e -name '*.new') ]] || fail "left: $(ls e)"
}

# Whichever of several ends well has made the shards alone.
test_tokenize_at_once() {
    local i pids=() ended=0
    head -c 6000000 /dev/zero | tr '\0' 'a' >many
    for i in 1 2 3 4; do
        { cat many && echo "$i$i"; } >text$i
        "$root/tokenize" --output-prefix m/x text$i >log$i 2>&1 &
        pids+=($!)
    done
    for i in 1 2 3 4; do
        if wait "${pids[i - 1]}"; then
            ended=$((ended + 1))
        else
            grep -qE '^error: m/x_(train|val).bin.new: another ./tokenize' log$i || fail "$(cat log$i)"
        fi
    done
    [[ $ended -ge 1 && -z $(find m -name '*.new') ]] || fail "$ended ended: $(ls m)"
    tail -c 6 m/x_val.bin | od -An -tu2 | grep -qE '(49 +49|50 +50|51 +51|52 +52) +10$' ||
        fail "cut short: $(tail -c 6 m/x_val.bin | od -An -tu2)"
    [[ $(stat -c %s m/x_train.bin) -eq $((1024 + 2 * 5400004)) ]] || fail "$(ls -l m)"
    rm many text[1-4]
}

run_tests
