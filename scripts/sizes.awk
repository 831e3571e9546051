# The sizes that make code hard to live in, for `make lint`: one line for each that is over its
# limit, then a summary. Fails when there was one.
#
#   awk -f scripts/sizes.awk FILE...
#
# Functions are found by the layout that clang-format gives C and CUDA, and that our shell scripts
# keep: they begin in column 1 and end with a } of its own there.

function over(what, size, limit) {
    if (size <= limit) return
    printf "%s:%d: %s: %d, more than %d\n", file, line, what, size, limit
    faults++
}

function name_of(text) {
    sub(/__launch_bounds__\([^()]*(\([^()]*\))*[^()]*\) */, "", text)
    sub(/ *\(.*/, "", text)
    sub(/.*[ *]/, "", text)
    return text
}

function end_function(last) {
    kernel = declaration ~ /__global__/
    line = start
    over((kernel ? "kernel " : "function ") name_of(declaration) ", lines", last - start + 1,
         kernel ? 100 : 60)
    sizes[last - start + 1]++
    functions++
    start = 0
}

function end_file() {
    line = lines
    over("lines", lines, file ~ /(^|\/)train_gpt\.cu?$/ ? 900 : 400)
    if (lines > longest_file) longest_file = lines
    total += lines
}

FNR == 1 {
    if (NR > 1) end_file()
    file = FILENAME
    start = opened = 0
    files++
}

{
    lines = line = FNR
    over("columns", length($0), 100)
}

# ---- a declaration from column 1 on, up to its { or ; ----
/^[A-Za-z_]/ && !opened { start = FNR; declaration = "" }
start && !opened {
    declaration = declaration $0
    if ($0 ~ /;$/) start = 0
    else if ($0 ~ /\{$/) opened = 1
}
opened && /^}/ {
    opened = 0
    is_function = declaration ~ /\(/ && declaration !~ /^(typedef|struct|union|enum|extern) |= \{$/
    if ($0 == "}" && is_function) end_function(FNR)
    start = 0
}

END {
    end_file()
    for (n = 1; n <= 100000 && seen < functions; n++) {
        if (!(n in sizes)) continue
        if (seen < functions / 2 && seen + sizes[n] >= functions / 2) median = n
        seen += sizes[n]
        longest = n
    }
    printf "%d lines in %d files, the longest %d; %d functions, median %d lines, the longest %d\n",
        total, files, longest_file, functions, median, longest
    exit faults > 0
}
