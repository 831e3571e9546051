// What a user sees of options: --help, the echo, the saved configuration, the learning rates, and
// the line of a step; counts with commas.

#include "../train/run.h"
#include "../train/start.h"
#include "fixture.h"

#include <fcntl.h>
#include <unistd.h>

// Returns what a function prints of some options; the caller frees it.
static char *printed(void (*print)(const Options *, FILE *), const Options *o) {
    char *text = NULL;
    size_t size;
    FILE *file = open_memstream(&text, &size);
    print(o, file);
    fclose(file);
    return text;
}

static void print_all(const Options *o, FILE *out) {
    options_print(o, true, out);
}

static void print_own(const Options *o, FILE *out) {
    options_print(o, false, out);
}

static void print_help(const Options *o, FILE *out) {
    options_help(o, out, "./train_gpt");
}

static size_t longest_line(const char *text) {
    size_t longest = 0;
    for (const char *line = text; *line != '\0'; line += strspn(line, "\n")) {
        size_t length = strcspn(line, "\n");
        if (length > longest) { longest = length; }
        line += length;
    }
    return longest;
}

// Whether the help text has a row for an option: a line that starts with its name.
static bool lists_option(const char *help, const char *name) {
    return strstr(help, text_of("\n  --%s ", name)) != NULL ||
           strstr(help, text_of("\n  --[no-]%s ", name)) != NULL;
}

TEST(help_lists_every_option_and_preset) {
    Options o = options_of("");
    FREED char *help = printed(print_help, &o);
    EACH_OPTION (row) {
        CHECK(lists_option(help, row->name));
        CHECK_CONTAINS(help, row->group);
        CHECK_CONTAINS(help, row->choices);
    }
    for (int i = 0; i < preset_table_count; i++) { CHECK_CONTAINS(help, preset_table[i].name); }
    CHECK(longest_line(help) <= 100);
    CHECK_CONTAINS(help, "Exit status: 0 done; 1 error; 3 too many skipped steps; 4 ");
    CHECK(!lists_option(help, "num-layer")); // the checkers can fail
    CHECK_EQUAL(longest_line("12\n12345\n\n1\n"), 5);
    CHECK_EQUAL(longest_line("12\n123"), 3);
}

// The default in --help is the value without the option; or 0 or -1, if the help text says what
// that means.
TEST(help_shows_what_is_in_effect) {
    Options o = options_of("");
    char text[OPTION_TEXT], fallback[OPTION_TEXT];
    EACH_OPTION (row) {
        Options d = o;
        CHECK(option_set(&d, row->name, row->fallback, SOURCE_COMMAND));
        bool number = strcmp(row->fallback, "0") == 0 || strcmp(row->fallback, "-1") == 0;
        bool worked_out = number && strstr(row->help, text_of(" %s: ", row->fallback)) != NULL;
        if (worked_out) { continue; }
        CHECK_TEXT(option_text(&o, row, text), option_text(&d, row, fallback));
    }
}

// Options that differ from the defaults as much as possible.
static const char *const commands[] = {
    "",
    "--model llama-3-8b --fp8-format hybrid --fp8-margin -3 --no-shuffle --bf16 --data a --save s",
    "--lr 0.12345678901234567 --min-lr 1e-300 --adam-eps 1e-30 --seed 9007199254740991 --keep 0",
    "--model gpt2-tiny --train-iters 77 --lr-decay-style cosine --fp8-recipe tensorwise "
    "--norm-epsilon 3e-7 --first-last-layers-bf16 --fp8-lm-head --no-fp8-wgrad",
    TINY,
};
enum { COMMANDS = COUNT(commands) };

// The first option whose value differs; NULL: all are the same. Sources are not compared.
static const char *difference(const Options *a, const Options *b) {
    char x[OPTION_TEXT], y[OPTION_TEXT];
    EACH_OPTION (row) {
        if (strcmp(row->name, "config") == 0) { continue; }
        if (strcmp(option_text(a, row, x), option_text(b, row, y)) != 0) { return row->name; }
    }
    return NULL;
}

