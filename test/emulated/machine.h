// A multiprocessor of a GPU without a GPU, as far as the kernels over kernels/hopper.cuh need it:
// it runs the blocks of a launch, a cluster at a time. Each thread is a fiber. Which warp runs next
// is random, and so is the moment at which asynchronous work (TMA, WGMMA) is done, between the
// earliest and the latest that the program allows. So a wait that is missing gives other numbers.
// What can be seen to be wrong, a deadlock above all, ends the launch and is in machine.fault.
//
// Not modelled: time; the order in which other threads see ordinary loads and stores (at once,
// here) and the fence that TMA needs after them; what the compiler makes of the source, such as its
// use of registers; bank conflicts; the precision in which WGMMA sums.
#pragma once

#include <algorithm>
#include <array>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <string>
#include <ucontext.h>
#include <vector>

enum {
    LANES = 32,
    SHARED_BYTES = 232448,
    REGISTERS = 65536,
    STACK_BYTES = 1 << 17 // of a thread
};

// Asynchronous work: groups, which are done in their order, or in any.
struct Unit {
    typedef std::vector<std::function<void()>> Group;
    std::deque<Group> groups;
    Group open; // since the last commit
    bool ordered = true;
    int hurry = 0; // percent: how likely something is done at the next moment

    void commit(void);
    void finish(size_t left); // all but the newest
    void finish_one(void);
};

// Threads that wait for each other.
struct ThreadBarrier {
    int arrived = 0, expected = 0;
    long done = 0;
};

struct Mbarrier {
    const char *name;
    int arrivals, pending; // arrivals of the phase
    int64_t bytes;         // that are still to come
    long phases;           // completed
};

struct Warp {
    ThreadBarrier barrier;
    const char *instruction = ""; // at which its lanes arrive
    void *given[LANES];
    Unit matmuls;
    bool fenced = false; // WGMMA may use registers
    int registers;       // registers of a thread
};

struct Block;
struct Thread {
    Block *block;
    int number;
    ucontext_t beginning;
    jmp_buf waiting; // where it waits
    bool begun = false, ended = false;
    const long *watched = NULL; // it waits until this is no longer
    long seen = 0;              // this
    const char *instruction = "";
    Unit stores;
    // 16 bytes each that it has written and TMA and WGMMA do not see: where, and what
    std::vector<std::pair<size_t, std::array<uint8_t, 16>>> hidden;

    bool can_run(void) const {
        return !ended && (watched == NULL || *watched != seen);
    }
};

struct Block {
    unsigned index;
    std::vector<std::unique_ptr<Thread>> threads;
    std::vector<Warp> warps;
    ThreadBarrier named[16];
    std::map<size_t, Mbarrier> barriers; // by their offsets in shared memory
    int64_t free_registers = 0;
    long registers_freed = 0;     // how often
    std::vector<uint8_t> stashed; // its shared memory while another block of the cluster runs
    uint8_t *shared(size_t at);
    bool ended(void) const {
        return std::all_of(threads.begin(), threads.end(), [](auto &t) { return t->ended; });
    }
};

struct Index {
    unsigned x, y, z;
};
inline Index threadIdx, blockIdx, blockDim, gridDim;

