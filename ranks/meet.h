// How the ranks of a run find each other. Rank 0 listens; every other rank connects to it, once a
// channel, and says who it is and what it runs. Once all have come and run the same, the group is
// whole. Nothing is encrypted or secret: whoever can reach the port while the ranks meet can
// disturb a start, so the port belongs inside a cluster.
//
// A connection begins with a Hello; from MAIN's follows the identity: lines of text, the same on
// every rank, that say what it runs. Rank 0 answers, once, on MAIN, with a Welcome.
#ifndef LLM8_MEET_H
#define LLM8_MEET_H

#include "group.h"
#include "ranks.h"

#ifdef __cplusplus
extern "C" {
#endif

// Meets the others within `seconds`. listener: rank 0's, where its starter has made one, else -1.
// On failure every rank that came gets the reason, which names the ranks that are missing or
// differ.
bool meet(Group *g, const Ranks *r, int listener, const char *identity, double seconds, Error *err);

#ifdef __cplusplus
}
#endif

#endif
