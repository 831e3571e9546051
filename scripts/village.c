#include "village.h"

#define ROWS(table) (int)(sizeof(table) / sizeof((table)[0]))

const char *const house_table[] = {"by the old mill",      "near the harbour",
                                   "on the green hill",    "at the edge of the forest",
                                   "on the market square", "beside the stone bridge"};
enum { MILL, HARBOUR, HILL, FOREST, SQUARE, BRIDGE };

#define GROWN_UP(name, gender, house, trade, works, good, price) \
    { name, gender, house, trade, works, good, price, 0, 0, 0, 0, 0, 0 }
#define YOUNG(name, gender, house, age, coat, pet, pet_name, likes, born) \
    { name, gender, house, 0, 0, 0, 0, age, coat, pet, pet_name, likes, born }

const Person person_table[] = {
    GROWN_UP("Jonas", HE, MILL, "miller", "[grind] the corn", "sack of flour", 4),
    GROWN_UP("Greta", SHE, MILL, "baker", "[bake] bread", "loaf of bread", 2),
    GROWN_UP("Oskar", HE, HARBOUR, "fisherman", "[catch] fish", "basket of fish", 5),
    GROWN_UP("Ines", SHE, HARBOUR, "weaver", "[weave] blankets", "blanket", 8),
    GROWN_UP("Ruben", HE, HILL, "farmer", "[plough] the fields", "basket of apples", 3),
    GROWN_UP("Clara", SHE, HILL, "cheesemaker", "[milk] the cows", "round of cheese", 6),
    GROWN_UP("Bruno", HE, FOREST, "woodcutter", "[cut] wood", "bundle of wood", 4),
    GROWN_UP("Hanna", SHE, FOREST, "beekeeper", "[look] after the bees", "jar of honey", 5),
    GROWN_UP("Viktor", HE, SQUARE, "tailor", "[sew] coats", "coat", 9),
    GROWN_UP("Sofia", SHE, SQUARE, "candlemaker", "[make] candles", "candle", 2),
    GROWN_UP("Simon", HE, BRIDGE, "teacher", "[teach] at the school", "book", 7),
    GROWN_UP("Marta", SHE, BRIDGE, "smith", "[shoe] the horses", "horseshoe", 3),
    YOUNG("Mila", SHE, MILL, 9, "grey", "cat", "Pepper", "drawing", "March"),
    YOUNG("Peter", HE, MILL, 7, "brown", "dog", "Rusty", "climbing trees", "August"),
    YOUNG("Tessa", SHE, HARBOUR, 11, "white", "duck", "Button", "swimming", "June"),
    YOUNG("Finn", HE, HARBOUR, 6, "green", "parrot", "Captain", "rowing the boat", "January"),
    YOUNG("Leo", HE, HILL, 8, "black", "pony", "Star", "riding", "October"),
    YOUNG("Nora", SHE, HILL, 12, "white", "lamb", "Cloud", "reading", "April"),
    YOUNG("Emil", HE, FOREST, 5, "red", "squirrel", "Hazel", "building dams", "February"),
    YOUNG("Ida", SHE, FOREST, 10, "small", "hedgehog", "Thistle", "looking at the stars", "July"),
    YOUNG("Anton", HE, SQUARE, 13, "black", "crow", "Ink", "playing the flute", "November"),
    YOUNG("Lotte", SHE, SQUARE, 7, "yellow", "canary", "Sunny", "singing", "May"),
    YOUNG("Jakob", HE, BRIDGE, 10, "old", "donkey", "Hero", "running", "December"),
    YOUNG("Elsa", SHE, BRIDGE, 6, "brown", "rabbit", "Clover", "picking flowers", "September"),
};
const int person_count = ROWS(person_table);

// clang-format off
#define LIST(name, group, ...) {name, group, 0, 0, 0, {__VA_ARGS__}}
#define SHARED(name, group, shift, share, ...) {name, group, shift, share, 0, {__VA_ARGS__}}
#define LINE(name, group, reach, ...) {name, group, 0, 0, reach, {__VA_ARGS__}}
// clang-format on

