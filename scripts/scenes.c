#include "village.h"

// A blank line goes between scenes, so a template may hold lines of dialogue or a letter, but no
// empty line.
#define CAST(...) \
    { __VA_ARGS__ }
#define SCENE(weight, tense, cast, text) \
    { cast, tense, weight, text }

const Scene scene_table[] = {
    // ---- who is who ----
    SCENE(4, PRESENT, CAST(CHILD, SIBLING, PARENT),
          "$A is {A} years old and lives $A.home (with $A.his $B.kin $B|together with $B, $A.his "
          "$B.kin). $A.his $C.kin $C is the $C.trade and $C.works $early. $A has {an $A.coat "
          "$A.pet} called $A.called. What $A.he likes best is $A.likes(, and what $A.he likes "
          "least is getting up early| with $A.his friends|)."),
    SCENE(3, PRESENT, CAST(ADULT),
          "$A [be] the $A.trade of the village. $A.he [live] $A.home, and $early $A.he $A.works. "
          "(On market days|On Wednesdays|When people come) $A.he [sell] {s $A.good}. {1 $A.good} "
          "[cost] {P coin}, {2} [cost] {2*P coin} and {3} [cost] {3*P coin}."),
    SCENE(2, PRESENT, CAST(CHILD, SIBLING, PARENT, PARENT),
          "$A and $B are $B.pair. Their $C.kin is $C, the $C.trade, and their $D.kin is $D, the "
          "$D.trade. The four of them live $A.home. While $C $C.works and $D $D.works, $both "
          "[play] $games $place."),
    SCENE(2, PRESENT, CAST(CHILD),
          "$A.called is {an $A.coat $A.pet} and belongs to $A, who lives $A.home. In the morning "
          "$A.called (is hungry|is noisy|waits at the door), and at night it sleeps $place. When "
          "$A [go] to $spot, $A.called (comes too|goes with $A.him|follows $A.him $quick)."),
    SCENE(2, PAST, CAST(CHILD, FRIEND, FRIEND),
          "`Who lives $B.home?` asked $A.\n`$B does,` said $C, `with $B.his family and {an $B.coat "
          "$B.pet} called $B.called.`\n`And how old is $B?` asked $A.\n`$B is {B},` said $C, `and "
          "I am {C}.`"),
    SCENE(2, PRESENT, CAST(ELDER, SIBLING, FRIEND),
          "$A is {A} years old and $A.his $B.kin $B is {B}. {A} minus {B} is {A-B}, so $A is {A-B "
          "year} older than $B. (Next year|In a year) $A will be {A+1} and $B will be {B+1}(, and "
          "$A will still be {A-B year} older|). Their friend $C is {C}(, and lives $C.home|)."),
    SCENE(2, PAST, CAST(ADULT, CHILD, FRIEND),
          "`I am thinking of somebody,` said $B. `(He or she|This person) lives $A.home and "
          "$present $A.works.`\n`Is it the $A.trade?` asked $C.\n`Yes,` said $B, `it is $A.` $past "
          "Then it was $C's turn."),
    SCENE(2, PAST, CAST(CHILD, SELLER, FRIEND),
          "`What does $B sell?` asked $A.\n`$B is the $B.trade and sells {s $B.good},` said "
          "$C.\n`And what does {1 $B.good} cost?`\n`{Q coin},` said $C. `If you buy {x}, you pay "
          "{x*Q}.`"),
    SCENE(3, PAST, CAST(CHILD, PARENT),
          "$A wanted to learn how to $plain $B.works. $past $A.his $B.kin $B, the $B.trade, (was "
          "glad |laughed )and showed $A.him $quick, step by step. By $day $A could help, and on "
          "$day2 $A.he could do it alone. `(Well done|Look at you|Very good),` said $B. `Now there "
          "are two of us.`"),

    // ---- buying and selling ----
    SCENE(4, PAST, CAST(CHILD, SELLER, PARENT),
          "$once $C sent $A to the $B.trade. $A walked to the house $B.home and knocked at the "
          "door.\n`$hello, $A,` said $B. `What (would you like|do you need|can I do for "
          "you)?`\n`{x $B.good}, please,` said $A. `How much is that?`\n`One costs {Q coin}, so "
          "{x} cost {x*Q coin},` said $B.\n$A paid {x*Q coin}, (thanked $B|said thank you) and "
          "took the {s $B.good} home to $A.his $C.kin."),
    SCENE(3, PAST, CAST(CHILD, SELLER),
          "$A had {x*Q+y coin} in $A.his pocket. From $B, the $B.trade, $A.he bought {x $B.good} "
          "and paid {x*Q coin}. {x*Q+y} minus {x*Q} is {y}, so {y} were left. (`Come again,` said "
          "$B.|$A counted them (twice|$quick) and went home.)"),
    SCENE(3, PAST, CAST(CHILD, SELLER, SELLER),
          "It was market day. $A bought {1 $B.good} from $B for {Q coin} and {1 $C.good} from $C "
          "for {R coin}. {Q} plus {R} is {Q+R}, so $A paid {Q+R coin} in all. (Then $A.he went "
          "home $A.home.|On the way home $A.he met {x $animal}.|At home $A.he ate $meal.)"),
    SCENE(2, PAST, CAST(ADULT, SELLER),
          "Dear $B,\nyou asked for {x $A.good}. {1 $A.good} costs {P coin}, so {x} cost {x*P}. I "
          "can bring them to the house $B.home on $day, or on $day2 (if it rains|if the road is "
          "bad|if that is better). In $month $present $weather, and $past I have much to "
          "do.\nYours,\n$A, the $A.trade"),
    SCENE(2, PAST, CAST(ADULT, SELLER),
          "On $day $A, the $A.trade, sold {x $A.good}, and on $day2 {y}. That made {x+y} in two "
          "days. $B, the $B.trade, sold {z $B.good} on $day and {x} on $day2, and that made {z+x}. "
          "On $day3 $both [rest]."),

    // ---- sums and counting ----
    SCENE(3, PAST, CAST(CHILD, FRIEND),
          "`What is {x} plus {y}?` asked Simon(, the teacher|).\n`{x+y},` said $A.\n`Right,` said "
          "Simon. `And {x+y} minus {y}?`\n`{x},` said $B, who (sat at the window|had counted on "
          "$B.his fingers|always knew).\nThen they wrote it on the board: {x#} + {y#} = {x+y#} and "
          "{x+y#} - {y#} = {x#}."),
    SCENE(2, PAST, CAST(CHILD, FRIEND),
          "(On the board|On the slate|In the book) Simon(, the teacher,|) wrote four sums: {x#} + "
          "{y#} = {x+y#}, {u#} + {v#} = {u+v#}, {u+v#} - {v#} = {u#} and {x#} x {y#} = {x*y#}. $A "
          "read them aloud and $B (wrote them down|checked them|nodded). All of them were right."),
    SCENE(2, PRESENT, CAST(CHILD, FRIEND),
          "{x} and {y} make {x+y}. {y} and {x} make {x+y} too. `It is always so,` says $A, `with "
          "{s $thing} and with {s $animal}.` `(Then|So) {x $thing} and {y $thing} make {x+y "
          "$thing},` says $B, and that is true."),
    SCENE(3, PAST, CAST(CHILD, FRIEND),
          "$A stood $place and counted the {s $animal}: $count. There were {x} of them. Then {z "
          "$animal} came through the gate. {x} plus {z} is {x+z}, so now there were {x+z $animal}. "
          "$B counted them too, to be sure."),
    SCENE(
        3, PAST, CAST(CHILD, FRIEND),
        "$A found {x+y $thing} $place. $B had none, so $A gave $B.him {x}. {x+y} minus {x} is {y}, "
        "and so $A kept {y $thing}. The next day $B found {z+1 $thing2} and shared them with $A."),
    SCENE(2, PAST, CAST(CHILD, FRIEND, FRIEND),
          "$all found {3*x $thing} $place. They wanted to share them, so that each of them had the "
          "same. `Three times {x} is {3*x},` said $A, `so each of us gets {x}.` And so it was: {x} "
          "for $A, {x} for $B and {x} for $C."),
    SCENE(2, PAST, CAST(CHILD, SIBLING),
          "In $month $both picked {s $thing}. $A filled {x basket} and $B filled {y}. Together "
          "they had {x+y basket}, for {x} plus {y} is {x+y}. They gave {z} to a neighbour and had "
          "{x+y-z} left."),
    SCENE(2, PAST, CAST(CHILD),
          "The bell of the church rang {x} times. `It is {x} o'clock,` said $A. `In {z hour} it "
          "will be {x+z} o'clock, because {x} and {z} make {x+z}.` Then $A.he went to $spot (and "
          "waited|to see $A.called, $A.his $A.pet|to play)."),
    SCENE(2, PAST, CAST(CHILD, FRIEND),
          "$A walked from $spot to $spot2 and counted {u} steps. From $spot2 to $spot3 $A.he "
          "counted {v} steps. `{u} plus {v} is {u+v},` said $B, `so you took {u+v} steps from "
          "$spot to $spot3.`"),

    // ---- days, months and seasons ----
    SCENE(3, PRESENT, CAST(CHILD, FRIEND),
          "Yesterday was $day, today is $day2 and tomorrow will be $day3. Yesterday $past $both "
          "$dayjob, $present today $they $dayjob2 and tomorrow $future $they $dayjob3. `And what "
          "$present comes after $day3?` asks $A. `$day4,` says $B."),
    SCENE(2, PRESENT, CAST(CHILD, FRIEND),
          "In the village every day has its work. On $day $people $dayjob, on $day2 $they $dayjob2 "
          "and on $day3 $they $dayjob3. `(What about|And) $day4?` asks $A. `On $day4 $they "
          "$dayjob4,` says $B(, who knows the week by heart|)."),
    SCENE(3, PRESENT, CAST(CHILD),
          "It is $month. In $month $weather, and (all the|the old and the young) $people "
          "$seasonjob. After $month comes $month2, when $weather2. `(I like|Nothing is as good as) "
          "$season,` says $A, and (goes|walks|runs) to $spot."),
    SCENE(2, PRESENT, CAST(CHILD, FRIEND),
          "After $turn comes $turn2, after $turn2 comes $turn3 and after $turn3 comes $turn4. In "
          "$turn $turnsign, and in $turn2 $turnsign2. `I like $turn2,` says $A. `And I like "
          "$turn4,` says $B, `when $turnsign4.`"),
    SCENE(4, PAST, CAST(CHILD),
          "Yesterday $A $deed. $present Today $A.he $deed again, and tomorrow $future $A.he $deed "
          "once more. $past Yesterday $A.he (was alone|was slow|was tired), but today $A.he is "
          "(quick|happy|not alone), for $A.called the $A.pet is there too."),
    SCENE(2, PAST, CAST(CHILD, FRIEND, FRIEND),
          "$A was born in $A.born. On $A.his birthday $A.he was {A} years old. `Last year I was "
          "{A-1},` said $A, `and next year I shall be {A+1}.` $B brought {an $gift} and $C brought "
          "{an $gift}, and they all ate $meal (together|until it was dark|in the garden)."),

    // ---- letters ----
    SCENE(4, PRESENT, CAST(CHILD, FRIEND, PARENT),
          "Dear $B,\nhow are you? Here $A.home $weather. On $day $past I helped my $C.kin, who "
          "$present $C.works, and on $day2 $past I $deed. $A.called, my $A.pet, (is well|sleeps "
          "all day|says hello). Will you come to see me on $day4? We could play $games. (Please "
          "bring {x $thing}.|I have {x $thing} for you.)\nYour friend,\n$A"),
    SCENE(3, PRESENT, CAST(CHILD, FRIEND),
          "Dear $A,\nthank you for the {x+z $thing}. I gave {z} to my family and kept {x}. (Yes, I "
          "will come on $day|On $day I cannot come, but on $day2 I can), and I will bring "
          "$B.called. In $month $weather, so we can play $place.\nYour friend,\n$B"),

    // ---- stories ----
    SCENE(4, PAST, CAST(CHILD, FRIEND),
          "$once $A could not find $A.called, $A.his $A.pet. $A.he looked $place, but there was "
          "only {an $animal}. $A.he looked $place2, but there were only {x $animal2}. At last "
          "$A.he met $B.\n`Have you seen $A.called?` asked $A.\n`Yes,` said $B, `it is asleep "
          "$place3.`\nAnd so it was. $A $glad and took $A.called home."),
    SCENE(2, PAST, CAST(CHILD, FRIEND, FRIEND),
          "$all ran a race from $spot to $spot2. $A was first, $B was second and $C was third. So "
          "$A was faster than $B, and $B was faster than $C. (`Next time I shall win,` said "
          "$C.|`You are as fast as $A.called,` said $B.)"),
    SCENE(2, PRESENT, CAST(CHILD, FRIEND),
          "`Which is bigger, {an $size} or {an $size2}?` asks $A.\n`{an $size2} is bigger than {an "
          "$size},` says $B, `and {an $size3} is bigger than {an $size2}.`\n`(Then|So) {an $size3} "
          "is bigger than {an $size} too,` says $A."),
    SCENE(3, PAST, CAST(CHILD, SIBLING, PARENT, PARENT),
          "In the evening the family sat at the table in the house $A.home. $C had made $meal, and "
          "$D had brought {x+z $food}. $A ate {z} and $B ate one. $C asked what they had done. `$I "
          "$deed,` said $A. `And $I $deed2,` said $B."),
    SCENE(3, PAST, CAST(CHILD, SIBLING, PARENT),
          "The sun went down and the stars came out. $A looked out of the window and counted them: "
          "$count. `Where is $B?` asked $A.his $C.kin $C. `In bed,` said $A, `and $A.called sleeps "
          "$place.` `Then it is time for you too,` said $C. `Good night, $A.`"),
    SCENE(3, PAST, CAST(CHILD, FRIEND),
          "`What will you do tomorrow?` asked $A.\n`Tomorrow $future $I $deed,` said $B. `And "
          "you?`\n`$I $deed2, and then $I [play] with $A.called.`\n$past The next day $B $deed, as "
          "$B.he had said, and $A $deed2."),
    SCENE(
        3, PAST, CAST(CHILD, FRIEND),
        "`Where do you live?` asked $A.\n`I live $B.home,` said $B. `And you?`\n`I live $A.home,` "
        "said $A. `I have {an $A.pet}. It is called $A.called.`\n`I have {an $B.pet}, and it is "
        "called $B.called,` said $B. `What do you like best?`\n`$A.likes,` said $A. `And "
        "you?`\n`$B.likes,` said $B, `(and playing $games|but not when it rains|and $meal).`"),
    SCENE(2, PRESENT, CAST(NOBODY),
          "{z $animal} [sleep] $place, and {x $animal2} [sleep] $place2. {1 $animal3} [stand] "
          "$place3. (Nobody|No dog|No child) wakes them. (When it is dark|In the evening), {z "
          "$animal} [walk] home, {x $animal2} [follow], and {1 $animal3} [come] last."),
    SCENE(3, PAST, CAST(CHILD, SELLER),
          "(One night|One night in $month|Last $season) there was a storm. It took the roof of the "
          "house $B.home, where $B, the $B.trade, lived. On $day all the neighbours came. They "
          "brought wood and {s nail}, and $A and {x} others worked until (noon|the evening|it was "
          "dark). When the roof was whole again, $B gave everyone {1 $B.good}, and they "
          "(sang|danced|ate $meal)."),
    SCENE(3, PAST, CAST(CHILD, FRIEND, PARENT),
          "$A was ill and had to stay in bed. On $day $B came with {an $gift}, and on $day2 with "
          "{x $thing}. $A.his $C.kin $C made $meal, and $A.called sat at the end of the bed. On "
          "$day3 $A was well again, and $both [play] $games $place."),

    // ---- together ----
    SCENE(
        3, PAST, CAST(CHILD, FRIEND),
        "$both took the boat and rowed down the river. They saw {x duck} on the water and {y duck} "
        "on the bank. `That makes {x+y duck},` said $A. (At the harbour|Under the bridge) they ate "
        "{z+1 $food}, and then they rowed back. `(Faster|Slower|Look out)!` cried $B and laughed."),
    SCENE(3, PAST, CAST(CHILD, PARENT, SIBLING),
          "$A and $A.his $B.kin $B made pancakes. `First we take {z+1 egg} and a little flour,` "
          "said $B. `Then we add milk, and at last we put in {an $food}.` They made {x+y} of them. "
          "$C came in and ate {x}, and so {y} were left. `(Who was that?|That went quickly!|Next "
          "time I will hide them!)` said $B and laughed."),
    SCENE(3, PAST, CAST(CHILD, FRIEND, SELLER),
          "$both were angry with each other, because both of them wanted the same $gift. For {z+1} "
          "days they did not speak. Then $A saw $B $place, all alone, and asked: `Shall we play "
          "$games?` `Yes,` said $B at once. $C, the $C.trade, saw them run by and $glad."),
    SCENE(
        2, PAST, CAST(ADULT, SELLER),
        "$A, the $A.trade, needed {s $B.good}, and $B, the $B.trade, needed {s $A.good}. {Q "
        "$A.good} cost {P*Q coin}, and {P $B.good} cost {P*Q coin} too. So $A gave $B {Q $A.good} "
        "and got {P $B.good} for them(, and both were glad|, and nobody needed any coins|)."),
    SCENE(2, PAST, CAST(CHILD, FRIEND),
          "{x+1 little $animal} went out to play,\nOne of them ran far away.\n{x+1} minus one is "
          "{x}, we say:\n{x little $animal} came home that day.\n$A made this song, and $B sang it "
          "$place."),
    SCENE(2, PAST, CAST(ADULT, CHILD),
          "A stranger came to the village and asked: `Where can I find the $A.trade?`\n`You mean "
          "$A,` said $B. `Go past $spot and then past $spot2. $A.he lives $A.home.`\n`How far is "
          "it?`\n`To $spot you walk {u} steps, and from there {v} more,` said $B. `{u} plus {v} is "
          "{u+v}.`\nThe stranger thanked $B.him and went on $quick."),
    SCENE(2, PAST, CAST(CHILD, FRIEND),
          "$A wrote in $A.his book: `It is $day. $present $weather. $past I $deed and met $B "
          "$place.`\nThe next day $A.he wrote: `It is $day2. $B came to see me. We played $games "
          "and ate $meal.`\nAnd then: `It is $day3. Today I was alone, so I $deed2. $A.called is "
          "my best friend, I think, and $B is the second.`"),
    SCENE(3, PAST, CAST(CHILD, FRIEND, FRIEND),
          "On Saturday there was a dance on the square. $A played the (flute|drum|fiddle) and $B "
          "sang. $C danced {x} dances before supper and {y} after it, and {x} and {y} make {x+y}. "
          "(At the end|When the moon came up|Late in the evening) they all ate $meal, and $C fell "
          "asleep $place."),
    SCENE(3, PAST, CAST(CHILD, FRIEND),
          "There was fog on the river, and $A could not see the way home. `Is anybody there?` "
          "$A.he called.\n`I am,` said $B, who came with a light. `Where do you live?`\n`(You know "
          "it|I have told you): $A.home,` said $A.\n`Then we must go past $spot,` said $B, and "
          "they went hand in hand. $A.called was waiting at the door."),
    SCENE(2, PAST, CAST(CHILD, FRIEND, PARENT),
          "`Why are you sad?` asked $B.\n`I have lost my $gift,` said $A. `I had it $place, and "
          "now it is gone.`\n`Do not cry,` said $B. `I saw it $place2. Your $C.kin $C has "
          "it.`\nThey ran there together, and $B was right."),
    SCENE(2, PAST, CAST(CHILD, FRIEND, FRIEND),
          "In the morning the children read, before noon they count and in the afternoon they "
          "sing. Today Simon asked: `Who lives $A.home and has {an $A.coat $A.pet}?` `$A,` said "
          "$B. `And what is {x} times {y}?` `{x*y},` said $C. `And who was born in $A.born?` `$A "
          "again!` they all cried."),
    SCENE(2, PAST, CAST(CHILD, FRIEND),
          "A fox came to the village at night. It looked at the {x $animal} $place and licked its "
          "lips. But $A.called, the $A.pet of $A, was awake and (made a great noise|gave a loud "
          "cry|saw it first). The fox ran away, past $spot and past $spot2, and never came back. "
          "In the morning $A told $B, and $B told everyone."),
};
const int scene_count = (int)(sizeof(scene_table) / sizeof(scene_table[0]));
