// Options: tests every row of the table with every way to set and to print it. The lists here have
// values and messages, but no list of options: those come from the table.
#include "fixture.h"

#include <fcntl.h>
#include <float.h>
#include <math.h>
#include <sys/stat.h>
#include <unistd.h>

static Options defaults(void) {
    return options_of("");
}

// The error of a command line, or "" when it has none.
static const char *error_of(const char *command) {
    Options o;
    return read_options(&o, command) ? "" : error_text();
}

// A legal value of a row that is not its default.
static const char *other_value(const OptionRow *row, char out[OPTION_TEXT]) {
    switch (row->type) {
    case OPTION_INT:
    case OPTION_INT64: snprintf(out, OPTION_TEXT, "%.0f", row->min + 3); break;
    case OPTION_DOUBLE: snprintf(out, OPTION_TEXT, "%.17g", 0.3 * row->min + 0.7 * row->max); break;
    case OPTION_BOOL: strcpy(out, strcmp(row->fallback, "true") == 0 ? "false" : "true"); break;
    case OPTION_STRING: strcpy(out, "a/path with spaces#1"); break;
    case OPTION_CHOICE: strcpy(out, strrchr(row->choices, '|') + 1); break;
    }
    return out;
}

TEST(every_row_is_well_formed) {
    EACH_OPTION (row) {
        bool number = row->type == OPTION_INT || row->type == OPTION_INT64 ||
                      row->type == OPTION_DOUBLE;
        CHECK(row->name[0] != '\0' && strncmp(row->name, "no-", 3) != 0);
        CHECK(row->help[0] != '\0' && row->group[0] != '\0');
        CHECK(!number || row->min < row->max);
        CHECK(row->type != OPTION_INT || (row->min >= INT32_MIN && row->max <= INT32_MAX));
        for (const OptionRow *other = option_table; other < row; other++) {
            CHECK(strcmp(row->name, other->name) != 0 && row->offset != other->offset);
        }
        char needs[OPTION_TEXT] = "", *rest;
        if (row->needs != NULL) { snprintf(needs, sizeof(needs), "%s", row->needs); }
        for (char *need = strtok_r(needs, "|", &rest); need != NULL;
             need = strtok_r(NULL, "|", &rest)) {
            Options o = defaults();
            char *value = strchr(need, ' ');
            if (value != NULL) { *value++ = '\0'; }
            CHECK(option_row(need) != NULL);
            CHECK(value == NULL || option_set(&o, need, value, SOURCE_COMMAND));
        }
    }
}

TEST(every_row_is_set_by_every_source) {
    char value[OPTION_TEXT], text[OPTION_TEXT];
    EACH_OPTION (row) {
        other_value(row, value);
        for (int source = SOURCE_DEFAULT; source <= SOURCE_COMMAND; source++) {
            Options o = defaults();
            o.source[row - option_table] = SOURCE_DEFAULT;
            CHECK(option_set(&o, row->name, value, (OptionSource)source));
            double now = strtod(option_text(&o, row, text), NULL);
            if (row->type == OPTION_DOUBLE) {
                CHECK(now == strtod(value, NULL));
            } else {
                CHECK_TEXT(text, value);
            }
            CHECK_EQUAL(option_source(&o, row->name), source);
        }
    }
}

TEST(wrong_values_are_refused_by_name) {
    static const char *const wrong[] = {"x",
                                        "",
                                        "1x",
                                        "--",
                                        "1e",
                                        "nan",
                                        "inf",
                                        "99999999999999999999999",
                                        "-99999999999999999999999",
                                        "1.5.5",
                                        "0x",
                                        " "};
    EACH_OPTION (row) {
        for (int j = 0; j < COUNT(wrong); j++) {
            Options o = defaults(), before = o;
            if (row->type == OPTION_STRING) { continue; }
            CHECK(!option_set(&o, row->name, wrong[j], SOURCE_COMMAND));
            CHECK_CONTAINS(error_text(), text_of("--%s %s: must be ", row->name,
                                                 *wrong[j] ? wrong[j] : "(nothing)"));
            CHECK_BITS(&o, &before, sizeof(o));
            if (row->type == OPTION_CHOICE) { CHECK_CONTAINS(error_text(), row->choices); }
        }
    }
}

// The bounds themselves are allowed, and the next values beyond them are refused.
TEST(bounds_are_inclusive) {
    EACH_OPTION (row) {
        bool real = row->type == OPTION_DOUBLE;
        if (!real && row->type != OPTION_INT && row->type != OPTION_INT64) { continue; }
        double bounds[2] = {row->min, row->max};
        for (int side = 0; side < 2; side++) {
            int sign = side == 0 ? -1 : 1;
            double at = bounds[side];
            const char *past = real ? text_of("%.17g", nextafter(at, sign * HUGE_VAL))
                                    : text_of("%lld", (long long)at + sign); // 2^53 + 1 is one
            Options o = defaults();
            CHECK(option_set(&o, row->name, text_of(real ? "%.17g" : "%.0f", at), SOURCE_COMMAND));
            CHECK(!option_set(&o, row->name, past, SOURCE_COMMAND));
        }
    }
}