TEST(echo_parses_back) {
    for (int i = 0; i < 2 * COMMANDS; i++) {
        Options o = options_of(commands[i / 2]);
        FREED char *echo = printed(i % 2 == 0 ? print_all : print_own, &o);
        char command[8192] = "", *line, *state;
        CHECK(longest_line(echo) <= 100);
        for (line = strtok_r(echo, "\n", &state); line != NULL;
             line = strtok_r(NULL, "\n", &state)) {
            if (line[0] == ' ') { strcat(command, line); } // the others are headings
        }
        Options back = options_of(command);
        CHECK(difference(&o, &back) == NULL);
        back.lr = nextafter(back.lr, 1);
        CHECK_TEXT(difference(&o, &back), "lr");
    }
}

// --help shows what is in effect. The echo at the start has options that are given, even at their
// defaults, and options that are not at their defaults; the default preset, if the architecture is
// the preset's.
TEST(prints_have_what_is_in_effect) {
    static const struct {
        void (*print)(const Options *, FILE *);
        const char *command, *expected;
    } rows[] = {
        {print_help, "--help", "(C) [768]"},
        {print_help, "--help", " --max-position-embeddings N"},
        {print_help, "--help --model llama-1b", "(C) [2048]"},
        {print_help, "--model llama-1b --help", "--[no-]untie-embeddings-and-output-weights"},
        {print_help, "--model llama-1b --help --seq-length 77", "(T) [77]"},
        {print_help, "--help --model nonsense", "(C) [768]"},
        {print_all, "", "Model\n  --model gpt2-124m --arch gpt2 "},
        {print_all, "--arch llama", "Model\n  --arch llama --num-layers 12 "},
        {print_all, "--model gpt2-124m --arch llama", "Model\n  --model gpt2-124m --arch llama "},
        {print_own, "",
         "Model\n  --model gpt2-124m --num-attention-heads 12 --num-query-groups 12 "
         "--kv-channels 64\n  --ffn-hidden-size 3072 --max-position-embeddings 1024 "
         "--init-method-std 0.02\nTraining\n  --global-batch-size 4\n"
         "Optimizer and learning rate\n  --lr 0.0006 --embedding-lr-mult 4 --vector-lr-mult 4 "
         "--lr-warmup-iters 100 --lr-decay-iters 1000\n  --lr-wsd-decay-iters 400\n"
         "The other options have their defaults (--plan prints all)\n"},
        {print_own, "--lr 6e-4 --no-shuffle", "\nData\n  --no-shuffle\n"},
        {print_own, "--lr 6e-4 --no-shuffle", "\n  --lr 0.0006 "},
        {print_own, "--model llama-tiny",
         "Model\n  --model llama-tiny --arch llama --num-layers 2 "},
    };
    EACH (row, rows) {
        Options o = options_of(row->command);
        FREED char *text = printed(row->print, &o);
        CHECK_CONTAINS(text, row->expected);
        CHECK(strstr(text, "[no-]help") == NULL);
    }
}

TEST(config_file_round_trips) {
    static const char *const values[] = {"a folder/with#signs = and\ttabs/*.bin",
                                         "a #1/x.bin",
                                         "#1",
                                         "=",
                                         " a",
                                         "a ",
                                         "\t",
                                         "\"a\"",
                                         "a \"b\" c",
                                         "a\\n \\",
                                         " \\\" # \\",
                                         "two\nlines # \n",
                                         "--lr"};
    for (int i = 0; i < COMMANDS; i++) {
        for (int j = 0; j < COUNT(values); j++) {
            Options o = options_of(commands[i]);
            CHECK(option_set(&o, "data", values[j], SOURCE_COMMAND));
            write_config(&o);
            Options back = options_of("--config config.txt");
            CHECK(difference(&o, &back) == NULL);
            CHECK_TEXT(back.data, values[j]);
        }
    }
}

