#!/usr/bin/env bash
# The README and docs/ against the tree: the table of docs/architecture.md's folders has a row for
# every folder with sources and none for what does not exist; every source or its header begins by
# saying what it is; every `make TARGET` and --option that a page names exists, and every file that
# a page or a source names by its folder; links lead somewhere; the error messages of
# docs/troubleshooting.md are ours; the table of metrics in docs/formats.md has the fields that a run
# writes. test_bench.sh has what scripts/results writes.
# shellcheck source=test/lib.sh
source "$(dirname "$0")/lib.sh"

# The names in the first column of the table, which stand in backticks.
rows_of() {
    awk '
        match($0, /^#+ /) {
            if (RLENGTH <= level) level = 0
            if ($0 ~ /^#+ Folders/) level = RLENGTH
        }
        level && /^\|/' "$1" | cut -d '|' -f 2 | grep -oE '`[^`]+`' | tr -d '`' | sort
}

# What is code in a README: blocks between fences, and words in backticks. Comments are left out.
code_of() {
    awk '
        /^ *```/ { inside = !inside; next }
        inside { print; next }
        {
            while (match($0, /`[^`]+`/)) {
                print substr($0, RSTART + 1, RLENGTH - 2)
                $0 = substr($0, RSTART + RLENGTH)
            }
        }' "$1" | sed -E 's/(^|[ \t])#.*//'
}

sources() {
    git -C "$root" ls-files -- '*.c' '*.h' '*.cu' '*.cuh' '*.py' '*.sh' '*.awk' |
        grep -v '^test/golden/' | sort
}

# A folder stands for the folders in it.
missing_rows() {
    comm -23 <(sources | sed -E 's,^([^/]*/).*,\1,' | sort -u) <(rows_of "$1")
}

# $1: a folder in which to look; sources that do not begin with a comment, nor their header.
silent_sources() {
    local source
    sources | grep -E '\.(c|h|cu|cuh)$' | while IFS= read -r source; do
        [[ ! -e $1/$source ]] && continue
        head -n 1 -q "$1/$source" "$1/${source%.*}.h" 2>/dev/null | grep -q '^//' || echo "$source"
    done
}

stale_rows() {
    local row
    while IFS= read -r row; do
        if [[ ! -e $root/$row ]]; then echo "$row"; fi
    done < <(rows_of "$1")
}

# Files of ours, by their folders, that are named and do not exist.
missing_files() {
    local folders='base|kernels|model|ranks|dataloader|checkpoints|train|scripts|test|docs'
    grep -oE "\<($folders)/[a-z0-9_/]+\.(c|h|cu|cuh|py|sh|md|txt)\>" "$1" | sort -u |
        while IFS= read -r file; do [[ -e $root/$file ]] || echo "$file"; done
}

targets_of() {
    code_of "$1" | grep -oE '(^|[ ;&|(])make( +[A-Z_]+=[^ ]*| +[a-z][a-z0-9_-]*)+' |
        tr ' ' '\n' | grep -xE '[a-z][a-z0-9_-]*' | grep -vx make | sort -u
}

# A target has a recipe or prerequisites; being named in .PHONY is not enough.
unknown_targets() {
    make -C "$root" -pRrq : 2>/dev/null | awk -F : '
        /^$/ { target = "" }
        /^[a-z][a-z0-9_-]*:/ { target = $1; if ($2 ~ /[a-z]/) print target }
        /recipe to execute/ && target != "" { print target }' | sort -u >targets
    comm -23 <(targets_of "$1") targets
}

# Options of our programs: what follows their names, or stands alone.
options_of() {
    code_of "$1" | grep -oE '((train_gpt|train_gptcu|tokenize|make_corpus|scripts/).*|^ *--.*)$' |
        grep -oE -- '(^|[ =])--[a-z][a-z0-9-]*' | tr -d ' =' | sort -u
}

