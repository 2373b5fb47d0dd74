// The driver: devices, memory, streams, events and launches, with main memory in place of a GPU's.
#include "emulation.h"
#include "worker.h"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

namespace {

enum Result {
    SUCCESS = 0,
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    NOT_INITIALIZED = 3,
    NO_DEVICE = 100,
    INVALID_DEVICE = 101,
    INVALID_IMAGE = 200,
    INVALID_CONTEXT = 201,
    INVALID_HANDLE = 400,
    NOT_FOUND = 500,
    NOT_READY = 600,
    ILLEGAL_ADDRESS = 700,
    LAUNCH_FAILED = 719,
    UNAVAILABLE = 46,
};

using Guard = std::lock_guard<std::mutex>;
constexpr size_t ALIGNMENT = 512;
constexpr int MAGIC = 0x7475;
// A stream begins when this much waits in it, or when the host asks for a result.
constexpr size_t LATE = 32;

uint64_t number(const char *variable, uint64_t otherwise) {
    const char *text = std::getenv(variable);
    return text && *text ? std::strtoull(text, nullptr, 10) : otherwise;
}

struct Stream;

struct Device {
    int ordinal;
    size_t total;
    size_t used = 0;
};

// Nothing of this is ever freed: streams' threads may outlive `main`.
struct Driver {
    std::mutex mutex;
    std::vector<Device *> devices;
    // Live memory: where it begins, and how large it is.
    std::map<uint64_t, size_t> memory;
    std::map<uint64_t, Device *> owner;
    std::atomic<int> sticky{0};
    std::map<std::string, uint64_t> calls;
    bool listing = false;
    // The host's memory that does not move: where it begins, and how large it is.
    std::map<uint64_t, size_t> pinned;
    std::string failing;
    uint64_t failing_at = 0;
    uint64_t lost_after = 0;
    std::atomic<uint64_t> launches{0};
    std::map<std::string, std::pair<uint64_t, double>> counts;
    std::atomic<bool> counting{false};
    std::mutex streams_mutex;
    std::set<Stream *> streams;
};

Driver &driver() {
    static Driver *made = [] {
        Driver *driver = new Driver;
        uint64_t devices = number("TUNESMITH_STAND_IN_DEVICES", 2);
        for (uint64_t i = 0; i < devices; i++) {
            driver->devices.push_back(new Device{int(i), size_t(number("TUNESMITH_STAND_IN_MEMORY", uint64_t(4) << 30))});
            driver->devices.back()->used = size_t(number("TUNESMITH_STAND_IN_USED", 0));
        }
        if (const char *fail = std::getenv("TUNESMITH_STAND_IN_FAIL")) {
            std::string text = fail;
            size_t colon = text.find(':');
            uint64_t at = colon == std::string::npos ? 1 : std::strtoull(text.c_str() + colon + 1, nullptr, 10);
            if (text.substr(0, colon) == "lost") {
                driver->lost_after = at;
            } else {
                driver->failing = text.substr(0, colon);
                driver->failing_at = at;
            }
        }
        if (const char *file = std::getenv("TUNESMITH_STAND_IN_CALLS"); file && *file) {
            driver->listing = true;
            std::atexit([] {
                Driver &d = ::driver();
                Guard guard(d.mutex);
                if (FILE *out = std::fopen(std::getenv("TUNESMITH_STAND_IN_CALLS"), "w")) {
                    for (auto &[name, count] : d.calls) std::fprintf(out, "%s\t%llu\n", name.c_str(), (unsigned long long)count);
                    std::fclose(out);
                }
            });
        }
        if (const char *file = std::getenv("TUNESMITH_STAND_IN_COUNT"); file && *file) {
            driver->counting = true;
            std::atexit([] {
                Driver &d = ::driver();
                Guard guard(d.mutex);
                // A launcher of ranks only looks for GPUs.
                if (d.counts.empty()) return;
                if (FILE *out = std::fopen(std::getenv("TUNESMITH_STAND_IN_COUNT"), "w")) {
                    for (auto &[name, count] : d.counts)
                        std::fprintf(out, "%s\t%llu\t%.3f\n", name.c_str(), (unsigned long long)count.first, count.second * 1e3);
                    std::fclose(out);
                }
            });
        }
        return driver;
    }();
    return *made;
}

// Counts a call; its injected failure, the device's, or none.
int enter(const char *name, int injected) {
    Driver &d = driver();
    if (int error = d.sticky.load()) return error;
    if (d.lost_after && d.launches.load() > d.lost_after) return UNAVAILABLE;
    if (d.listing || d.failing == name) {
        Guard guard(d.mutex);
        if (++d.calls[name] == d.failing_at && d.failing == name) return injected;
    }
    return SUCCESS;
}

#define ENTER(injected) \
    if (int error = enter(__func__, injected)) return error

// Whether there is live memory for a whole range.
bool live(uint64_t address, size_t bytes) {
    Driver &d = driver();
    Guard guard(d.mutex);
    auto next = d.memory.upper_bound(address);
    if (next == d.memory.begin()) return false;
    auto found = std::prev(next);
    return bytes <= found->second && address - found->first <= found->second - bytes;
}

// Whether the host's memory there does not move.
bool pinned(const void *at) {
    uint64_t address = reinterpret_cast<uint64_t>(at);
    Driver &d = driver();
    Guard guard(d.mutex);
    auto next = d.pinned.upper_bound(address);
    if (next == d.pinned.begin()) return false;
    auto found = std::prev(next);
    return address - found->first < found->second;
}

// The error of work that would use memory which is not there, or none.
int check(const char *what, uint64_t address, size_t bytes) {
    if (live(address, bytes)) return SUCCESS;
    std::fprintf(stderr, "stand-in: %s: there is no live memory of %zu bytes at %#llx\n", what, bytes, (unsigned long long)address);
    return ILLEGAL_ADDRESS;
}

// Lets every stream do what is queued by now: one may wait for another.
void urge();

struct Stream {
    Device *device = nullptr;
    std::mutex mutex;
    std::condition_variable more, less;
    std::deque<std::function<int()>> queue;
    // How much was queued, was begun, was done, and may be begun.
    uint64_t queued = 0, begun = 0, done = 0, wanted = 0;
    bool ending = false;