TEST(unknown_names_suggest_the_nearest) {
    EACH_OPTION (row) {
        const char *name = row->name;
        size_t length = strlen(name), middle = length / 2;
        char typo[80];
        if (length < 6) { continue; }
        const char *expected = text_of("did you mean --%s?", name);
        snprintf(typo, sizeof(typo), "--%.*s%s", (int)middle, name, name + middle + 1); // left out
        CHECK_CONTAINS(error_of(typo), expected);
        snprintf(typo, sizeof(typo), "--%.*sq%s", (int)middle, name, name + middle); // put in
        CHECK_CONTAINS(error_of(typo), expected);
        snprintf(typo, sizeof(typo), "--%.*s%c%c%s", (int)middle, name, name[middle + 1],
                 name[middle], name + middle + 2); // swapped
        CHECK(strcmp(typo + 2, name) == 0 || strstr(error_of(typo), expected) != NULL);
    }
    CHECK(strstr(error_of("--zzzzzzzzz 1"), "mean") == NULL);
}

// A name of another trainer leads to our option. That option exists, and none has the foreign name.
TEST(names_of_other_trainers_are_pointed_at) {
    char argument[80], expected[200], ours[80];
    for (const ForeignName *f = foreign_names; f->ours != NULL; f++) {
        char names[200], *state = names;
        snprintf(names, sizeof(names), "%s", f->names);
        snprintf(ours, sizeof(ours), "%.*s", (int)strcspn(f->ours, " "), f->ours);
        for (const char *name; (name = strsep(&state, " ")) != NULL;) {
            // a name must not be in two rows, as only one of them is suggested
            snprintf(argument, sizeof(argument), "%s%s", *name == '-' ? "" : "--", name);
            snprintf(expected, sizeof(expected), "%s; did you mean --%s?",
                     *name == '-' ? "options start with --" : argument, f->ours);
            CHECK_CONTAINS(error_of(argument), expected);
            EACH_OPTION (row) { CHECK(strcmp(name, row->name) != 0); }
            CHECK(option_row(ours) != NULL);
        }
    }
}

TEST(config_errors_name_file_and_line) {
    static const Says rows[] = {
        {"num-layers 5\nnum-layer 6\n", "c, line 2: unknown option --num-layer; did you mean"},
        {"\n\nlr fast\n", "c, line 3: --lr fast: must be a number from -1 to 100"},
        {"lr\n", "c, line 1: --lr (nothing): must be"},
        {"arch\n", "c, line 1: --arch (nothing): must be one of gpt2|llama"},
        {"= 3\n", "c, line 1: unknown option -- ("},
        {"config missing\n", "c, line 1: --config missing: No such file"},
        {"\nconfig c\n", "c, line 2: --config c: 16 files lead to it"},
        {"config e.txt\n", "e.txt, line 2: unknown option --e"},
        {"num-layers 5 6\n", "c, line 1: --num-layers 5 6: must be"},
        {"\ndata \"a\n", "c, line 2: a value without its closing quotation mark"},
        {"data \"a\\\"\n", "c, line 1: a value without its closing quotation mark"},
        {"data \"a\" b\n", "c, line 1: after the closing quotation mark: b"},
        {"save 'a b' # c\n", "c, line 1: 'a b': single quotes are part of a value; write double"},
        {"num-layers 0\n", "c, line 1: --num-layers 0: must be"},
        {"fp8-param-gathe true\n", "c, line 1: unknown option --fp8-param-gathe"},
    };
    text_write("e.txt", "\ne 1\n");
    EACH (row, rows) {
        text_write("c", row->given);
        size_t expected = strlen(row->expected);
        CHECK_TEXT(text_of("%.*s", (int)expected, error_of("--config c --num-layers 3")),
                   row->expected);
    }
    blob_write("c", "lr 1\nseed 4\0 5\n", 15);
    CHECK_CONTAINS(error_of("--config c"), "c, line 2: ");
}

TEST(presets_parse_and_derive) {
    for (int i = 0; i < preset_table_count; i++) {
        Options o = options_of(text_of("--model %s", preset_table[i].name));
        CHECK(o.num_query_groups > 0 && o.ffn_hidden_size > 0 && o.max_position_embeddings > 0);
        for (int j = 0; j < option_table_count; j++) { CHECK(o.source[j] <= SOURCE_COMMAND); }
        CHECK(preset_table[i].help[0] != '\0');
    }
}

