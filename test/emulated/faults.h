// Plants faults into a kernel on machine.h: every one that an instruction of the kernel can have.
#pragma once

#include "../test.h"
#include "machine.h"

// run() returns the kernel's results. Each fault, {what, where}, must change them in some order of
// threads, or be reported; but for those that do no harm, because something else waits, too.
template <typename RUN>
static void check_faults(std::vector<std::pair<std::string, std::string>> harmless, RUN run) {
    machine.plantable.clear();
    machine.lists_plantable = true;
    const auto right = run();
    machine.lists_plantable = false;
    CHECK_TEXT(machine.fault.c_str(), "");
    CHECK(machine.plantable.size() > harmless.size());
    for (const auto &fault : machine.plantable) {
        const bool harms = std::find(harmless.begin(), harmless.end(), fault) == harmless.end();
        bool found = false;
        machine.planted = fault;
        for (unsigned seed = 1; seed <= (harms ? 100 : 5) && !found; seed++) {
            machine.random.seed(seed);
            found = run() != right || !machine.fault.empty();
            machine.fault.clear();
        }
        machine.planted = {};
        if (found != harms) {
            test_fail(__FILE__, __LINE__, "%s: %s, %s", found ? "found" : "not found",
                      fault.first.c_str(), fault.second.c_str());
        }
    }
}