const List list_table[] = {
    LIST("day", DAYS, "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"),
    LIST("dayjob", DAYS, "[wash] the clothes", "[bake] for the week", "[go] to the market",
         "[mend] what is broken", "[clean] the house", "[dance] on the square",
         "[rest] and [visit] friends"),
    LIST("month", MONTHS, "January", "February", "March", "April", "May", "June", "July", "August",
         "September", "October", "November", "December"),
    SHARED("season", MONTHS, 1, 3, "winter", "spring", "summer", "autumn"),
    LIST("weather", MONTHS, "snow [lie] deep on the roofs", "the ice on the pond [be] thick",
         "the wind [blow] from the sea", "the rain [come] and [go]",
         "blossom [cover] the apple trees", "the sun [shine] until late",
         "the air [be] warm and still", "thunder [roll] over the hill", "the light [turn] golden",
         "fog [lie] on the river", "the storm [shake] the trees", "the first snow [fall]"),
    SHARED("seasonjob", MONTHS, 1, 3, "[sit] by the fire and [tell] stories",
           "[sow] the fields and [plant] beans", "[bring] in the hay",
           "[pick] apples and [press] the juice"),
    LIST("turn", SEASONS, "spring", "summer", "autumn", "winter"),
    LIST("turnsign", SEASONS, "the birds come back", "the days are long", "the leaves fall",
         "the river freezes"),
    LINE("size", SIZES, 2, "bee", "mouse", "hen", "goose", "goat", "pony", "cow"),
    LIST("deed", DEEDS, "[feed] the geese", "[carry] water from the well", "[sweep] the yard",
         "[gather] nuts under the trees", "[water] the garden", "[sing] in the kitchen",
         "[pick] berries in the wood", "[paint] the fence", "[fish] from the bridge",
         "[wash] the cups", "[fly] a kite on the hill", "[ride] to the market", "[read] a book",
         "[write] a letter", "[help] the neighbours"),
    LIST("animal", ANIMALS, "hen", "goose", "sheep", "cow", "goat", "duck", "mouse", "frog"),
    LIST("thing", THINGS, "apple", "egg", "nut", "pear", "plum", "berry", "potato", "shell",
         "flower"),
    LIST("food", THINGS, "apple", "egg", "nut", "pear", "plum", "berry", "potato", "carrot",
         "cherry"),
    LIST("place", PLACES, "in the barn", "behind the mill", "under the bridge", "in the garden",
         "on the hill", "by the river", "near the well", "under the old oak", "in the boat",
         "behind the school", "in the wood"),
    LIST("spot", SPOTS, "the mill", "the harbour", "the bridge", "the market", "the school",
         "the well", "the church", "the old oak"),
};
const int list_count = ROWS(list_table);

const Phrase phrase_table[] = {
    {"hello", "(Good morning|Good day|Hello)"},
    {"once", "(One morning|One day|Last week|On $day|One $season evening|One day in $month)"},
    {"glad", "(was glad|smiled|laughed|was happy)"},
    {"meal",
     "(bean soup|fish and potatoes|pancakes|bread and cheese|apple pie|porridge and honey)"},
    {"games", "(hide and seek|ball|marbles|knights and dragons)"},
    {"gift", "(wooden whistle|red scarf|new kite|blue cup|box of paints|little boat)"},
    {"early", "(early in the morning|after breakfast|before noon|in the afternoon|in the evening)"},
    {"quick", "(quickly|slowly|quietly|carefully)"},
};
const int phrase_count = ROWS(phrase_table);

const Verb verb_table[] = {
    {"come", "came"},   {"go", "went"},     {"grind", "ground"}, {"catch", "caught"},
    {"weave", "wove"},  {"cut", "cut"},     {"make", "made"},    {"teach", "taught"},
    {"blow", "blew"},   {"lie", "lay"},     {"shine", "shone"},  {"shake", "shook"},
    {"fall", "fell"},   {"sit", "sat"},     {"tell", "told"},    {"bring", "brought"},
    {"feed", "fed"},    {"sweep", "swept"}, {"sing", "sang"},    {"fly", "flew"},
    {"ride", "rode"},   {"read", "read"},   {"write", "wrote"},  {"stand", "stood"},
    {"sleep", "slept"}, {"sell", "sold"},   {"cost", "cost"}};
const int verb_count = ROWS(verb_table);

const Noun noun_table[] = {
    {"loaf", "loaves"}, {"goose", "geese"}, {"mouse", "mice"}, {"sheep", "sheep"}};
const int noun_count = ROWS(noun_table);