// Options that are given besides --config with a run's config.txt have the same effect as if the
// run itself had got them: derived values are derived again.
TEST(config_file_holds_what_was_given) {
    static const char *const runs[] = {
        "--model llama-tiny --train-iters 120 --micro-batch-size 2",
        "--model gpt2-tiny --lr-decay-style cosine --global-batch-size 8",
        "--arch llama --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64",
    };
    static const char *const more[] = {
        "",
        "--train-iters 2000",
        "--micro-batch-size 8",
        "--hidden-size 128",
        "--num-attention-heads 8 --num-query-groups 8",
        "--seq-length 32",
        "--model gpt2-350m --arch gpt2",
    };
    for (int i = 0; i < 3; i++) {
        for (int j = 0; j < 7; j++) {
            char command[400];
            snprintf(command, sizeof(command), "%s %s", runs[i], more[j]);
            Options o, expected = options_of(command);
            CHECK(read_given(&o, runs[i]) && resolve_run(&o, NULL, 2));
            write_config(&o);
            snprintf(command, sizeof(command), "--config config.txt %s", more[j]);
            Options back = options_of(command);
            CHECK(difference(&expected, &back) == NULL);
        }
    }
    Options o = options_of("--config config.txt --train-iters 9"); // also the ones from a file
    write_config(&o);
    CHECK_CONTAINS(text_read("config.txt"), "\nhidden-size 64\n");
    CHECK_CONTAINS(text_read("config.txt"), "\ntrain-iters 9\n");
    CHECK(strstr(text_read("config.txt"), "\nlr-") == NULL);
    CHECK(strstr(text_read("config.txt"), "\nconfig ") == NULL);
}

// Options that are actions are not saved with a run.
TEST(actions_are_not_saved) {
    Options o;
    CHECK(read_given(&o, "--plan --sample-only --eval-only --valid-data v --list-tensors --help "
                         "--version --dump-gradients x --config y --export z --export-fp8"));
    FREED char *config = printed(options_write_config, &o), *echo = printed(print_all, &o);
    static const char *const actions[] = {
        "plan ",   "sample-only ", "help ",         "version ", "dump-grad",
        "config ", "eval-only ",   "list-tensors ", "export ",  "export-fp8 "};
    for (int i = 0; i < COUNT(actions); i++) {
        CHECK(strstr(config, text_of("\n%s", actions[i])) == NULL);
        CHECK(strstr(echo, text_of("--%s", actions[i])) == NULL);
    }
}

static void check_rate(const char *command, int64_t step, double expected) {
    Options o = options_of(command);
    CHECK_CLOSE(learning_rate(&o, step), expected, 1e-15);
}

TEST(schedules_at_their_corners) {
#define BASE "--lr 0.8 --min-lr 0.2 --lr-warmup-iters 4 --train-iters 24 --lr-decay-style "
    static const char *const styles[] = {BASE "cosine", BASE "linear", BASE "constant",
                                         BASE "wsd --lr-wsd-decay-iters 10"};
    for (int style = 0; style < 4; style++) {
        check_rate(styles[style], 0, 0.2); // lr / warmup: the first step already learns
        check_rate(styles[style], 3, 0.8);
        check_rate(styles[style], 4, 0.8);
        check_rate(styles[style], 24, style == DECAY_CONSTANT ? 0.8 : 0.2);
        check_rate(styles[style], 1000000, style == DECAY_CONSTANT ? 0.8 : 0.2);
    }
    check_rate(BASE "cosine", 14, 0.5);
    check_rate(BASE "cosine", 9, 0.2 + 0.3 * (1 + sqrt(0.5)));
    check_rate(BASE "linear", 14, 0.5);
    check_rate(BASE "linear", 9, 0.65);
    check_rate(BASE "constant", 14, 0.8);
    check_rate(BASE "wsd --lr-wsd-decay-iters 10", 14, 0.8);
    check_rate(BASE "wsd --lr-wsd-decay-iters 10", 19, 0.5);
    check_rate(BASE "wsd", 15, 0.8); // two fifths of 24, whole steps
    check_rate(BASE "wsd", 18, 0.6);
    check_rate(BASE "wsd --lr-warmup-iters 20", 20, 0.8); // what the warm-up leaves
    check_rate(BASE "wsd --lr-warmup-iters 20", 22, 0.5);
    check_rate(BASE "wsd --lr-warmup-iters 40", 23, 0.48); // it goes before
    check_rate(BASE "linear --lr-decay-iters 14", 9, 0.5);
    check_rate(BASE "linear --lr-decay-iters 14", 14, 0.2);
    check_rate(BASE "linear --lr-decay-iters 3", 3, 0.8); // warm-up outlasts the decay
    check_rate(BASE "linear --lr-decay-iters 3", 4, 0.2);
    check_rate("--lr 0.8 --train-iters 10 --lr-decay-style linear", 0, 0.8);
    for (int steps = 1; steps <= 4; steps++) { // wsd is the default; so few have no decay
        check_rate(text_of("--lr 0.8 --train-iters %d", steps), steps - 1, 0.8);
        check_rate(text_of("--lr 0.8 --train-iters %d", steps), steps, 0.0);
    }
    check_rate("--lr 0.8 --train-iters 5", 4, 0.4);
    check_rate("--lr 0.8 --train-iters 0 --lr-decay-style cosine", 0, 0.0);
    check_rate("--lr 0.8 --train-iters 0", 0, 0.0);
#undef BASE
}