#define SHAPE(heads, groups, ffn, positions)                                              \
    "num-attention-heads " #heads ", num-query-groups " #groups ", ffn-hidden-size " #ffn \
    ", max-position-embeddings " #positions
#define RATES(embedding, vector) \
    "embedding-lr-mult " #embedding ", vector-lr-mult " #vector ", head-lr-mult 1"
#define START(std, warmup) "init-method-std " #std ", lr-warmup-iters " #warmup

TEST(commands_have_their_values) {
    static const char config[] = "num-layers 5\nhidden-size 96\nseq-length 32\nmodel llama-tiny\n";
    static const struct {
        const char *command, *expected, *config; // config: the file c
    } rows[] = {
        // both spellings, and several of one option
        {"--lr 0.25 --num-layers=7 --train-iters 9 --arch=llama --data a",
         "lr 0.25, num-layers 7, train-iters 9, arch llama, data a", ""},
        {"--lr=0.25 --num-layers 7 --train-iters=9 --arch llama --data=a=b",
         "lr 0.25, num-layers 7, train-iters 9, arch llama, data a=b", ""},
        {"--bf16 --no-shuffle", "bf16 true, shuffle false", ""},
        {"--bf16 --no-bf16 --shuffle=off", "bf16 false, shuffle false", ""},
        {"--bf16=1 --shuffle=yes", "bf16 true, shuffle true", ""},
        {"--num-layers 3 --num-layers 4 --fp8-margin -3", "num-layers 4, fp8-margin -3", ""},
        {"--train-iters 9007199254740991", "train-iters 9007199254740991", ""},
        {"--num_layers 3 --no_shuffle", "num-layers 3, shuffle false", ""},
        {"--data a_train_0.bin --lr 1", "data a_train_0.bin", ""},
        // the command over a file, a file over the preset, the preset over the default
        {"--config c --num-layers 3",
         "num-layers 3, hidden-size 96, num-attention-heads 4, micro-batch-size 4, model "
         "llama-tiny",
         config},
        {"--num-layers 3 --config c --model gpt2-tiny --no-shuffle", "num-layers 3, arch gpt2",
         config},
        // of several files the later one wins, option by option; a file may name another
        {"--config a --config=b --seed 7", "num-layers 6, hidden-size 96, seq-length 32, seed 7",
         ""},
        {"--config b --config a", "num-layers 5, hidden-size 96, seq-length 32, seed 3", ""},
        {"--config c", "num-layers 6, hidden-size 96, seq-length 48, seed 3, config c",
         "seed 4\nconfig a\nconfig=b\nseq-length 48\n"},
        // files say it in any way
        {"--config c",
         "num-layers 5, hidden-size 96, seq-length 32, bf16 true, shuffle false, data a#b/c d, "
         "save , lr 0.01, seed 7",
         "# a comment\n\n  num-layers 5\nhidden-size=96\n\tseq-length = 32  # T\n--bf16\nshuffle no"
         "\r\ndata a#b/c d  #x#y\nsave  = \nlr\t1e-2\nseed 7"},
        {"--config c", "shuffle false, fp8-wgrad false",
         "no-shuffle\n##\n--no-fp8-wgrad # not yet\n"},
        {"--config c", "num-layers 5, shuffle false", "num_layers 5\nno_shuffle\n"},
        {"--config c", "save  a # \"b\" \\n\n, lr 0.01, shuffle false, data #1#2",
         "data=#1#2 #3\nsave \" a # \\\"b\\\" \\\\n\\n\"  # x\nlr=\"1e-2\"\nshuffle \"no\"#"},
        // what follows from others
        {"--model gpt2-tiny --train-iters 50",
         SHAPE(4, 4, 256, 64) ", kv-channels 16, lr-decay-iters 50, lr-wsd-decay-iters 20", ""},
        {"--model qwen3-0.6b --num-attention-heads 8", "kv-channels 128", ""},
        {"--lr-decay-style cosine --train-iters 50", "lr-wsd-decay-iters 0", ""},
        {"--train-iters 9007199254740992", "lr-wsd-decay-iters 3602879701896396", ""},
        {"--lr-decay-iters 30 --lr-wsd-decay-iters 7", "lr-decay-iters 30, lr-wsd-decay-iters 7",
         ""},
        {"--arch llama --hidden-size 96", "ffn-hidden-size 256", ""}, // 8 * 96 / 3: of 128
        {"--arch llama --hidden-size 120", "ffn-hidden-size 384", ""},
        {"", RATES(4, 4) ", " START(0.02, 100), ""},
        {"--model gpt2-124m --train-iters 9", START(0.02, 0), ""},
        {"--model llama-1b --train-iters 9", START(0.02, 0), ""},
        {"--hidden-size 3072 --train-iters 9", START(0.0133, 0), ""},
        {"--hidden-size 16 --train-iters 9", START(0.06, 0), ""},
        {"", "lr 0.0006", ""},
        {"--model llama-quickstart", "lr 0.0006", ""},
        {"--model gpt2-350m", "lr 0.00045", ""},
        {"--model llama-3-8b --lr -1", "lr 0.0001125", ""},
        {"--model llama-3-8b --optimizer muon", "lr 0.0006", ""},
        {"--model llama-3-8b --load x", "lr 0.0001125", ""},
        {"--model llama-3-8b --lr 0", "lr 0", ""},
        {"--optimizer muon", RATES(2, 1), ""},
        {"--load x", RATES(1, 1), ""},
        {"--load x --optimizer muon", RATES(1, 1), ""},
        {"--embedding-lr-mult 1", RATES(1, 4), ""},
        {"--optimizer muon --vector-lr-mult 0", RATES(2, 0), ""},
        {"--load x --embedding-lr-mult 3 --vector-lr-mult -1", RATES(3, 1), ""},
        {"--model llama-tiny --train-iters 9", START(0.06, 0), ""},
        {"--model llama-quickstart --train-iters 800 --lr-decay-iters 1200", START(0.06, 120), ""},
        {"--hidden-size 256 --train-iters 10000", START(0.06, 1000), ""},
        {"--hidden-size 384 --train-iters 500000 --optimizer muon", START(0.04, 1000), ""},
        {"--model smollm2-135m --lr-decay-style constant --train-iters 55", START(0.0267, 5), ""},
        {"--model llama-3-8b --lr-warmup-iters -1 --init-method-std 0", START(0.01, 100), ""},
        {"--init-method-std 0.01 --lr-warmup-iters 0", START(0.01, 0), ""},
        {"--model llama-tiny --init-method-std 0.02 --lr-warmup-iters 5000", START(0.02, 5000), ""},
        // a preset has no derived values; what does not fit what is given is derived again
        {"--arch llama --seq-length 2048", SHAPE(12, 12, 2048, 2048), ""},
        {"--model gpt2-124m --seq-length 2048", SHAPE(12, 12, 3072, 2048), ""},
        {"--model gpt2-124m --seq-length 512", SHAPE(12, 12, 3072, 512), ""},
        {"--model llama-1b --seq-length 16384", SHAPE(16, 4, 5504, 16384), ""},
        {"--model llama-tiny --arch gpt2", SHAPE(4, 4, 192, 64), ""},
        {"--model llama-3-8b --arch gpt2", SHAPE(32, 32, 14336, 8192), ""},
        {"--model llama-quickstart --hidden-size 256", SHAPE(4, 2, 768, 128), ""},
        {"--model llama-quickstart --hidden-size 288", SHAPE(6, 2, 768, 128), ""}, // 6 divide
        {"--model llama-tiny --num-attention-heads 8", SHAPE(8, 2, 192, 64), ""},
        {"--model llama-tiny --num-attention-heads 1", SHAPE(1, 1, 192, 64), ""},
        {"--model qwen3-0.6b --hidden-size 512", SHAPE(16, 8, 3072, 2048), ""},
        {"--model qwen3-0.6b --arch gpt2", SHAPE(16, 16, 3072, 2048), ""},
        {"--model qwen2.5-0.5b --arch gpt2 --seq-length 512", SHAPE(14, 14, 4864, 512), ""},
        {"--model smollm2-135m --hidden-size 512", SHAPE(8, 8, 1408, 2048), ""},
        {"--hidden-size 1024", SHAPE(16, 16, 4096, 1024), ""},
        {"--hidden-size 1024 --kv-channels 128", SHAPE(8, 8, 4096, 1024), ""},
        {"--hidden-size 100", SHAPE(2, 2, 400, 1024), ""}, // of 50: the largest even divisor to 64
        {"--hidden-size 97", SHAPE(97, 97, 388, 1024), ""},
        {"--hidden-size 256 --max-position-embeddings 4096", SHAPE(4, 4, 1024, 4096), ""},
    };
    text_write("a", "num-layers 5\nhidden-size 96\nseed 3\n");
    text_write("b", "num-layers 6\nseq-length 32\n");
    EACH (row, rows) {
        text_write("c", row->config);
        Options o = options_of(row->command);
        check_values(&o, row->command, row->expected);
    }
    CHECK(options_of("-h").help && options_of("--lr 1 -h").help);
}

