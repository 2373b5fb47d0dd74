// Fibers and barriers: see emulation.h.
#include "emulation.h"

#include <algorithm>
#include <map>
#include <mutex>
#include <random>
#include <string>
#include <sys/mman.h>
#include <unistd.h>
#include <vector>

Dimensions threadIdx, blockIdx, blockDim, gridDim;

namespace emulation {
namespace {

// With ThreadSanitizer each thread of a block is a thread to it too, and only a barrier stands between what two of them do: accesses
// to one place with none between them are reported, in whatever order they ran. Blocks follow each other. This file itself is
// compiled without, so that it sees kernels only.
#ifdef TUNESMITH_WATCHED
extern "C" {
void *__tsan_get_current_fiber();
void *__tsan_create_fiber(unsigned flags);
void __tsan_switch_to_fiber(void *fiber, unsigned flags);
void __tsan_acquire(void *place);
void __tsan_release(void *place);
void __tsan_read_range(void *from, unsigned long bytes);
void AnnotateIgnoreReadsBegin(const char *, int);
void AnnotateIgnoreReadsEnd(const char *, int);
void AnnotateIgnoreWritesBegin(const char *, int);
void AnnotateIgnoreWritesEnd(const char *, int);
}

constexpr bool WATCHED = true;
void *watched_scheduler, *watched_threads[1024];

void enter(unsigned thread) {
    if (!watched_threads[thread]) watched_threads[thread] = __tsan_create_fiber(0);
    watched_scheduler = __tsan_get_current_fiber();
    // Not a point of order.
    __tsan_switch_to_fiber(watched_threads[thread], 1);
}
void leave() { __tsan_switch_to_fiber(watched_scheduler, 1); }
void release(char &place) { __tsan_release(&place); }
void acquire(char &place) { __tsan_acquire(&place); }

// A read by the stand-in for a thread.
void note_read(const void *from, size_t bytes) { __tsan_read_range(const_cast<void *>(from), bytes); }

// What the stand-in itself copies between lanes.
void copy_unwatched(void *to, const void *from, size_t bytes) {
    AnnotateIgnoreReadsBegin("", 0);
    AnnotateIgnoreWritesBegin("", 0);
    std::memcpy(to, from, bytes);
    AnnotateIgnoreWritesEnd("", 0);
    AnnotateIgnoreReadsEnd("", 0);
}
#else
constexpr bool WATCHED = false;

void enter(unsigned) {}
void leave() {}
void release(char &) {}
void acquire(char &) {}
void note_read(const void *, size_t) {}
void copy_unwatched(void *to, const void *from, size_t bytes) { std::memcpy(to, from, bytes); }
#endif

// Where a block begins and ends, and its barriers in turn: none comes after the next one before all have left it.
char beginning, end, barriers[2];

constexpr size_t STACK = 128 << 10;
// Stacks begin at so many different bytes: see `fresh`.
constexpr size_t COLOURS = 32 << 10;
constexpr size_t SHARED = 232448;

// Saves the registers that a function keeps, and the stack; continues with those saved in `to`.
extern "C" void tunesmith_switch(void **from, void *to);
#if defined(__x86_64__)
asm(".text\n.globl tunesmith_switch\n.hidden tunesmith_switch\n.type tunesmith_switch,@function\ntunesmith_switch:\n"
    "push %rbp\npush %rbx\npush %r12\npush %r13\npush %r14\npush %r15\n"
    "mov %rsp, (%rdi)\nmov %rsi, %rsp\n"
    "pop %r15\npop %r14\npop %r13\npop %r12\npop %rbx\npop %rbp\nret\n");
constexpr size_t SAVED = 6;
#elif defined(__aarch64__)
asm(".text\n.globl tunesmith_switch\n.hidden tunesmith_switch\n.type tunesmith_switch,%function\ntunesmith_switch:\n"
    "sub sp, sp, #160\n"
    "stp x19, x20, [sp]\nstp x21, x22, [sp, #16]\nstp x23, x24, [sp, #32]\nstp x25, x26, [sp, #48]\n"
    "stp x27, x28, [sp, #64]\nstp x29, x30, [sp, #80]\n"
    "stp d8, d9, [sp, #96]\nstp d10, d11, [sp, #112]\nstp d12, d13, [sp, #128]\nstp d14, d15, [sp, #144]\n"
    "mov x9, sp\nstr x9, [x0]\nmov sp, x1\n"
    "ldp x19, x20, [sp]\nldp x21, x22, [sp, #16]\nldp x23, x24, [sp, #32]\nldp x25, x26, [sp, #48]\n"
    "ldp x27, x28, [sp, #64]\nldp x29, x30, [sp, #80]\n"
    "ldp d8, d9, [sp, #96]\nldp d10, d11, [sp, #112]\nldp d12, d13, [sp, #128]\nldp d14, d15, [sp, #144]\n"
    "add sp, sp, #160\nret\n");
#else
#error "the stand-in knows how to switch fibers on x86-64 and aarch64"
#endif

enum class Wait { None, Block, Warp, Ended };

struct Thread {
    void *stack_pointer = nullptr;
    int stack = -1;
    Wait wait = Wait::None;
    Site site{nullptr, 0};
    uint32_t mask = 0;
    uint64_t given = 0;
    // Which half of `gathered` the next gathering takes.
    bool second = false;
    // Groups of asynchronous copies that have ended.
    unsigned groups = 0;
};

// An asynchronous copy that is not done.
struct Copy {
    void *to;
    const void *from;
    unsigned bytes, group;
};

// What one lane computed for all lanes of its warp from the values of their last exchange.
struct Result {
    uint64_t value;
    bool there;
};

struct State {
    std::vector<Thread> threads;
    std::vector<Dimensions> places;
    // What the lanes of each warp gave at its last exchange.
    std::vector<uint64_t> exchanged;
    std::vector<Result> results;
    // What the lanes of each warp gave at its last two gatherings.
    std::vector<uint64_t> gathered;
    // Of each thread.
    std::vector<std::vector<Copy>> copies;
    std::vector<char *> stacks;
    std::vector<int> idle;
    void *scheduler = nullptr;
    unsigned current = 0;
    // From a thread to the one that runs after it; 0 where that is not always the same one.
    int step = 0;
    // Barriers that the block has passed.
    unsigned passed = 0;
    Body const *body = nullptr;
    const char *name = "";
    char *shared = nullptr;
};

// One kernel runs at a time. It lives as long as the process: threads of the stand-in may outlive destructors.
State *const the_state = new State;

State &state() { return *the_state; }

std::mutex &running() {
    static std::mutex *mutex = new std::mutex;
    return *mutex;
}

[[noreturn]] void fail(const char *what, const Thread &thread) {
    State &s = state();
    std::fprintf(stderr, "stand-in: kernel %s, block (%u, %u, %u): %s at %s:%d\n", s.name, blockIdx.x, blockIdx.y, blockIdx.z,
                 what, thread.site.file ? thread.site.file : "?", thread.site.line);
    std::abort();
}

void set_index(unsigned thread) {
    State &s = state();
    s.current = thread;
    threadIdx = s.places[thread];
}

// The thread to run after this one. -1: there is none, or threads have no fixed order and the scheduler chooses.
int follower() {
    State &s = state();
    if (s.step == 0) return -1;
    int count = int(s.threads.size()), next = int(s.current) + s.step;
    while (next >= 0 && next < count && s.threads[next].wait != Wait::None) next += s.step;
    return next < count ? next : -1;
}

void begin() {
    State &s = state();
    for (;;) {
        acquire(beginning);
        (*s.body)();
        release(end);
        Thread &self = s.threads[s.current];
        self.wait = Wait::Ended;
        leave();
        // A thread that ended gives its stack to the next one, which begins here.
        int next = follower();
        if (next < 0) {
            tunesmith_switch(&self.stack_pointer, s.scheduler);
            continue;
        }
        int stack = self.stack;
        self.stack = -1;
        set_index(unsigned(next));
        Thread &other = s.threads[next];
        if (other.stack < 0) {
            other.stack = stack;
        } else {
            s.idle.push_back(stack);
            tunesmith_switch(&self.stack_pointer, other.stack_pointer);
        }
    }
}

// A stack that begins anew, at an offset of its own: with the same one, all stacks would share a few sets of the processor's caches.
void *fresh(char *stack, unsigned index) {
    uintptr_t top = (reinterpret_cast<uintptr_t>(stack) + STACK - index * 1088 % COLOURS) & ~uintptr_t(63);
#if defined(__x86_64__)
    // As after a call: the stack is 8 beyond a multiple of 16 when `begin` is entered.
    void **place = reinterpret_cast<void **>(top) - 1;
    *--place = reinterpret_cast<void *>(&begin);
    for (size_t i = 0; i < SAVED; i++) *--place = nullptr;
    return place;
#else
    uint64_t *place = reinterpret_cast<uint64_t *>(top) - 20;
    std::memset(place, 0, 160);
    place[11] = reinterpret_cast<uint64_t>(&begin);
    return place;
#endif
}

// Gives a thread that has not begun a stack.
void prepare(Thread &thread) {
    State &s = state();
    if (s.idle.empty()) {
        void *memory = mmap(nullptr, STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (memory == MAP_FAILED) fail("no memory for a thread's stack", thread);
        // Who needs more of a stack than there is stops, and does not write into the next one.
        if (mprotect(memory, size_t(sysconf(_SC_PAGESIZE)), PROT_NONE) != 0) fail("no end of a thread's stack", thread);
        s.idle.push_back(int(s.stacks.size()));
        s.stacks.push_back(static_cast<char *>(memory));
    }
    thread.stack = s.idle.back();
    s.idle.pop_back();
    thread.stack_pointer = fresh(s.stacks[thread.stack], unsigned(thread.stack));
}

// Runs a thread. In a fixed order it switches to the next one by itself, and so on; this returns when one switches back.
void resume(unsigned index) {
    State &s = state();
    Thread &thread = s.threads[index];
    if (thread.stack < 0) prepare(thread);
    set_index(index);
    enter(index);
    tunesmith_switch(&s.scheduler, thread.stack_pointer);
    // Two threads on one stack would be two at one place to ThreadSanitizer.
    Thread &last = s.threads[s.current];
    if (last.wait == Wait::Ended && !WATCHED) {
        s.idle.push_back(last.stack);
        last.stack = -1;
    }
}

void wait_here(Wait wait, Site site) {
    State &s = state();
    unsigned self = s.current;
    s.threads[self].wait = wait;
    s.threads[self].site = site;
    char &barrier = barriers[s.passed % 2];
    if (wait == Wait::Block) release(barrier);
    leave();
    void *to = s.scheduler;
    if (int next = follower(); next >= 0) {
        if (s.threads[next].stack < 0) prepare(s.threads[next]);
        set_index(unsigned(next));
        to = s.threads[next].stack_pointer;
    }
    tunesmith_switch(&s.threads[self].stack_pointer, to);
    if (wait == Wait::Block) acquire(barrier);
}

// Lets go the lanes of a warp that wait for each other; whether there were any.
bool release_warp(unsigned first, unsigned count) {
    State &s = state();
    bool released = false;
    for (unsigned lane = 0; lane < count; lane++) {
        Thread &thread = s.threads[first + lane];
        if (thread.wait != Wait::Warp) continue;
        uint32_t mask = thread.mask;
        if (!(mask >> lane & 1)) fail("a lane takes part in an exchange that its mask leaves out", thread);
        bool complete = true;
        for (unsigned other = 0; other < count; other++) {
            Thread &it = s.threads[first + other];
            if (!(mask >> other & 1) || it.wait == Wait::Ended) continue;
            complete &= it.wait == Wait::Warp && it.mask == mask;
        }
        if (!complete) continue;
        for (unsigned other = 0; other < LANES; other++) {
            bool there = other < count && (mask >> other & 1) && s.threads[first + other].wait == Wait::Warp;
            if (mask >> other & 1) s.exchanged[first + other] = there ? s.threads[first + other].given : 0;
            if (there) s.threads[first + other].wait = Wait::None;
        }
        s.results[first / LANES].there = false;
        released = true;
    }
    return released;
}

// The order in which threads run: TUNESMITH_STAND_IN_ORDER.
struct Order {
    enum { Forward, Reverse, Greedy, Random } kind = Forward;
    std::mt19937 random{1};

    Order() {
        const char *wanted = std::getenv("TUNESMITH_STAND_IN_ORDER");
        std::string name = wanted ? wanted : "forward";
        if (name == "reverse") kind = Reverse;
        if (name == "greedy") kind = Greedy;
        if (name.rfind("random", 0) == 0) {
            kind = Random;
            if (name.size() > 7) random.seed(unsigned(std::atoi(name.c_str() + 7)));
        }
    }
};

Order &order() {
    static Order *order = new Order;
    return *order;
}

void run_block(unsigned count, std::vector<unsigned> &turns) {
    State &s = state();
    for (Thread &thread : s.threads) {
        if (thread.stack >= 0) s.idle.push_back(thread.stack);
        thread = Thread{};
    }
    for (std::vector<Copy> &copies : s.copies) copies.clear();
    unsigned warps = (count + LANES - 1) / LANES;
    const auto kind = order().kind;
    s.step = WATCHED ? 0 : kind == Order::Forward ? 1 : kind == Order::Reverse ? -1 : 0;
    auto size = [&](unsigned warp) { return std::min(LANES, count - warp * LANES); };
    for (;;) {
        bool ran = false;
        if (kind == Order::Random) std::shuffle(turns.begin(), turns.end(), order().random);
        for (unsigned index : turns) {
            if (s.threads[index].wait != Wait::None) continue;
            resume(index);
            ran = true;
            // The warp runs ahead of all others.
            if (kind == Order::Greedy && index % LANES + 1 == size(index / LANES) && release_warp(index / LANES * LANES, size(index / LANES))) break;
        }
        bool released = false;
        for (unsigned warp = 0; warp < warps; warp++) released |= release_warp(warp * LANES, size(warp));
        if (released || (ran && kind == Order::Greedy)) continue;
        // All wait at a barrier or have ended.
        const Thread *waiting = nullptr;
        for (const Thread &thread : s.threads) {
            if (thread.wait == Wait::Warp) fail("a lane waits for others of its warp, which do not come,", thread);
            if (thread.wait != Wait::Block) continue;
            if (waiting && (waiting->site.line != thread.site.line || (waiting->site.file != thread.site.file && std::strcmp(waiting->site.file, thread.site.file) != 0)))
                fail("threads wait at different barriers, one", thread);
            waiting = &thread;
        }
        if (!waiting) return;
        s.passed++;
        for (Thread &thread : s.threads)
            if (thread.wait == Wait::Block) thread.wait = Wait::None;
    }
}

struct Kernel {
    Bind bind;
    char *shared, *shared_end;
};

std::map<std::string, Kernel> &kernels() {
    static std::map<std::string, Kernel> *kernels = new std::map<std::string, Kernel>;
    return *kernels;
}

} // namespace

Registration::Registration(const char *name, Bind bind, char *shared, char *shared_end) {
    if (!kernels().emplace(name, Kernel{bind, shared, shared_end}).second) {
        std::fprintf(stderr, "stand-in: two kernels are named %s\n", name);
        std::abort();
    }
}

Bind find(const char *name) {
    auto found = kernels().find(name);
    return found == kernels().end() ? nullptr : found->second.bind;
}

void *dynamic_shared() { return state().shared; }

unsigned lane() { return state().current % LANES; }

void block_barrier(Site site) { wait_here(Wait::Block, site); }

// The values of the warp's lanes, after the exchange.
static const uint64_t *exchange(State &s, uint32_t mask, uint64_t value, Site site) {
    Thread &self = s.threads[s.current];
    self.mask = mask;
    self.given = value;
    wait_here(Wait::Warp, site);
    return &s.exchanged[s.current / LANES * LANES];
}

void warp_exchange(uint32_t mask, uint64_t value, uint64_t *all, Site site) {
    copy_unwatched(all, exchange(state(), mask, value, site), LANES * sizeof *all);
}

uint64_t warp_take(uint32_t mask, uint64_t value, unsigned from, Site site) { return exchange(state(), mask, value, site)[from]; }

bool warp_first(uint64_t value, uint64_t *all, uint64_t &result, Site site) {
    State &s = state();
    const uint64_t *values = exchange(s, 0xffffffffu, value, site);
    Result &of_warp = s.results[s.current / LANES];
    result = of_warp.value;
    if (of_warp.there) return false;
    copy_unwatched(all, values, LANES * sizeof *all);
    return true;
}

void warp_result(uint64_t result) {
    State &s = state();
    s.results[s.current / LANES] = {result, true};
}

const uint64_t *warp_gather(const uint64_t (&given)[GIVEN], Site site) {
    State &s = state();
    unsigned self = s.current;
    Thread &thread = s.threads[self];
    uint64_t *all = &s.gathered[(self / LANES * 2 + thread.second) * LANES * GIVEN];
    thread.second = !thread.second;
    copy_unwatched(all + self % LANES * GIVEN, given, sizeof given);
    thread.mask = 0xffffffffu;
    wait_here(Wait::Warp, site);
    return all;
}

void copy_async(void *to, const void *from, unsigned bytes) {
    State &s = state();
    Thread &thread = s.threads[s.current];
    thread.site = {"cp.async", 0};
    if (bytes != 4 && bytes != 8 && bytes != 16) fail("an asynchronous copy of other than 4, 8 or 16 bytes", thread);
    if (reinterpret_cast<uintptr_t>(to) % bytes || reinterpret_cast<uintptr_t>(from) % bytes) fail("a misaligned copy", thread);
    std::memset(to, 0xff, bytes);
    s.copies[s.current].push_back({to, from, bytes, thread.groups});
}

void copies_end() { state().threads[state().current].groups++; }

void copies_wait(unsigned left) {
    State &s = state();
    unsigned groups = s.threads[s.current].groups;
    std::vector<Copy> &copies = s.copies[s.current];
    auto done = [&](const Copy &copy) {
        if (copy.group + left >= groups) return false;
        copy.from ? std::memcpy(copy.to, copy.from, copy.bytes) : std::memset(copy.to, 0, copy.bytes);
        return true;
    };
    copies.erase(std::remove_if(copies.begin(), copies.end(), done), copies.end());
}

void load_matrices(uint32_t (&out)[4], const char *row, bool transposed) {
    State &s = state();
    if (reinterpret_cast<uintptr_t>(row) % 16) {
        s.threads[s.current].site = {"ldmatrix", 0};
        fail("a misaligned row of a matrix", s.threads[s.current]);
    }
    note_read(row, 16);
    uint64_t rows[LANES];
    warp_exchange(0xffffffffu, bits_of(row), rows, {"ldmatrix", 0});
    unsigned group = lane() / 4, pair = lane() % 4 * 2;
    for (unsigned matrix = 0; matrix < 4; matrix++) {
        auto at = [&](unsigned i, unsigned j) {
            uint16_t number;
            std::memcpy(&number, reinterpret_cast<const char *>(rows[matrix * 8 + i]) + j * 2, 2);
            return uint32_t(number);
        };
        uint32_t low = transposed ? at(pair, group) : at(group, pair);
        uint32_t high = transposed ? at(pair + 1, group) : at(group, pair + 1);
        out[matrix] = low | high << 16;
    }
}

void run(const char *name, Dimensions grid, Dimensions block, size_t shared, const Body &body) {
    std::lock_guard<std::mutex> one(running());
    State &s = state();
    if (!s.shared) s.shared = static_cast<char *>(std::aligned_alloc(128, SHARED));
    unsigned count = block.x * block.y * block.z;
    for (Thread &thread : s.threads)
        if (thread.stack >= 0) s.idle.push_back(thread.stack);
    s.threads.assign(count, Thread{});
    s.exchanged.assign((count + LANES - 1) / LANES * LANES, 0);
    s.results.assign(s.exchanged.size() / LANES, {0, false});
    s.gathered.assign(s.exchanged.size() * GIVEN * 2, 0);
    s.copies.assign(count, {});
    const Kernel &kernel = kernels().at(name);
    s.body = &body;
    s.name = name;
    blockDim = block;
    gridDim = grid;
    s.places.clear();
    for (unsigned z = 0; z < block.z; z++)
        for (unsigned y = 0; y < block.y; y++)
            for (unsigned x = 0; x < block.x; x++) s.places.push_back({x, y, z});
    std::vector<unsigned> turns(count);
    for (unsigned i = 0; i < count; i++) turns[i] = order().kind == Order::Reverse ? count - 1 - i : i;
    for (unsigned z = 0; z < grid.z; z++)
        for (unsigned y = 0; y < grid.y; y++)
            for (unsigned x = 0; x < grid.x; x++) {
                blockIdx = {x, y, z};
                // NaN: whoever reads what nothing has written sees it.
                std::memset(s.shared, 0xff, shared);
                if (kernel.shared) std::memset(kernel.shared, 0xff, size_t(kernel.shared_end - kernel.shared));
                release(beginning);
                run_block(count, turns);
                acquire(end);
            }
}

} // namespace emulation