// The line of a step that run_report prints.
static const char *step_line(Run *run, StepResult step) {
    fflush(stdout);
    int saved = dup(STDOUT_FILENO), out = open("said", O_CREAT | O_WRONLY | O_TRUNC, 0600);
    dup2(out, STDOUT_FILENO);
    run_report(run, step);
    dup2(saved, STDOUT_FILENO);
    close(saved);
    close(out);
    return text_read("said");
}

// The line has at most 100 columns for any numbers; if it would need more, less important fields
// are left out.
TEST(step_lines_fit_100_columns) {
    static const struct {
        int64_t step, steps;
        double loss, seconds, peak;
        const char *line;
    } rows[] = {
        {250, 19560, 3.25, 0.5, 989e12,
         "step   250/19560 | loss 3.2500 | norm 0.2913 | lr 6.00e-04 | 1048576 tok/s | MFU 84.6% | "
         "ETA 2h40m\n"},
        {250, 19560, 3.25, 0.5, 0,
         "step   250/19560 | loss 3.2500 | norm 0.2913 | lr 6.00e-04 | 1048576 tok/s | 500.00 ms | "
         "ETA 2h40m\n"},
        {1000000, 9000000, 4.15e14, 0.5, 989e12,
         "step 1000000/9000000 | loss 4.15e+14 | norm 0.2913 | lr 6.00e-04 | 1048576 tok/s | ETA "
         "46d07h\n"},
        {1000000, 9000000, NAN, 0.5, 989e12,
         "step 1000000/9000000 | loss nan | norm 0.2913 | lr 6.00e-04 | 1048576 tok/s | ETA 46d07h "
         "| SKIPPED\n"},
        {1000000, 100000000000000000, NAN, 0.5, 989e12,
         "step 1000000/100000000000000000 | loss nan | norm 0.2913 | 1048576 tok/s | ETA ? | "
         "SKIPPED\n"},
        {9, 9, 4.15e14, 1e7, 1e12,
         "step     9/9 | loss 4.15e+14 | norm 0.2913 | lr 6.00e-04 | 0 tok/s | MFU 0.0% | ETA "
         "0s\n"},
    };
    EACH (row, rows) {
        Run run = {.options = options_of("--micro-batch-size 512"), .group = {.ranks = 1}};
        run_configure(&run, (NumberSupport){NUMBER_FP32, NULL, 0});
        console_open(&run);
        run.progress.step = row->step - 1;
        run.options.log_interval = 1;
        run.options.train_iters = row->steps;
        run.peak_flops = row->peak;
        Dataset data = {.windows = 1, .seq_length = run.config.seq_length}; // no masks
        run.train.data = &data;
        StepResult step = {.loss = row->loss,
                           .norm = 0.2913,
                           .lr = 6e-4,
                           .seconds = row->seconds,
                           .skipped = isnan(row->loss)};
        const char *line = step_line(&run, step);
        CHECK_CONTAINS(line, " | start "); // the first of a process
        CHECK(strstr(line, "ETA") == NULL && longest_line(line) <= 100);
        run.progress.step = row->step - 1;
        line = step_line(&run, step);
        CHECK_TEXT(line, row->line);
        CHECK(longest_line(line) <= 100);
        run_free_configuration(&run);
    }
}

TEST(counts_have_commas) {
    static const struct {
        int64_t count;
        const char *text;
    } rows[] = {{0, "0"},
                {999, "999"},
                {1000, "1,000"},
                {-1000, "-1,000"},
                {-999, "-999"},
                {124439808, "124,439,808"},
                {INT64_MIN, "-9,223,372,036,854,775,808"}};
    char text[32];
    EACH (row, rows) { CHECK_TEXT(format_count(text, row->count), row->text); }
}