static int64_t windows(void *count) {
    return *(int64_t *)count;
}

static int64_t epoch = 103; // windows

// The options of a run that continues another one's checkpoint, and is given more.
static Options continued(const Options *before, const char *more) {
    char value[OPTION_TEXT];
    Options o, was = {0};
    CHECK(read_given(&o, more));
    o.resumes = true;
    EACH_OPTION (row) {
        bool given = option_source(before, row->name) >= SOURCE_CHECKPOINT;
        if (option_is_inherited(row, &o)) {
            CHECK(option_set(&was, row->name, option_text(before, row, value),
                             given ? SOURCE_FILE : SOURCE_CHECKPOINT));
        }
    }
    const OptionFacts facts = {
        .checkpoint = &was, .step = 1, .tokens = 8 * 1024, .context = &epoch, .windows = windows};
    CHECK(options_resolve(&o, &facts));
    return o;
}

// What a run has derived is derived again where it is resumed with other options, also after two
// resumes; what was given to it stays.
TEST(resumed_runs_derive_again) {
    static const struct {
        const char *option, *before, *then, *derived, *given;
    } rows[] = {
        {"check-interval", "--no-deterministic", "--deterministic", "200", "7"},
        {"lr-decay-iters", "--train-iters 50", "--train-iters 90", "90", "7"},
        {"lr-wsd-decay-iters", "--train-iters 50", "--train-iters 100", "40", "7"},
        {"lr-wsd-decay-iters", "--lr-decay-style cosine", "--lr-decay-style wsd", "400", "7"},
        {"lr-wsd-decay-iters", "", "--lr-decay-style cosine", "0", "7"},
        {"lr-warmup-iters", "--train-iters 50", "--train-iters 90", "5", "7"}, // as the run began
        {"lr", "--hidden-size 2048 --optimizer muon", "--optimizer adamw", "0.000225", "3"},
        {"embedding-lr-mult", "", "--optimizer muon", "2", "3"},
        {"vector-lr-mult", "--optimizer muon", "--optimizer adamw", "4", "3"},
    };
    char value[OPTION_TEXT];
    Options plain = options_of("");
    EACH_OPTION (row) {
        bool listed = strcmp(row->group, "Model") == 0 ||            // listed from the checkpoint
                      strcmp(row->name, "global-batch-size") == 0 || // stays on other ranks
                      strcmp(option_text(&plain, row, value), row->fallback) == 0 ||
                      strtod(value, NULL) == strtod(row->fallback, NULL);
        EACH (r, rows) { listed = listed || strcmp(r->option, row->name) == 0; }
        CHECK(listed);
    }
    EACH (r, rows) {
        const OptionRow *row = option_row(r->option);
        Options first = options_of(r->before), again = continued(&first, ""),
                changed = continued(&again, r->then);
        CHECK_TEXT(option_text(&again, row, value), text_of("%s", option_text(&first, row, value)));
        CHECK(option_source(&again, r->option) < SOURCE_CHECKPOINT);
        CHECK_TEXT(option_text(&changed, row, value), r->derived);
        bool fixed = strcmp(r->option, "check-interval") == 0; // must be 0 there
        if (!fixed) { first = options_of(text_of("%s --%s %s", r->before, r->option, r->given)); }
        if (fixed) { first = options_of(text_of("--%s %s", r->option, r->given)); }
        again = continued(&first, "");
        changed = continued(&again, r->then);
        CHECK_TEXT(option_text(&changed, row, value), r->given);
    }
}

