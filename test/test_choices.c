// Multiple-choice sets: what is written is read back, long contexts lose their beginning, and other
// files are refused.
#include "choice_file.h"

#include <sys/stat.h>

enum { VOCAB = 50, MOST = 9 };

TEST(what_was_written_is_read) {
    static ChoiceFile f;
    for (int number_bytes = 2; number_bytes <= 4; number_bytes += 2) {
        CLOSED(choices_close) ChoiceSet set;
        int tokens[MOST], answer;
        choice_file_fill(&f, number_bytes);
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

TEST(globs_open_all) {
    static ChoiceFile f;
    ChoiceSets sets;
    choice_file_fill(&f, 4);
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