    void push(std::function<int()> work) {
        bool full;
        {
            Guard guard(mutex);
            queue.push_back(std::move(work));
            queued++;
            full = queue.size() >= LATE;
        }
        if (full) urge();
    }

    void serve() {
        std::unique_lock<std::mutex> lock(mutex);
        for (;;) {
            more.wait(lock, [&] { return begun < wanted || ending; });
            if (queue.empty()) return;
            std::function<int()> work = std::move(queue.front());
            queue.pop_front();
            begun++;
            lock.unlock();
            // After an error a device does nothing any more.
            int error = driver().sticky.load() ? 0 : work();
            if (error) driver().sticky = error;
            work = nullptr;
            lock.lock();
            done++;
            less.notify_all();
        }
    }

    void synchronize() {
        urge();
        std::unique_lock<std::mutex> lock(mutex);
        // What other threads queue meanwhile is not waited for.
        uint64_t all = wanted;
        less.wait(lock, [&] { return done >= all; });
    }
};

void urge() {
    Guard all(driver().streams_mutex);
    for (Stream *stream : driver().streams) {
        Guard guard(stream->mutex);
        stream->wanted = stream->queued;
        stream->more.notify_one();
    }
}

struct Point {
    std::mutex mutex;
    std::condition_variable changed;
    uint64_t asked = 0, reached = 0;
    std::chrono::steady_clock::time_point at;
};

struct Event {
    std::shared_ptr<Point> point = std::make_shared<Point>();
};

struct Module {
    int magic = MAGIC;
};

thread_local Device *current = nullptr;

} // namespace