// An option on the command line turns off what it excludes in a file.
TEST(stronger_options_exclude_weaker_ones) {
    text_write("both.txt", "fp8-format hybrid\nbf16\nsample-tokens 1\n");
    Options o = options_of("--config both.txt");
    CHECK(o.fp8_format == FP8_FORMAT_HYBRID && strcmp(o.sample_tokens, "1") == 0);
    o = options_of("--config both.txt --bf16 --sample-prompt a");
    CHECK(o.fp8_format == FP8_FORMAT_NONE && o.sample_tokens[0] == '\0');
    o = options_of("--config both.txt --bf16 --fp8-format e4m3 --no-bf16 --sample-prompt=");
    CHECK(o.fp8_format == FP8_FORMAT_E4M3 && strcmp(o.sample_tokens, "1") == 0);
    text_write("checks.txt", "check-interval 5\n");
    o = options_of("--config checks.txt --no-deterministic");
    CHECK(!o.deterministic && o.check_interval == 0);
    text_write("steps.txt", "train-iters 1000\nsample-prompt a\n");
    o = options_of("--config steps.txt --epochs 2 --sample-only");
    CHECK(o.epochs == 2 && strcmp(o.sample_prompt, "a") == 0);
    text_write("epochs.txt", "epochs 2\nbf16\nsample-tokens 1\n");
    o = options_of("--config epochs.txt --train-iters 0 --sample-prompt a --sample-tokens=");
    CHECK(o.epochs == 0 && o.train_iters == 0 && strcmp(o.sample_prompt, "a") == 0);
}