inline struct Machine {
    std::mt19937 random;
    std::string fault;                           // the first one found
    std::pair<std::string, std::string> planted; // by a test (faults.h): a fault, and where
    std::set<std::pair<std::string, std::string>> plantable;
    bool lists_plantable = false;

    struct {
        int stays;               // how often a warp goes on before another runs
        size_t slow_warps, slow; // warps together, and which of these groups is slow
        int patience;            // how often others run before it
        int lanes;               // of this many lanes of a warp, one runs at a time
    } pace;
    uint8_t *memory = NULL; // shared memory of the block that runs
    std::vector<Block> cluster;
    ThreadBarrier whole_cluster;
    Block *block = NULL;
    Thread *thread = NULL;
    std::vector<Unit *> busy;
    Unit loads;
    std::function<void()> kernel;
    jmp_buf scheduler;
    std::vector<std::unique_ptr<char[]>> stacks;

    int one_of(int n) {
        return (int)(random() % (unsigned)n);
    }
    int one_of(std::initializer_list<int> values) {
        return values.begin()[one_of((int)values.size())];
    }
    bool plants(const char *what, const char *where) {
        if (lists_plantable) { plantable.insert({what, where}); }
        return planted.first == what && planted.second == where;
    }
    __attribute__((format(printf, 2, 3))) void report(const char *format, ...) {
        char text[256];
        va_list args;
        if (!fault.empty()) { return; }
        va_start(args, format);
        vsnprintf(text, sizeof(text), format, args);
        va_end(args);
        fault = text;
    }
    // The offset of an address in shared memory.
    size_t shared_offset(const void *address, size_t alignment) {
        size_t at = (size_t)((uintptr_t)address - (uintptr_t)memory);
        if (at >= SHARED_BYTES || at % alignment != 0) {
            report("an address in shared memory: %zd", (ssize_t)at);
            return 0;
        }
        return at;
    }
    Warp &warp(void) {
        return block->warps[threadIdx.x / LANES];
    }

    // Other threads run.
    void leave(void) {
        if (_setjmp(thread->waiting) == 0) { _longjmp(scheduler, 1); }
    }
    // Or not.
    void pause(void) {
        if (one_of(pace.stays) == 0) { leave(); }
    }
    // The thread waits until the counter changes.
    void wait(const long &counter, const char *instruction) {
        thread->watched = &counter;
        thread->seen = counter;
        thread->instruction = instruction;
        leave();
    }
    // The thread arrives where `expected` threads do; the last one acts for all of them.
    template <typename ACTION>
    void arrive(ThreadBarrier &m, int expected, bool waits, const char *instruction,
                ACTION action) {
        if (m.arrived > 0 && m.expected != expected) {
            report("%s of %d and of %d threads", instruction, m.expected, expected);
        }
        m.expected = expected;
        if (++m.arrived == expected) {
            m.arrived = 0;
            action();
            m.done++;
        } else if (waits) {
            wait(m.done, instruction);
        }
    }
    // All lanes of the warp arrive, each with its argument; the action gets a function from lanes
    // to arguments.
    template <typename T, typename ACTION>
    void together(const char *instruction, T &mine, ACTION action) {
        Warp &w = warp();
        if (w.barrier.arrived > 0 && strcmp(w.instruction, instruction) != 0) {
            report("lanes of a warp at %s and at %s", w.instruction, instruction);
        }
        w.instruction = instruction;
        w.given[threadIdx.x % LANES] = &mine;
        arrive(w.barrier, LANES, true, instruction,
               [&] { action([&](int lane) -> T & { return *static_cast<T *>(w.given[lane]); }); });
    }
    void together(const char *instruction) {
        int none = 0;
        together(instruction, none, [](auto) {});
    }

    Mbarrier &barrier(Block &b, const void *address) {
        auto found = b.barriers.find(shared_offset(address, 8));
        if (b.ended()) { report("access to a block that has ended"); }
        if (found != b.barriers.end()) { return found->second; }
        report("an mbarrier that was not made");
        return b.barriers[SHARED_BYTES] = {"an mbarrier that was not made", 1, 1, 0, 0};
    }
    void settle(Mbarrier &m) {
        if (m.pending < 0) { report("too many arrivals at %s", m.name); }
        if (m.pending == 0 && m.bytes == 0) {
            m.pending = m.arrivals;
            m.phases++;
        }
    }

    // Runs blocks first, first + 1 ... of a cluster.
    void run(uint8_t *shared, int first, int blocks, int threads, std::function<void()> body);

  private:
    void begin(int first, int blocks, int threads);
    Thread *lanes_to_run(void);
    void resume(Thread &t);
    void end(void);
} machine;

inline uint8_t *Block::shared(size_t at) {
    return this == machine.block ? machine.memory + at : stashed.data() + at;
}

inline void Unit::commit(void) {
    if (groups.empty()) { machine.busy.push_back(this); }
    groups.push_back(std::move(open));
    open.clear();
    if (hurry == 100) { finish(0); }
}

inline void Unit::finish(size_t left) {
    while (groups.size() > left) { finish_one(); }
}

inline void Unit::finish_one(void) {
    size_t i = ordered ? 0 : (size_t)machine.one_of((int)groups.size());
    Group group = std::move(groups[i]);
    groups.erase(groups.begin() + (ptrdiff_t)i);
    if (groups.empty()) {
        machine.busy.erase(std::find(machine.busy.begin(), machine.busy.end(), this));
    }
    for (auto &work : group) { work(); }
}

