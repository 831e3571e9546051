// Multiple-choice sets: what is written is read back, long contexts lose their beginning, and other
// files are refused.
#include "choice_file.h"

#include <sys/stat.h>

enum { VOCAB = 50, MOST = 9 };

// Three questions: of 2, 3 and 2 answers.
static void fill(ChoiceFile *f, int number_bytes) {
    static const int lengths[] = {1, 4, 2};
    *f = (ChoiceFile){.number_bytes = number_bytes, .mark = 0xabcdef01};
    put_question(f, 1, 3, 2, lengths, VOCAB);
    put_question(f, 0, 1, 3, lengths, VOCAB);
    put_question(f, 1, 20, 2, lengths, VOCAB);
}

TEST(what_was_written_is_read) {
    static ChoiceFile f;
    for (int number_bytes = 2; number_bytes <= 4; number_bytes += 2) {
        CLOSED(choices_close) ChoiceSet set;
        int tokens[MOST], answer;
        fill(&f, number_bytes);
        mkdir("sets", 0755);
        choice_file_write(&f, "sets/one_val.bin");
        CHECK(choices_open(&set, "sets/one_val.bin", VOCAB));
        CHECK_TEXT(set.name, "one_val");
        CHECK(set.count == 3 && set.file.tokenizer == 0xabcdef01);
        CHECK(set.questions[0].answers == 2 && set.questions[0].label == 1);
        CHECK(set.questions[1].answers == 3 && set.questions[2].context == 20);
        // the first question's numbers begin at 0: its context at 6, its second answer at 12
        CHECK_EQUAL(choices_row(&set, 0, 1, MOST, tokens, &answer), 7);
        CHECK_EQUAL(answer, 4);
        for (int i = 0; i < 3; i++) { CHECK_EQUAL(tokens[i], f.numbers[6 + i]); }
        for (int i = 0; i < 4; i++) { CHECK_EQUAL(tokens[3 + i], f.numbers[12 + i]); }
        // there is room for the last 5 tokens of the third context
        CHECK_EQUAL(choices_row(&set, 2, 1, MOST, tokens, &answer), MOST);
        int context_end = f.count - 1 - 4 - 2;
        for (int i = 0; i < 5; i++) { CHECK_EQUAL(tokens[i], f.numbers[context_end - 5 + i]); }
        CHECK_EQUAL(choices_row(&set, 0, 1, 5, tokens, &answer), 5); // one token of context
        CHECK_EQUAL(choices_row(&set, 0, 1, 4, tokens, &answer), 0); // no context is left
    }
}

static bool opens(const char *path) {
    ChoiceSet set;
    bool ok = choices_open(&set, path, VOCAB);
    if (ok) { choices_close(&set); }
    return ok;
}

TEST(hostile_sets_are_refused) {
    static ChoiceFile f;
    static const Damage rows[] = {
        {0, 20240520, "not a multiple-choice set's 20240522; scripts/prepare_choices makes them"},
        {4, 3, "version 3; this program reads 1 (uint16) and 2 (uint32)"},
        {8, 0, "the header says 0 questions"},
        {8, -1u, "the header says -1 questions"},
        {8, 1 << 30, "the header says 1073741824 questions, the file has room for "},
        {8, 2, "numbers after the last question"},
        {8, 4, "question 3 of 4 is damaged"},
        {20, 2, "text 2 in its header"},
    };
    fill(&f, 2);
    choice_file_write(&f, "t.bin");
    check_damage("t.bin", opens, rows, COUNT(rows));
    check_cuts("t.bin", opens, 0, SHARD_HEADER_BYTES, 3, "too short for a multiple-choice set");
    check_cuts("t.bin", opens, SHARD_HEADER_BYTES, SHARD_HEADER_BYTES + 2u * (uint32_t)f.count, 3,
               "t.bin");
    static const struct {
        int index;
        uint32_t value;
    } numbers[] = {
        {0, 7},                 // no start
        {1, 0},     {1, 65534}, // its bytes
        {3, 2},                 // the right answer
        {4, 0},     {4, 60000}, // how many answers
        {5, 0},     {5, 60000}, // the context's length
        {6, VOCAB},             // outside the vocabulary
        {9, 0},                 // an empty answer
    };
    for (int i = 0; i < 2 * COUNT(numbers); i++) {
        fill(&f, i % 2 == 0 ? 2 : 4);
        f.numbers[numbers[i / 2].index] = numbers[i / 2].value;
        choice_file_write(&f, "bad.bin");
        CHECK_REFUSED(opens("bad.bin"),
                      "bad.bin: question 0 of 3 is damaged or has a token outside "
                      "the vocabulary of 50 (--vocab");
    }
    CHECK_REFUSED(opens("missing.bin"), "missing.bin: No such file");
}

TEST(globs_open_all) {
    static ChoiceFile f;
    ChoiceSets sets;
    fill(&f, 4);
    choice_file_write(&f, "sets/two.bin");
    CHECK(choice_sets_open(&sets, "sets/*.bin", VOCAB));
    CHECK_EQUAL(sets.count, 2);
    CHECK_TEXT(sets.sets[1].name, "two");
    choice_sets_close(&sets);
    CHECK_REFUSED(choice_sets_open(&sets, "sets/none*", VOCAB),
                  "sets/none*: no such file; scripts/prepare_choices");
    text_write("sets/z.bin", "no set");
    CHECK_REFUSED(choice_sets_open(&sets, "sets/*.bin", VOCAB),
                  "sets/z.bin: 6 bytes, too short for a multiple-choice set");
    CHECK_EQUAL(sets.count, 0);
}