// Of two files of --config, the later one's option replaces the earlier one's; so do the lines
// after a nested file.
TEST(a_later_file_turns_off_what_it_excludes) {
    text_write("1.txt", "fp8-format hybrid\ntrain-iters 5\nsample-tokens 1\n");
    text_write("2.txt", "bf16\nepochs 2\nsample-prompt a\n");
    text_write("in.txt", "config 1.txt\nbf16\nepochs 2\nsample-prompt a\n");
    text_write("before.txt", "bf16\nepochs 2\nsample-prompt a\nconfig 1.txt\n");
    static const char *const last_two[] = {"--config 1.txt --config 2.txt", "--config in.txt"};
    EACH (command, last_two) {
        Options o = options_of(text_of("%s --sample-only", *command));
        CHECK(o.bf16 && o.fp8_format == FP8_FORMAT_NONE && o.epochs == 2);
        CHECK(strcmp(o.sample_prompt, "a") == 0 && o.sample_tokens[0] == '\0');
    }
    static const char *const last_one[] = {"--config 2.txt --config 1.txt", "--config before.txt"};
    EACH (command, last_one) {
        Options o = options_of(text_of("%s --sample-only", *command));
        CHECK(o.bf16 && o.fp8_format == FP8_FORMAT_HYBRID && o.epochs == 0 && o.train_iters == 5);
        CHECK(strcmp(o.sample_tokens, "1") == 0 && o.sample_prompt[0] == '\0');
    }
    text_write("both.txt", "epochs 2\ntrain-iters 5\n");
    CHECK_CONTAINS(error_of("--config both.txt"), "--train-iters: --epochs is given too");
    char many[2000] = "";
    for (int i = 0; i < 80; i++) { strcat(many, "--config 1.txt "); } // the last are one source
    text_write("7.txt", "train-iters 7\n");
    CHECK(options_of(text_of("%s--config 7.txt", many)).train_iters == 7);
    CHECK(options_of(text_of("%s--config 7.txt --train-iters 8", many)).train_iters == 8);
}

// A process does one task; --plan plans the memory of those that need some.
TEST(two_tasks_are_refused) {
    static const char planned[] = "eval-only sample-only dump-gradients";
    EACH_OPTION (a) {
        EACH_OPTION (b) {
            Options o;
            if (a->effect != EFFECT_TASK || b->effect != EFFECT_TASK) { continue; }
            bool plans = (strcmp(a->name, "plan") == 0 && strstr(planned, b->name) != NULL) ||
                         (strcmp(b->name, "plan") == 0 && strstr(planned, a->name) != NULL);
            CHECK(read_given(&o, text_of("--valid-data v --save s --%s%s --%s%s", a->name,
                                         a->type == OPTION_STRING ? " x" : "", b->name,
                                         b->type == OPTION_STRING ? " x" : "")));
            bool ok = options_resolve(&o, NULL);
            CHECK_EQUAL(ok, a == b || plans);
            if (!ok) { CHECK_CONTAINS(error_text(), "is given too; leave one of them out"); }
        }
    }
}

// --epochs makes the number of steps; a resume, here after step 1, adds to its step those that are
// left, unless it is given steps. steps: after an epoch of 103 windows, in batches of 8.
TEST(epochs_are_steps) {
    static const struct {
        const char *first, *then;
        int64_t steps[2];
        double epochs;
    } rows[] = {
        {"--epochs 2", "", {26, 26}, 2},
        {"--epochs 2", "--global-batch-size 4", {26, 51}, 2},
        {"--epochs 2", "--epochs 0.05", {26, 1}, 0.05}, // seen already
        {"--epochs 0.5", "--epochs 3", {7, 39}, 3},
        {"--epochs 0.5", "--train-iters 30", {7, 30}, 0},
        {"--train-iters 30", "--epochs 1", {30, 13}, 1},
        {"--train-iters 30", "", {30, 30}, 0},
        {"--epochs 1e-9", "", {1, 1}, 1e-9},
    };
    char text[OPTION_TEXT];
    EACH (row, rows) {
        const OptionFacts facts = {.context = &epoch, .windows = windows};
        Options o;
        CHECK(read_given(&o, text_of("%s --global-batch-size 8 --lr-decay-style wsd", row->first)));
        CHECK(options_resolve(&o, &facts));
        for (int i = 0; i < 3; i++) {
            if (i > 0) { o = continued(&o, i == 1 ? row->then : ""); }
            CHECK_EQUAL(o.train_iters, row->steps[i > 0]);
            CHECK_EQUAL(o.lr_decay_iters, o.train_iters); // the schedule follows
            CHECK_EQUAL(o.lr_wsd_decay_iters, 2 * o.train_iters / 5);
            CHECK_EQUAL(o.lr_warmup_iters, row->steps[0] / 10); // as the run began
            bool kept = row->steps[0] / 10 != o.train_iters / 10;
            CHECK_EQUAL(option_source(&o, "lr-warmup-iters") == SOURCE_CHECKPOINT, kept);
            CHECK(option_source(&o, o.epochs > 0 ? "train-iters" : "epochs") < SOURCE_CHECKPOINT);
        }
        CHECK_TEXT(option_text(&o, option_row("epochs"), text), text_of("%g", row->epochs));
    }
    text_write("epochs.txt", "epochs 2\n"); // what the command line gives is stronger
    Options o = options_of("--config epochs.txt --train-iters 9");
    CHECK(o.epochs == 0 && o.train_iters == 9);
    static const char *const actions[] = {"sample-only", "list-tensors", "list-checkpoints"};
    EACH (action, actions) { // have no steps, and need no data
        o = options_of(text_of("--config epochs.txt --save s --%s", *action));
        CHECK(o.train_iters > 0);
    }
    OptionFacts ten = {.context = &(int64_t){10}, .windows = windows};
    for (; ten.step <= 3; ten.step += 3, ten.tokens = 3 * 1024) {
        CHECK(read_given(&o, "--epochs 0.7 --micro-batch-size 1"));
        CHECK(options_resolve(&o, &ten));
        CHECK_EQUAL(o.train_iters, 7); // 0.7 x 10 is not rounded up to 8
    }
}