unknown_options() {
    local option name
    { "$root/train_gpt" --help && "$root/tokenize" --help; } >help
    while IFS= read -r option; do
        name=${option#--}
        if grep -qE -- "--(\[no-\])?$name( |\$)" help; then continue; fi
        if grep -qF -- "--[no-]${name#no-} " help; then continue; fi
        # flags that are off by default, and the scripts' own options
        if [[ $name == no-* ]] && grep -qE -- "^  --${name#no-}(  | *\$)" help; then continue; fi
        if git -C "$root" grep -qE -e "(--|\")$name\b" -- scripts; then continue; fi
        echo "$option"
    done < <(options_of "$1")
}

# Names of other trainers in the first columns of the tables whose second is "here", which the
# trainer neither has nor answers with ours.
unanswered_names() {
    local name said
    awk -F '|' '!/^\|/ { inside = 0 } $3 == " here " { inside = 1 } inside { print $2 }' "$1" |
        sed -E 's/[A-Za-z_.]+\(.*//' |
        grep -oE -- '(^|[ ,;])(--?[a-z][a-z0-9_-]*|[a-z0-9]+(_[a-z0-9]+)+)' | tr -d ' ,;' | while IFS= read -r name; do
        if [[ $name != -* ]]; then name=--$name; fi
        said=$("$root/train_gpt" "$name" 2>&1)
        if [[ $said == *'(--help lists all)' && $said != *'did you mean'* ]]; then echo "$name"; fi
    done
}

anchors() {
    grep -E '^#+ ' "$1" | sed -E 's/^#+ //' | tr 'A-Z ' 'a-z-' | tr -cd 'a-z0-9\n_-'
}

# Files and headings that a page links to, and that are not there.
broken_links() {
    local target file anchor
    grep -oE '\]\([^)]+\)' "$1" | sed 's/^](//; s/)$//' | grep -v '^http' | while IFS= read -r target; do
        file=$(dirname "$1")/${target%%#*} anchor=${target#"${target%%#*}"}
        if [[ $target == '#'* ]]; then file=$1; fi
        if [[ ! -e $file ]] || { [[ -n $anchor ]] && ! anchors "$file" | grep -qxF "${anchor#'#'}"; }; then
            echo "$target"
        fi
    done
}

# The first column of a table of error messages: what our sources do not say, … being anything.
unsaid_messages() {
    sources | grep -E '\.(c|h|cu)$' | sed "s#^#$root/#" | xargs cat | sed -z 's/"[ \t]*\n[ \t]*"//g' >said
    sed -n '/^## Error messages/,$p' "$1" | grep -oE '^\| `[^`]+`' | sed 's/^| `//; s/`$//' |
        sed 's/ *… */\n/g' | while IFS= read -r part; do
        grep -qF -- "$part" said || echo "$part"
    done
}

unlisted_pages() {
    local page
    for page in "$root"/docs/*.md; do
        page=${page##*/}
        [[ $page == README.md ]] || grep -qF "]($page)" "$1" || echo "$page"
    done
}

# "kind field" of every record: in the table of the section "Metrics", and in the records of a run.
shown_fields() {
    sed -n '/^#* *Metrics/,/^#/p' "$1" | awk -F '|' '$2 ~ /^ `[a-z]+` $/ {
        gsub(/[` ]/, "", $2)
        n = split($3, parts, "`")
        for (i = 2; i <= n; i += 2) print $2, parts[i]
    }' | sort
}

written_fields() {
    python3 -c 'import json, sys
for line in open(sys.argv[1]):
    record = json.loads(line)
    for name in record.keys() - {"kind"}: print(record["kind"], name)' "$1" | sort -u
}

wrong_fields() {
    comm -3 <(shown_fields "$1") <(written_fields metrics.jsonl)
}

is_checkout() {
    git -C "$root" ls-files >tracked 2>&1 || { skip "no git checkout: which files are ours is not known"; false; }
}

# Each check prints what is wrong with a page, or with the file that a row names; nothing is right.
test_pages_are_right() {
    local does what page wrong pages
    is_checkout || return
    make_shards 1500
    expect_status 0 train_gpt --model llama-tiny --data d/x_train.bin --valid-data d/x_val.bin \
        --train-iters 2 --micro-batch-size 2 --save metrics --save-interval 1 || return
    cp metrics/metrics.jsonl .
    while IFS='|' read -r does what pages; do
        while IFS= read -r page; do
            wrong=$("$does" "$root/$page")
            [[ -z $wrong ]] || fail "$page: $what: $(tr '\n' ' ' <<<"$wrong")"
        done < <(cd "$root" && eval "printf '%s\n' $pages")
    done <<'ROWS'
missing_rows|without a row in the table|docs/architecture.md
stale_rows|in the table, but not in the tree|docs/architecture.md
silent_sources|its first line is no comment that says what it is|.
missing_files|no such file|*.md docs/*.md $(sources | grep -v test/test_readme.sh)
unknown_targets|not a target of the Makefile|*.md docs/*.md
unknown_options|not an option|*.md docs/*.md
unanswered_names|not answered with ours|*.md docs/*.md
broken_links|leads nowhere|*.md docs/*.md
unsaid_messages|no source says|docs/troubleshooting.md
unlisted_pages|not listed|docs/README.md
wrong_fields|fields in the table or in metrics.jsonl alone|docs/formats.md
ROWS
}

# sees CHECK EDIT FOUND: nothing is wrong with right.md, and with one edit this is.
sees() {
    local wrong
    [[ -z $($1 right.md) ]] || fail "$1: $($1 right.md | head -n 3)"
    sed "$2" right.md >wrong.md
    wrong=$($1 wrong.md | tr -d '\t' | tr '\n' ' ')
    # shellcheck disable=SC2053 # a pattern
    [[ $wrong == $3 ]] || fail "$1 $2: a fault is not seen: '$wrong'"
}

# A README that is right, made from the tree, and that with one fault of each kind.
test_faults_are_seen() {
    is_checkout || return
    echo '{"kind":"step","a":1,"b":{"c":[{"d":"}"}],"e":"\""},"f":"x:y","g":null}' >metrics.jsonl
    {
        printf '# x\n| `no/row` |\n## Folders\ntext\n### part\n| file | what |\n| --- | --- |\n'
        sources | sed -E 's,^([^/]*/).*,\1,' | sort -u | sed 's#.*#| `&` | what `not/it` is |#'
        printf '| `train/gpu/` | a folder |\n## Next\n| `not/here` | x |\n'
        printf 'Run `make test`, or `make fuzz SECONDS=5`; make nothing else, `--bf16`\n'
        printf '```\nmake WERROR=1 all clean # make war\n./train_gpt --lr 1 \\\n'
        printf '    --no-shuffle --no-bf16 --save=x  # --nonsense\ngit clone --depth 1 x\n```\n'
        printf 'x\n| other | here |\n| --- | --- |\n| -i, --max_steps; n_layer of a_b(X) | x |\n\n'
        printf '| `no` | `z` |\n## Metrics\n| `step` | `a`, `b` |\n| `step` | the `f` and `g` |\n'
        printf '## A Title: x\n[a](#a-title-x)\n'
        (cd "$root/docs" && printf '[x](%s)\n' *.md)
        printf '## Error messages\n| `a run has saved there … --resume latest` | x |\n'
    } >right.md
    ln -s "$root"/docs/*.md .
    sees missing_rows '/base\//d' 'base/ '
    sees stale_rows 's/^| `train\/gpu\/`/| `trains\/`/' 'trains/ '
    sees missing_files '$s,$, base/io.h model/x.h,' 'model/x.h '
    sees unknown_targets 's/make test/make tests/' 'tests '
    sees unknown_targets 's/=1 all/=1 quickest/' 'quickest '
    sees unknown_options 's/--lr 1/--lrr 1/' '--lrr '
    sees unknown_options 's/--no-shuffle/--no-lr/' '--no-lr '
    sees unknown_options 's/`--bf16`/`--bf17`/' '--bf17 '
    sees unanswered_names 's/-i,/-w,/' '-w '
    sees unanswered_names 's/n_layer/xyz_layers_q/' '--xyz_layers_q '
    sees wrong_fields 's/`a`/`h`/' 'step a step h '
    sees broken_links 's/(#a-title-x)/(#b)/' '#b '
    sees broken_links 's/(fp8.md)/(none.md)/' 'none.md '
    sees unsaid_messages 's/has saved there/has slept there/' 'a run has slept there '
    sees unlisted_pages '/(fp8.md)/d' 'fp8.md '
    mkdir -p silent/base
    echo '#include "rng.h"' >silent/base/io.c
    echo '#ifndef RNG' >silent/base/io.h
    [[ $(silent_sources silent | wc -l) -eq 2 ]] || fail "a silent source is not seen"
}

run_tests