extern "C" {

using Handle = void *;

void tunesmith_stand_in_enqueue(void *stream, std::function<int()> *work) { static_cast<Stream *>(stream)->push(std::move(*work)); }

int tunesmith_stand_in_device() { return current ? current->ordinal : -1; }

int tunesmith_stand_in_check(const char *what, uint64_t address, size_t bytes) { return check(what, address, bytes); }

int cuInit(unsigned) {
    ENTER(NO_DEVICE);
    return driver().devices.empty() ? NO_DEVICE : SUCCESS;
}

int cuDriverGetVersion(int *version) {
    *version = int(number("TUNESMITH_STAND_IN_DRIVER", 13000));
    return SUCCESS;
}

int cuDeviceGetCount(int *count) {
    ENTER(NO_DEVICE);
    *count = int(driver().devices.size());
    return SUCCESS;
}

int cuDeviceGet(int *device, int ordinal) {
    ENTER(INVALID_DEVICE);
    if (ordinal < 0 || size_t(ordinal) >= driver().devices.size()) return INVALID_DEVICE;
    *device = ordinal;
    return SUCCESS;
}

int cuDeviceGetName(char *name, int length, int) {
    ENTER(INVALID_DEVICE);
    std::snprintf(name, size_t(length), "Stand-in GPU");
    return SUCCESS;
}

int cuDeviceGetUuid_v2(unsigned char *uuid, int device) {
    ENTER(INVALID_DEVICE);
    int first = int(number("TUNESMITH_STAND_IN_FIRST", 0));
    for (int i = 0; i < 16; i++) uuid[i] = (unsigned char)(i * 17 + first + device);
    return SUCCESS;
}

int cuDeviceGetAttribute(int *value, int attribute, int) {
    ENTER(INVALID_DEVICE);
    switch (attribute) {
    case 75: *value = int(number("TUNESMITH_STAND_IN_CAPABILITY", 90) / 10); return SUCCESS;
    case 76: *value = int(number("TUNESMITH_STAND_IN_CAPABILITY", 90) % 10); return SUCCESS;
    case 16: *value = 4; return SUCCESS;
    case 97: *value = 232448; return SUCCESS;
    default: return INVALID_VALUE;
    }
}

int cuDevicePrimaryCtxRetain(Handle *context, int device) {
    ENTER(OUT_OF_MEMORY);
    *context = driver().devices.at(size_t(device));
    return SUCCESS;
}

int cuCtxSetCurrent(Handle context) {
    ENTER(INVALID_CONTEXT);
    current = static_cast<Device *>(context);
    return SUCCESS;
}

int cuMemGetInfo_v2(size_t *free, size_t *total) {
    ENTER(LAUNCH_FAILED);
    if (!current) return INVALID_CONTEXT;
    Guard guard(driver().mutex);
    *total = current->total;
    *free = current->total - current->used;
    return SUCCESS;
}

int cuDeviceGetDefaultMemPool(Handle *pool, int device) {
    ENTER(INVALID_DEVICE);
    *pool = driver().devices.at(size_t(device));
    return SUCCESS;
}

int cuMemPoolSetAttribute(Handle, int attribute, void *) {
    ENTER(INVALID_VALUE);
    return attribute == 4 ? SUCCESS : INVALID_VALUE;
}

int cuMemPoolTrimTo(Handle, size_t) {
    ENTER(LAUNCH_FAILED);
    return SUCCESS;
}

int cuMemAllocAsync(uint64_t *address, size_t bytes, Handle stream) {
    ENTER(OUT_OF_MEMORY);
    if (!stream || bytes == 0) return INVALID_VALUE;
    Driver &d = driver();
    Device *device = static_cast<Stream *>(stream)->device;
    size_t whole = (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    Guard guard(d.mutex);
    if (whole > device->total - device->used) return OUT_OF_MEMORY;
    void *memory = nullptr;
    // Exactly as much as was asked for: AddressSanitizer sees what lies beyond.
    if (posix_memalign(&memory, ALIGNMENT, bytes) != 0) return OUT_OF_MEMORY;
    // NaN: whoever reads what nothing has written sees it.
    std::memset(memory, 0xff, bytes);
    device->used += whole;
    *address = reinterpret_cast<uint64_t>(memory);
    d.memory[*address] = bytes;
    d.owner[*address] = device;
    return SUCCESS;
}

int cuMemFreeAsync(uint64_t address, Handle stream) {
    ENTER(LAUNCH_FAILED);
    Driver &d = driver();
    {
        // The memory counts as free at once: what comes later on the stream may have it.
        Guard guard(d.mutex);
        auto found = d.memory.find(address);
        if (found == d.memory.end() || !d.owner[address]) return INVALID_VALUE;
        d.owner[address]->used -= (found->second + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
        d.owner[address] = nullptr;
    }
    static_cast<Stream *>(stream)->push([address] {
        Driver &d = driver();
        Guard guard(d.mutex);
        auto found = d.memory.find(address);
        std::memset(reinterpret_cast<void *>(address), 0xff, found->second);
        std::free(reinterpret_cast<void *>(address));
        d.owner.erase(address);
        d.memory.erase(found);
        return SUCCESS;
    });
    return SUCCESS;
}

int cuMemHostAlloc(void **address, size_t bytes, unsigned) {
    ENTER(OUT_OF_MEMORY);
    *address = std::aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
    if (!*address) return OUT_OF_MEMORY;
    Guard guard(driver().mutex);
    driver().pinned[reinterpret_cast<uint64_t>(*address)] = bytes;
    return SUCCESS;
}

int cuMemFreeHost(void *address) {
    // As the driver: not before all that was asked for is done.
    std::vector<Stream *> streams;
    {
        Guard guard(driver().streams_mutex);
        streams.assign(driver().streams.begin(), driver().streams.end());
    }
    for (Stream *stream : streams) stream->synchronize();
    Guard guard(driver().mutex);
    driver().pinned.erase(reinterpret_cast<uint64_t>(address));
    std::free(address);
    return SUCCESS;
}

int cuMemcpyHtoDAsync_v2(uint64_t to, const void *from, size_t bytes, Handle stream) {
    ENTER(LAUNCH_FAILED);
    if (pinned(from)) {
        // It is read when the copy's turn comes.
        static_cast<Stream *>(stream)->push([=]() -> int {
            if (int error = check("cuMemcpyHtoDAsync", to, bytes)) return error;
            std::memcpy(reinterpret_cast<void *>(to), from, bytes);
            return SUCCESS;
        });
        return SUCCESS;
    }
    // Pageable memory is staged before the call returns.
    auto staged = std::make_shared<std::vector<char>>(static_cast<const char *>(from), static_cast<const char *>(from) + bytes);
    static_cast<Stream *>(stream)->push([to, staged]() -> int {
        if (int error = check("cuMemcpyHtoDAsync", to, staged->size())) return error;
        std::memcpy(reinterpret_cast<void *>(to), staged->data(), staged->size());
        return SUCCESS;
    });
    return SUCCESS;
}

int cuMemcpyDtoHAsync_v2(void *to, uint64_t from, size_t bytes, Handle stream) {
    ENTER(LAUNCH_FAILED);
    static_cast<Stream *>(stream)->push([=]() -> int {
        if (int error = check("cuMemcpyDtoHAsync", from, bytes)) return error;
        std::memcpy(to, reinterpret_cast<void *>(from), bytes);
        return SUCCESS;
    });
    return SUCCESS;
}

int cuMemcpyDtoDAsync_v2(uint64_t to, uint64_t from, size_t bytes, Handle stream) {
    ENTER(LAUNCH_FAILED);
    static_cast<Stream *>(stream)->push([=]() -> int {
        if (int error = check("cuMemcpyDtoDAsync", from, bytes)) return error;
        if (int error = check("cuMemcpyDtoDAsync", to, bytes)) return error;
        if (from < to + bytes && to < from + bytes) return INVALID_VALUE;
        std::memcpy(reinterpret_cast<void *>(to), reinterpret_cast<void *>(from), bytes);
        return SUCCESS;
    });
    return SUCCESS;
}

int cuMemsetD8Async(uint64_t at, unsigned char byte, size_t bytes, Handle stream) {
    ENTER(LAUNCH_FAILED);
    static_cast<Stream *>(stream)->push([=]() -> int {
        if (int error = check("cuMemsetD8Async", at, bytes)) return error;
        std::memset(reinterpret_cast<void *>(at), byte, bytes);
        return SUCCESS;
    });
    return SUCCESS;
}

int cuStreamCreate(Handle *stream, unsigned) {
    ENTER(OUT_OF_MEMORY);
    if (!current) return INVALID_CONTEXT;
    Stream *made = new Stream;
    made->device = current;
    {
        Guard guard(driver().streams_mutex);
        driver().streams.insert(made);
    }
    std::thread([made] { made->serve(); }).detach();
    *stream = made;
    return SUCCESS;
}

int cuStreamDestroy_v2(Handle stream) {
    Stream *it = static_cast<Stream *>(stream);
    {
        Guard guard(driver().streams_mutex);
        driver().streams.erase(it);
    }
    Guard guard(it->mutex);
    it->ending = true; // its thread ends when the queue is empty; the object stays
    it->more.notify_one();
    return SUCCESS;
}

int cuStreamSynchronize(Handle stream) {
    ENTER(LAUNCH_FAILED);
    static_cast<Stream *>(stream)->synchronize();
    return driver().sticky.load();
}

int cuEventCreate(Handle *event, unsigned) {
    ENTER(OUT_OF_MEMORY);
    *event = new Event;
    return SUCCESS;
}

int cuEventDestroy_v2(Handle event) {
    delete static_cast<Event *>(event);
    return SUCCESS;
}

int cuEventRecord(Handle event, Handle stream) {
    ENTER(LAUNCH_FAILED);
    std::shared_ptr<Point> point = static_cast<Event *>(event)->point;
    uint64_t number;
    {
        Guard guard(point->mutex);
        number = ++point->asked;
    }
    static_cast<Stream *>(stream)->push([point, number] {
        Guard guard(point->mutex);
        point->reached = number;
        point->at = std::chrono::steady_clock::now();
        point->changed.notify_all();
        return SUCCESS;
    });
    return SUCCESS;
}

int cuStreamWaitEvent(Handle stream, Handle event, unsigned) {
    ENTER(LAUNCH_FAILED);
    std::shared_ptr<Point> point = static_cast<Event *>(event)->point;
    uint64_t number;
    {
        Guard guard(point->mutex);
        number = point->asked;
    }
    static_cast<Stream *>(stream)->push([point, number] {
        std::unique_lock<std::mutex> lock(point->mutex);
        while (!point->changed.wait_for(lock, std::chrono::milliseconds(50), [&] { return point->reached >= number; }))
            if (driver().sticky.load()) break;
        return SUCCESS;
    });
    return SUCCESS;
}

int cuEventQuery(Handle event) {
    ENTER(LAUNCH_FAILED);
    urge();
    Point &point = *static_cast<Event *>(event)->point;
    Guard guard(point.mutex);
    return point.reached >= point.asked ? SUCCESS : NOT_READY;
}

int cuEventSynchronize(Handle event) {
    ENTER(LAUNCH_FAILED);
    urge();
    Point &point = *static_cast<Event *>(event)->point;
    std::unique_lock<std::mutex> lock(point.mutex);
    while (!point.changed.wait_for(lock, std::chrono::milliseconds(50), [&] { return point.reached >= point.asked; }))
        if (int error = driver().sticky.load()) return error;
    return driver().sticky.load();
}

int cuEventElapsedTime(float *milliseconds, Handle start, Handle end) {
    ENTER(LAUNCH_FAILED);
    Point &first = *static_cast<Event *>(start)->point, &last = *static_cast<Event *>(end)->point;
    if (&first == &last) {
        *milliseconds = 0;
        return SUCCESS;
    }
    std::scoped_lock both(first.mutex, last.mutex);
    if (!first.asked || !last.asked) return INVALID_HANDLE;
    if (first.reached < first.asked || last.reached < last.asked) return NOT_READY;
    *milliseconds = std::chrono::duration<float, std::milli>(last.at - first.at).count();
    return SUCCESS;
}

int cuModuleLoadData(Handle *module, const void *image) {
    ENTER(INVALID_IMAGE);
    if (std::memcmp(image, "stand-in cubin ", 15) != 0) return INVALID_IMAGE;
    *module = new Module;
    return SUCCESS;
}

int cuModuleUnload(Handle module) {
    delete static_cast<Module *>(module);
    return SUCCESS;
}

struct Kernel {
    std::string name;
    emulation::Bind bind;
};

int cuModuleGetFunction(Handle *function, Handle module, const char *name) {
    ENTER(NOT_FOUND);
    if (static_cast<Module *>(module)->magic != MAGIC) return INVALID_HANDLE;
    emulation::Bind bind = emulation::find(name);
    if (!bind) return NOT_FOUND;
    *function = new Kernel{name, bind};
    return SUCCESS;
}

int cuFuncSetAttribute(Handle, int attribute, int value) {
    ENTER(INVALID_VALUE);
    return attribute == 8 && value <= 232448 ? SUCCESS : INVALID_VALUE;
}

int cuLaunchKernel(Handle function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared,
                   Handle stream, void **arguments, void **) {
    ENTER(LAUNCH_FAILED);
    driver().launches++;
    uint64_t threads = uint64_t(bx) * by * bz;
    if (!gx || !gy || !gz || gx > 0x7fffffffu || gy > 65535 || gz > 65535) return INVALID_VALUE;
    if (!threads || threads > 1024 || threads % 32 != 0 || shared > 232448) return INVALID_VALUE;
    Kernel *kernel = static_cast<Kernel *>(function);
    emulation::Call call = kernel->bind(arguments);
    static_cast<Stream *>(stream)->push([=]() -> int {
        for (uint64_t address : call.addresses)
            if (int error = check(kernel->name.c_str(), address, 0)) return error;
        auto start = std::chrono::steady_clock::now();
        emulation::run(kernel->name.c_str(), {gx, gy, gz}, {bx, by, bz}, shared, call.body);
        Driver &d = driver();
        if (d.counting) {
            std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
            Guard guard(d.mutex);
            auto &count = d.counts[kernel->name];
            count.first++;
            count.second += took.count();
        }
        return SUCCESS;
    });
    return SUCCESS;
}

int cuGetErrorName(int error, const char **name) {
    switch (error) {
    case INVALID_VALUE: *name = "CUDA_ERROR_INVALID_VALUE"; return SUCCESS;
    case OUT_OF_MEMORY: *name = "CUDA_ERROR_OUT_OF_MEMORY"; return SUCCESS;
    case NO_DEVICE: *name = "CUDA_ERROR_NO_DEVICE"; return SUCCESS;
    case INVALID_DEVICE: *name = "CUDA_ERROR_INVALID_DEVICE"; return SUCCESS;
    case INVALID_IMAGE: *name = "CUDA_ERROR_INVALID_IMAGE"; return SUCCESS;
    case INVALID_CONTEXT: *name = "CUDA_ERROR_INVALID_CONTEXT"; return SUCCESS;
    case INVALID_HANDLE: *name = "CUDA_ERROR_INVALID_HANDLE"; return SUCCESS;
    case NOT_FOUND: *name = "CUDA_ERROR_NOT_FOUND"; return SUCCESS;
    case NOT_READY: *name = "CUDA_ERROR_NOT_READY"; return SUCCESS;
    case ILLEGAL_ADDRESS: *name = "CUDA_ERROR_ILLEGAL_ADDRESS"; return SUCCESS;
    case LAUNCH_FAILED: *name = "CUDA_ERROR_LAUNCH_FAILED"; return SUCCESS;
    case UNAVAILABLE: *name = "CUDA_ERROR_DEVICE_UNAVAILABLE"; return SUCCESS;
    default: *name = nullptr; return INVALID_VALUE;
    }
}

int cuGetErrorString(int error, const char **text) {
    *text = error == ILLEGAL_ADDRESS ? "an illegal memory access was encountered" : nullptr;
    return *text ? SUCCESS : INVALID_VALUE;
}

} // extern "C"