TEST(steps_to_skip_are_listed) {
    Options o = options_of("--iterations-to-skip 3,5-7,9007199254740993-9007199254740994");
    for (int64_t step = 1; step < 10; step++) {
        CHECK_EQUAL(options_next_skip(&o, step) == step, step == 3 || (step >= 5 && step <= 7));
    }
    CHECK_EQUAL(options_next_skip(&o, 8), 9007199254740993);
    o = options_of("");
    CHECK_EQUAL(options_next_skip(&o, 1), INT64_MAX);
}

TEST(what_is_wrong_is_named) {
    static const Says rows[] = {
        {"--num-layers 1.5", "a whole number from 1 to 4096"},
        {"--bf16=maybe", "--bf16 maybe: must be true or false"},
        {"--arch gpt3", "one of gpt2|llama"},
        {"--arch gpt", "--arch gpt: must be"},
        {"--arch gpt2|llama", "--arch gpt2|llama: must be"},
        {"--model gpt2", "gpt2-124m, gpt2-350m"},
        {"--zzzzzzzzz 1", "unknown option --zzzzzzzzz (--help lists all)"},
        {"--no-shufle", "did you mean --no-shuffle?"},
        {"--max-iters 5", "unknown option --max-iters; did you mean --train-iters? (--help"},
        {"--max_iters=5", "unknown option --max_iters; did you mean --train-iters? (--help"},
        {"--per_device_train_batch_size 1", "mean --micro-batch-size?"},
        {"-b 4", "unexpected argument '-b': options start with --; did you mean --micro-batch-siz"},
        {"-help", "'-help': options start with --; did you mean --help?"},
        {"-Q 1", "'-Q': options start with -- (--help"},
        // the shell has expanded a pattern that was not quoted
        {"--lr 1 --data a_train_0.bin a_train_1.bin a_train_2.bin --lr 1",
         "--data a_train_0.bin a_train_1.bin: must be one word; quote the pattern"},
        {"--valid-data 0.7 a.bin 0.3 b.bin", "--valid-data 0.7 a.bin: must be"},
        {"--save d e", "unexpected argument 'e'"},
        {"--data=d/x.bin e/y.bin", "unexpected argument 'e/y.bin'"},
        {"train.bin", "unexpected argument 'train.bin'"},
        {"--", "unexpected argument '--'"},
        {"--lr", "--lr needs a value"},
        {"--save --quiet", "--save needs a value"},
        {"--lr --no-shuffle", "--lr needs a value"},
        {"--data --lr=1e-3", "--data needs a value"},
        {"--no-lr 1", "only a flag can be negated"},
        {"--no-shuffle=true", "only a flag can be negated"},
        {"--config a --config nowhere", "--config nowhere: No such file or directory"},
        {"--config .", "--config .: Is a directory"},
        {"--no-deterministic --check-interval 5", "--check-interval 5: must be 0 with --no-det"},
        {"--num-attention-heads 7", "--num-attention-heads 7: must divide --hidden-size 768"},
        {"--arch llama --num-attention-heads 7", "--hidden-size 768, or give --kv-channels"},
        {"--arch llama --num-attention-heads 7 --kv-channels 13",
         "--kv-channels 13: llama's rotary"},
        {"--kv-channels 32 --num-attention-heads 12",
         "--kv-channels 32: gpt2 has --hidden-size 768 / --num-attention-heads"},
        {"--qk-layernorm", "--qk-layernorm: gpt2 has none"},
        {"--arch llama --qk-layernorm --add-qkv-bias", "--qk-layernorm: no model of transformers"},
        {"--arch llama --num-query-groups 5", "--num-query-groups 5: must divide --num-attention"},
        {"--arch llama --num-query-groups 24", "--num-query-groups 24: must divide"},
        {"--num-query-groups 4", "--num-query-groups 4: gpt2 has as many"},
        {"--arch llama --hidden-size 12 --num-attention-heads 4", "an even head size"},
        {"--max-position-embeddings 512",
         "--seq-length 1024: must be at most --max-position-embeddi"},
        {"--model llama-tiny --arch gpt2 --num-query-groups 2", "--num-query-groups 2: gpt2 has"},
        {"--model llama-quickstart --hidden-size 256 --num-attention-heads 6",
         "must divide --hidden"},
        {"--lr -0.5", "--lr -0.5: must be -1, 0 or more"},
        {"--embedding-lr-mult -0.5", "--embedding-lr-mult -0.5: must be -1, 0 or more"},
        {"--vector-lr-mult -0.5", "--vector-lr-mult -0.5: must be -1, 0 or more"},
        {"--save=~/x",
         "--save=~/x: no shell has replaced ~ here; give the whole path, or --save ~/x in "
         "a shell"},
        {"--lr 1e-4 --min-lr 1e-3", "--min-lr 0.001: must be at most --lr 0.0001"},
        {"--first-last-layers-bf16 --num-layers 1", "at most --num-layers 1 together"},
        {"--iterations-to-skip 0", "--iterations-to-skip 0: must be steps or ranges of steps"},
        {"--iterations-to-skip 5-4", "--iterations-to-skip 5-4: must be steps"},
        {"--iterations-to-skip 3,", "--iterations-to-skip 3,: must be steps"},
        {"--iterations-to-skip 3-", "--iterations-to-skip 3-: must be steps"},
        {"--iterations-to-skip 3;4", "--iterations-to-skip 3;4: must be steps"},
        {"--iterations-to-skip =-3", "--iterations-to-skip =-3: must be steps"},
        {"--epochs 2 --train-iters 1000", "--train-iters: --epochs is given too; leave one of"},
        {"--sample-tokens 1 --sample-prompt a", "--sample-prompt: --sample-tokens is given too"},
        {"--resume latest", "--resume latest: needs --save"},
        {"--list-checkpoints", "--list-checkpoints: needs --save"},
        {"--micro-batch-size 1048576 --model llama-3-8b",
         "--micro-batch-size 1048576 x --seq-length 8192: must be fewer than 2^31 tokens"},
    };
    static const char *const right[] = {
        "--sample-prompt --- --save=--quiet",
        "--num-layers 1 --num-layers-at-start-in-bf16 4", // not used
        "--help --num-attention-heads 7",
        "--arch llama --num-attention-heads 7 --kv-channels 12",
        "--kv-channels 64 --add-qkv-bias", // gpt2 always has it
    };
    text_write("a", "");
    EACH (row, rows) { CHECK_CONTAINS(error_of(row->given), row->expected); }
    EACH (command, right) { CHECK_TEXT(error_of(*command), ""); }
    char longest[3 * PATH_LENGTH];
    memset(longest, 'x', sizeof(longest));
    memcpy(longest, "--data=", 7);
    longest[7 + PATH_LENGTH - 1] = '\0';
    CHECK_TEXT(error_of(longest), "");
    longest[7 + PATH_LENGTH - 1] = 'x';
    longest[7 + PATH_LENGTH] = '\0';
    CHECK_CONTAINS(error_of(longest), "--data: longer than 1023");
    memset(longest, '-', 2 * PATH_LENGTH);
    longest[2 * PATH_LENGTH] = '\0';
    CHECK_CONTAINS(error_of(longest), "unknown option --");
}

TEST(global_batch_is_filled_in_or_refused) {
    static const struct {
        const char *given;
        int ranks, batch; // 0: it is refused
    } rows[] = {{"", 8, 24},
                {"", 1, 3},
                {"--global-batch-size 24", 4, 24},
                {"--global-batch-size 24", 5, 0},
                {"--global-batch-size 4", 1, 0},
                {"--global-batch-size 4 --sample-only", 1, 4}};
    EACH (row, rows) {
        Options o;
        CHECK(read_given(&o, text_of("--micro-batch-size 3 %s", row->given)));
        CHECK_EQUAL(resolve_run(&o, NULL, row->ranks) ? o.global_batch_size : 0, row->batch);
        if (row->batch > 0) { continue; }
        CHECK_CONTAINS(error_text(), text_of("%s: must be a multiple of --micro-batch-size 3 x %d "
                                             "rank",
                                             row->given, row->ranks));
    }
}
