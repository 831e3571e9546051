#!/usr/bin/env bash
# The pages: every block of ```sh in them is run as it stands, page by page, in a tree of
# its own, but for those whose paragraph says **On a GPU or **With a network. The trainer there is
# a script that takes presets for tiny models and a hundredth of the steps. Read in one tree, pages
# do not stop each other: what two of them write, they write by the same command.
# shellcheck source=test/lib.sh
source "$(dirname "$0")/lib.sh"
export NO_COLOR=1 MPLCONFIGDIR=$PWD/matplotlib

# blocks PAGE FOLDER: writes each block that is to be run to FOLDER/LINE.sh; prints how many are
# not.
blocks() {
    mkdir -p "$2"
    awk -v folder="$2" '
        function ends() { if (paragraph_over) paragraph = ""; paragraph_over = 0 }
        /^```/ && inside { inside = 0; next }
        /^```/ {
            inside = 1
            runs = $0 == "```sh" && paragraph !~ /\*\*(On a GPU|With a network)/
            if ($0 == "```sh" && !runs) left_out++
            file = sprintf("%s/%04d.sh", folder, NR + 1)
            if (runs) printf "" >file
            next
        }
        inside { if (runs) print >file; next }
        /^ *$/ { paragraph_over = 1; next }
        { ends(); paragraph = paragraph $0 "\n" }
        END { print left_out + 0 }' "$1"
}

# The trainer of the tree: its options, with a tiny preset for each and counts of 100 and more,
# and steps of checkpoints, divided by 100.
small_trainer() {
    cat <<END
#!/usr/bin/env bash
words=()
while [[ \$# -gt 0 ]]; do
    case \$1 in
    --model)
        case \$2 in
        gpt2*) words+=(--model gpt2-tiny) ;;
        *) words+=(--model llama-tiny) ;;
        esac
        shift
        ;;
    --*-iters | --*-interval | --sample-length)
        words+=("\$1" \$((\$2 >= 100 ? (\$2 + 99) / 100 : \$2)))
        shift
        ;;
    */step_????????) words+=("\${1%_*}_\$(printf %08d \$(((10#\${1##*_} + 99) / 100)))") ;;
    *) words+=("\$1") ;;
    esac
    shift
done
exec "$root/train_gpt" "\${words[@]}"
END
}

# A tree as a user has it after make and make scripts, with a text. make does nothing in it.
plant() {
    local file
    mkdir -p "$1/.bin"
    for file in "$root"/{Makefile,README.md,docs,test,train,kernels,dataloader,checkpoints,build} \
        "$root"/{.venv,tokenize,make_corpus}; do
        ln -s "$file" "$1"
    done
    cp -r "$root/scripts" "$1"
    small_trainer >"$1/train_gpt"
    printf '#!/bin/sh\n' >"$1/.bin/make"
    chmod +x "$1/train_gpt" "$1/.bin/make"
    make_text 1 60000 >"$1/mine.txt"
}

# Prepares what a page's commands read but cannot make here: runs, an imported model.
prepare_page() {
    case $1 in
    fine_tune) cp -rL test/golden/chat start ;; # an imported model with a chat template of its own
    serve | troubleshooting | doctor | fp8 | formats | data | evaluation | architecture) prepare_run ;;
    esac
}

prepare_run() {
    ./tokenize --output-prefix data/mine mine.txt &&
        ./train_gpt --model llama-tiny --data data/mine_train.bin --valid-data data/mine_val.bin \
            --train-iters 1000 --micro-batch-size 2 --bf16 --save run/bf16 &&
        ./train_gpt --model llama-tiny --data data/mine_train.bin --valid-data data/mine_val.bin \
            --train-iters 1000 --micro-batch-size 2 --lr 1e-4 --bf16 --fp8-format hybrid \
            --save run/mine --save-interval 100 --keep 0 # so few steps at a usual rate double activations
}

# run_page PAGE TREE: the page's blocks in their order; fails at the first that does.
run_page() {
    local page=$1 tree=$PWD/$2 name block status
    name=$(basename "$page" .md)
    blocks "$page" "$tree.blocks/$name" >/dev/null
    plant "$tree"
    (cd "$tree" && prepare_page "$name") >log 2>&1 || { fail "$name: $(tail -n 3 log)"; return; }
    for block in "$tree.blocks/$name"/*.sh; do
        [[ -e $block ]] || continue
        status=0
        (cd "$tree" && PATH=$PWD/.bin:$PATH bash -eu "$block") >log 2>&1 </dev/null || status=$?
        # 3: a comparison that cannot tell, as a hundredth of the steps may not
        if [[ $status -ne 0 && ! ($status -eq 3 && $(<"$block") == *scripts/compare*) ]]; then
            fail "$name.md, line $(basename "$block" .sh): $(tail -n 3 log)"
            return
        fi
    done
}

# And git ignores what they make.
test_every_command_runs() {
    local page
    for page in "$root"/*.md "$root"/docs/*.md; do run_page "$page" "trees${page#"$root"}"; done
    git -C "$root" ls-files >tracked 2>&1 || return 0 # no checkout
    find trees -path '*.md/*' -prune ! -path '*.blocks/*' ! -name scripts ! -name '.*' \
        \( -type d -printf '%f/\n' -o -type f -printf '%f\n' \) | sort -u |
        git -C "$root" check-ignore --stdin --verbose --non-matching | grep '^::' >log
    [[ ! -s log ]] || fail "git does not ignore $(xargs <log)"
}

# contested FOLDER...: of these, each with a page's blocks, what would stop a reader of another page: a
# run that two of them save, data that they make by commands that differ.
contested() {
    local page
    for page; do
        cat "$page"/*.sh 2>/dev/null | sed -z 's/\\\n//g' | sed 's/ *#.*//; s/  */ /g' | sed -nE \
            -e '/--list-checkpoints/d' -e "s,.*--(save|out) ([^ ]+).*,\2 $page,p" \
            -e 's/.*--output(-prefix)? ([^ ]+).*/\2 &/p' | sort -u
    done | sort -u | cut -d ' ' -f 1 | uniq -d
}

test_pages_can_be_read_in_order() {
    is "$(contested trees/*.blocks/* trees/docs/*.blocks/*)" ''
    mkdir -p two/{a,b,c}
    echo 'x --output-prefix data/a # so' | tee two/a/1.sh >two/b/1.sh
    is "$(contested two/*)" ''
    printf 'x \\\n  --out run/c\n' | tee two/a/2.sh >two/c/1.sh
    echo 'y --output-prefix data/a' >two/c/2.sh
    is "$(contested two/*)" $'data/a\nrun/c'
}

test_faults_are_seen() {
    printf '# x\n\n**On a GPU:** it\nneeds one\n\n```sh\nfalse\n```\n\ntext\n\n' >a.md
    printf '```text\nfalse\n' >>a.md
    printf '```\n\n```sh\n./train_gpt --version\n```\n\nand\n```sh\nfalse\n```\n' >>a.md
    [[ $(blocks a.md a) == 1 ]] || fail "what is marked is not left out"
    [[ $(cat a/*.sh) == $'./train_gpt --version\nfalse' ]] || fail "other blocks: $(cat a/*.sh)"
    ! passes run_page a.md trees/a || fail "a command that fails is not seen"
    has complaints 'a.md, line 0022' || fail "$(cat complaints)"
}

need_scripts
run_tests
