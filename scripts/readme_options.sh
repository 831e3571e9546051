#!/usr/bin/env bash
# The tables of options and presets in docs/options.md, made from --help, so that they are no second list.
#   make readme                        writes them between <!-- options --> and <!-- /options -->
#   scripts/readme_options.sh --print  prints them
set -u
cd "$(dirname "$0")/.." || exit 1

# --help has a heading in column 1, then rows: an option in column 3, its text from column 37 on, on
# the same line or below.
tables() {
    ./train_gpt --help | awk '
        function cell(text) {
            gsub(/\|/, "\\|", text)
            return text
        }
        function end_row(   at, fallback) {
            if (name == "") return
            if (presets) { printf "| `%s` | %s |\n", name, cell(help); name = ""; return }
            fallback = name ~ /\[no-\]/ ? "on" : ""
            if (match(help, / \[[^][]*\]$/)) {
                fallback = substr(help, RSTART + 2, RLENGTH - 3)
                help = substr(help, 1, RSTART - 1)
            }
            printf "| `%s` | %s | %s |\n", cell(name), cell(help), fallback
            name = ""
        }
        /^Exit status/ { end_row(); exit }
        /^[A-Z]/ {
            end_row()
            presets = /^Presets/
            heading = $0
            next
        }
        /^  [^ ]/ {
            end_row()
            if (heading != "") {
                printf "\n**%s**\n\n", heading
                if (presets) print "| preset | what |\n| --- | --- |"
                else print "| option | what | default |\n| --- | --- | --- |"
                heading = ""
            }
            alone = substr($0, 36, 1) != " "
            name = alone ? substr($0, 3) : substr($0, 3, 33)
            help = alone ? "" : substr($0, 37)
            sub(/ +$/, "", name)
            next
        }
        /^ +[^ ]/ { sub(/^ +/, ""); help = help (help == "" ? "" : " ") $0 }'
}

if [[ ${1:-} == --print ]]; then
    tables
    exit
fi
page=docs/options.md
tables >"$page.new" || exit 1
awk -v new="$page.new" '
    /^<!-- options -->$/ { print; while ((getline line <new) > 0) print line; skip = 1 }
    /^<!-- \/options -->$/ { skip = 0 }
    !skip' "$page" >"$page.next" && mv "$page.next" "$page" && rm "$page.new"