inline void Machine::begin(int first, int blocks, int threads) {
    // of a thread: what ptxas takes for __launch_bounds__(threads, 1) at most, as a kernel must
    // that uses setmaxnreg
    const int share = REGISTERS / threads / 8 * 8;
    const int hurries[3] = {one_of({0, 2, 30, 100}), one_of({0, 2, 30, 100}),
                            one_of({0, 2, 30, 100})};
    pace.stays = one_of({1, 4, 100});
    pace.slow_warps = (size_t)one_of({1, 4});
    pace.slow = (size_t)one_of(threads / LANES / (int)pace.slow_warps + 1); // the last one: none
    pace.patience = one_of({16, 1 << 20});
    pace.lanes = one_of({1, 1, 3});
    busy.clear();
    loads = Unit();
    loads.ordered = false;
    loads.hurry = hurries[0];
    whole_cluster = ThreadBarrier();
    cluster = std::vector<Block>((size_t)blocks);
    for (Block &b : cluster) {
        b.index = (unsigned)(first++);
        b.stashed.assign(SHARED_BYTES, 0xff); // NaN
        b.warps.resize((size_t)threads / LANES);
        for (Warp &w : b.warps) {
            w.registers = share;
            w.matmuls.hurry = hurries[1];
        }
        for (int i = 0; i < threads; i++) {
            b.threads.emplace_back(new Thread());
            Thread &t = *b.threads.back();
            size_t stack = (size_t)((&b - cluster.data()) * threads + i);
            if (stack == stacks.size()) { stacks.emplace_back(new char[STACK_BYTES]); }
            t.block = &b;
            t.number = i;
            t.stores.hurry = hurries[2];
            getcontext(&t.beginning);
            t.beginning.uc_stack.ss_sp = stacks[stack].get();
            t.beginning.uc_stack.ss_size = STACK_BYTES;
            auto body = [] {
                machine.kernel();
                const Unit &stores = machine.thread->stores;
                if (!stores.groups.empty() || !stores.open.empty()) {
                    machine.report("thread %d ends before its stores", machine.thread->number);
                }
                machine.thread->ended = true;
                _longjmp(machine.scheduler, 1);
            };
            makecontext(&t.beginning, body, 0);
        }
    }
    block = &cluster[0];
    memset(memory, 0xff, SHARED_BYTES);
}

inline void Machine::resume(Thread &t) {
    if (t.block != block) {
        memcpy(block->stashed.data(), memory, SHARED_BYTES);
        memcpy(memory, t.block->stashed.data(), SHARED_BYTES);
        block = t.block;
    }
    thread = &t;
    t.watched = NULL;
    blockIdx = {block->index, 0, 0};
    threadIdx = {(unsigned)t.number, 0, 0};
    if (_setjmp(scheduler) != 0) { return; }
    if (t.begun) { _longjmp(t.waiting, 1); } // without swapcontext's calls of the system
    t.begun = true;
    setcontext(&t.beginning);
}

// The first of the lanes that run next: the last warp's, if it is to stay, or any other's. Slow
// ones seldom run while others can. NULL: no thread can run.
inline Thread *Machine::lanes_to_run(void) {
    std::vector<Thread *> all, fast;
    for (Block &b : cluster) {
        for (size_t i = 0; i < b.threads.size(); i += LANES) {
            auto lane = b.threads.begin() + (ptrdiff_t)i;
            bool runs = std::any_of(lane, lane + LANES, [](auto &t) { return t->can_run(); });
            if (!runs) { continue; }
            if (thread == lane->get() && one_of(pace.stays) > 0) { return thread; }
            all.push_back(lane->get());
            if (i / LANES / pace.slow_warps != pace.slow) { fast.push_back(lane->get()); }
        }
    }
    std::vector<Thread *> &from = fast.empty() || one_of(pace.patience) == 0 ? all : fast;
    return from.empty() ? NULL : from[(size_t)one_of((int)from.size())];
}

inline void Machine::run(uint8_t *shared, int first, int blocks, int threads,
                         std::function<void()> body) {
    if (!fault.empty()) { return; }
    memory = shared;
    kernel = body;
    begin(first, blocks, threads);
    while (fault.empty()) {
        Thread *next = lanes_to_run();
        const bool ended = std::all_of(cluster.begin(), cluster.end(), std::mem_fn(&Block::ended));
        if (ended || (next == NULL && busy.empty())) { break; }
        if (!busy.empty()) {
            Unit &unit = *busy[(size_t)one_of((int)busy.size())];
            if (next == NULL || one_of(100) < unit.hurry) {
                unit.finish_one();
                continue;
            }
        }
        for (int i = 0; i < LANES; i++) {
            Thread &t = *next->block->threads[(size_t)(next->number + i)];
            if (t.can_run() && one_of(pace.lanes) == 0) { resume(t); }
        }
        thread = next;
    }
    end();
}

// What a block must not leave behind.
inline void Machine::end(void) {
    for (Block &b : cluster) {
        for (auto &t : b.threads) {
            if (!t->ended) {
                report("deadlock: thread %d of block %u waits at %s", t->number, b.index,
                       t->instruction);
            }
        }
        for (auto &[offset, m] : b.barriers) {
            if (m.pending != m.arrivals || m.bytes != 0) {
                report("%s is left with %d arrivals to come, %lld bytes", m.name, m.pending,
                       (long long)m.bytes);
            }
        }
        for (ThreadBarrier &m : b.named) {
            if (m.arrived > 0) { report("a named barrier is left with %d arrivals", m.arrived); }
        }
    }
    if (!busy.empty()) { report("asynchronous work that the block does not wait for"); }
    thread = NULL;
}
