// Whether the stand-in does what it says: `build.sh --test FOLDER` builds and runs this. Each case is a process of its own, so that
// it may abort, and has its own variables.
#include "emulation.h"
#include "dev.cuh"

#include <chrono>
#include <csignal>
#include <string>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>
#include <vector>

using Handle = void *;

extern "C" {
int cuInit(unsigned);
int cuDeviceGetCount(int *);
int cuDevicePrimaryCtxRetain(Handle *, int);
int cuCtxSetCurrent(Handle);
int cuMemGetInfo_v2(size_t *, size_t *);
int cuMemAllocAsync(uint64_t *, size_t, Handle);
int cuMemFreeAsync(uint64_t, Handle);
int cuMemcpyHtoDAsync_v2(uint64_t, const void *, size_t, Handle);
int cuMemcpyDtoHAsync_v2(void *, uint64_t, size_t, Handle);
int cuMemcpyDtoDAsync_v2(uint64_t, uint64_t, size_t, Handle);
int cuMemsetD8Async(uint64_t, unsigned char, size_t, Handle);
int cuStreamCreate(Handle *, unsigned);
int cuStreamDestroy_v2(Handle);
int cuStreamSynchronize(Handle);
int cuStreamWaitEvent(Handle, Handle, unsigned);
int cuEventCreate(Handle *, unsigned);
int cuEventRecord(Handle, Handle);
int cuEventQuery(Handle);
int cuEventSynchronize(Handle);
int cuEventElapsedTime(float *, Handle, Handle);
int cuModuleLoadData(Handle *, const void *);
int cuModuleGetFunction(Handle *, Handle, const char *);
int cuLaunchKernel(Handle, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, Handle, void **, void **);
int cublasLtMatmul(Handle, Handle, const void *, uint64_t, Handle, uint64_t, Handle, const void *, uint64_t, Handle, uint64_t, Handle,
                   const void *, uint64_t, size_t, Handle);
int cublasLtMatmulDescCreate(Handle *, int, int);
int cublasLtMatmulDescSetAttribute(Handle, int, const void *, size_t);
int cublasLtMatrixLayoutCreate(Handle *, int, uint64_t, uint64_t, int64_t);
int cublasLtMatrixLayoutSetAttribute(Handle, int, const void *, size_t);
int cublasLtMatmulPreferenceCreate(Handle *);
int cublasLtMatmulPreferenceSetAttribute(Handle, int, const void *, size_t);
int cublasLtMatmulAlgoGetHeuristic(Handle, Handle, Handle, Handle, Handle, Handle, Handle, int, void *, int *);
}

#define CHECK(that)                                                                                        \
    do {                                                                                                   \
        if (!(that)) {                                                                                     \
            std::fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #that);                        \
            std::_Exit(1);                                                                                 \
        }                                                                                                  \
    } while (0)

KERNEL test_places(u32 *out) {
    u64 block = blockIdx.x + u64(gridDim.x) * (blockIdx.y + u64(gridDim.y) * blockIdx.z);
    u32 thread = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
    out[block * 64 + thread] = threadIdx.x | threadIdx.y << 8 | threadIdx.z << 16;
}
TUNESMITH_REGISTER(test_places)

// Every exchange there is, with an order-dependent result if a thread does not wait.
KERNEL test_exchanges(u32 *out) {
    __shared__ u32 places[256];
    DYNAMIC_SHARED(u32, more);
    u32 i = threadIdx.x;
    for (u32 round = 0; round < 3; round++) {
        places[i] = i * 3 + round;
        more[i] = i;
        __syncthreads();
        u32 sum = places[255 - i] + more[(i + 77) % 256];
        sum += __shfl_xor_sync(0xffffffffu, i, 5) + __shfl_down_sync(0xffffffffu, i, 3) * 2 + __shfl_sync(0xffffffffu, i, 9) * 4;
        sum += __popc(__ballot_sync(0xffffffffu, i % 7 == 0));
        if (i % WARP < 8) sum += __shfl_sync(0xffu, i, 2);
        sum += u32(block_sum(float(i))) + u32(block_sum(double(i % 5))) + u32(block_max(float(i ^ 21)));
        sum += u32(warp_sum(float(i))) + u32(warp_max(float(i)));
        out[round * 256 + i] = sum;
        __syncthreads();
    }
}
TUNESMITH_REGISTER(test_exchanges)

// Dynamic and static shared memory, which nothing has written in this block.
KERNEL test_unwritten(float *out) {
    __shared__ float kept[32];
    DYNAMIC_SHARED(float, more);
    out[(2 * blockIdx.x) * 32 + threadIdx.x] = kept[threadIdx.x];
    out[(2 * blockIdx.x + 1) * 32 + threadIdx.x] = more[threadIdx.x];
    if (blockIdx.x < 100) kept[threadIdx.x] = more[threadIdx.x] = 1.0f;
}
TUNESMITH_REGISTER(test_unwritten)

// Threads that ended count as arrived.
KERNEL test_ends(u32 *out, u32 stay) {
    __shared__ u32 place[64];
    if (threadIdx.x >= stay) return;
    place[threadIdx.x] = threadIdx.x;
    __syncthreads();
    out[threadIdx.x] = place[stay - 1 - threadIdx.x];
}
TUNESMITH_REGISTER(test_ends)

KERNEL test_divergent() {
    if (threadIdx.x < 40) {
        __syncthreads();
    } else {
        __syncthreads();
    }
}
TUNESMITH_REGISTER(test_divergent)

KERNEL test_lost_lane(u32 *out) {
    if (threadIdx.x == 3) {
        __syncthreads();
    } else {
        out[0] = __shfl_sync(0xffffffffu, threadIdx.x, 0);
    }
}
TUNESMITH_REGISTER(test_lost_lane)

// sums [16 x 16] = a [16 x 16] b [16 x 16] in bfloat16, and what lies in shared memory before asynchronous copies are waited for.
KERNEL test_matrices(const bf16 *a, const bf16 *b, float *sums, u32 *early) {
    __shared__ __align__(16) bf16 tiles[2][256];
    u32 lane = threadIdx.x;
    emulation::copy_async(&tiles[0][8 * lane], a + 8 * lane, 16);
    emulation::copies_end();
    emulation::copy_async(&tiles[1][8 * lane], b + 8 * lane, 16);
    emulation::copies_end();
    emulation::copies_wait(1);
    __syncthreads();
    std::memcpy(early + lane, &tiles[0][2 * lane], 4);
    std::memcpy(early + 32 + lane, &tiles[1][2 * lane], 4);
    __syncthreads();
    emulation::copies_wait(0);
    __syncthreads();
    u32 rows[4], columns[4];
    emulation::load_matrices(rows, reinterpret_cast<char *>(&tiles[0][lane % 16 * 16 + lane / 16 * 8]), false);
    emulation::load_matrices(columns, reinterpret_cast<char *>(&tiles[1][lane % 16 * 16 + lane / 16 * 8]), true);
    for (u32 half = 0; half < 2; half++) {
        float part[4] = {};
        emulation::multiply(part, rows, columns[2 * half], columns[2 * half + 1], [](u16 bits) { return widen(bf16{bits}); });
        for (u32 e = 0; e < 4; e++) sums[(lane / 4 + e / 2 * 8) * 16 + 8 * half + lane % 4 * 2 + e % 2] = part[e];
    }
}
TUNESMITH_REGISTER(test_matrices)

static int deep(volatile char *outer, int levels) {
    volatile char here[4096];
    here[0] = outer ? outer[0] : 0;
    return levels ? deep(here, levels - 1) + here[0] : 0;
}
KERNEL test_deep(int levels) { deep(nullptr, levels); }
TUNESMITH_REGISTER(test_deep)

KERNEL test_add(float *x, float more, u64 count) {
    u64 i = u64(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i < count) x[i] += more;
}
TUNESMITH_REGISTER(test_add)

namespace {

Handle begin() {
    Handle context, stream;
    CHECK(cuInit(0) == 0 && cuDevicePrimaryCtxRetain(&context, 0) == 0 && cuCtxSetCurrent(context) == 0);
    CHECK(cuStreamCreate(&stream, 1) == 0);
    return stream;
}

Handle function(const char *name) {
    Handle module, function;
    CHECK(cuModuleLoadData(&module, "stand-in cubin 0") == 0 && cuModuleGetFunction(&function, module, name) == 0);
    return function;
}

template <class... A> 
int launch(Handle stream, const char *name, unsigned blocks, unsigned threads, unsigned shared, A... arguments) {
    void *pointers[] = {&arguments..., nullptr};
    return cuLaunchKernel(function(name), blocks, 1, 1, threads, 1, 1, shared, stream, pointers, nullptr);
}

template <class T> T *memory(Handle stream, size_t count) {
    uint64_t address;
    CHECK(cuMemAllocAsync(&address, count * sizeof(T), stream) == 0);
    return reinterpret_cast<T *>(address);
}

uint64_t place(const void *pointer) { return reinterpret_cast<uint64_t>(pointer); }

template <class T> std::vector<T> read(Handle stream, const T *from, size_t count) {
    std::vector<T> out(count);
    CHECK(cuMemcpyDtoHAsync_v2(out.data(), place(from), count * sizeof(T), stream) == 0 && cuStreamSynchronize(stream) == 0);
    return out;
}

template <class T> T *copied(Handle stream, const std::vector<T> &values) {
    T *to = memory<T>(stream, values.size());
    CHECK(cuMemcpyHtoDAsync_v2(place(to), values.data(), values.size() * sizeof(T), stream) == 0);
    return to;
}

void threads() {
    Handle stream = begin();
    u32 *out = memory<u32>(stream, 24 * 64);
    void *arguments[] = {&out};
    CHECK(cuLaunchKernel(function("test_places"), 4, 3, 2, 8, 4, 2, 0, stream, arguments, nullptr) == 0);
    auto places = read(stream, out, 24 * 64);
    for (u32 i = 0; i < 24 * 64; i++) CHECK(places[i] == ((i % 8) | (i / 8 % 4) << 8 | (i / 32 % 2) << 16));

    out = memory<u32>(stream, 3 * 256);
    CHECK(launch(stream, "test_exchanges", 1, 256, 1024, out) == 0);
    auto sums = read(stream, out, 3 * 256);
    for (u32 round = 0; round < 3; round++)
        for (u32 i = 0; i < 256; i++) {
            u32 first = i / 32 * 32, votes = 0, of_fives = 0, most = 0;
            for (u32 lane = first; lane < first + 32; lane++) votes += lane % 7 == 0;
            for (u32 j = 0; j < 256; j++) of_fives += j % 5, most = std::max(most, j ^ 21);
            u32 down = i % 32 + 3 < 32 ? i + 3 : i, expected = (255 - i) * 3 + round + (i + 77) % 256;
            expected += (i ^ 5) + down * 2 + (first + 9) * 4 + votes + (i % 32 < 8 ? first + 2 : 0);
            expected += 255 * 128 + of_fives + most + (first * 32 + 31 * 16) + first + 31;
            CHECK(sums[round * 256 + i] == expected);
        }

    u32 *few = memory<u32>(stream, 64);
    CHECK(launch(stream, "test_ends", 1, 64, 0, few, u32(37)) == 0);
    auto back = read(stream, few, 37);
    for (u32 i = 0; i < 37; i++) CHECK(back[i] == 36 - i);
}

void matrices() {
    Handle stream = begin();
    std::vector<bf16> a(256), b(256);
    for (int i = 0; i < 256; i++) a[i] = to_bf16(float(i % 13 - 6)), b[i] = to_bf16(float(i * 7 % 11 - 5));
    bf16 *left = memory<bf16>(stream, 256), *right = memory<bf16>(stream, 256);
    CHECK(cuMemcpyHtoDAsync_v2(place(left), a.data(), 512, stream) == 0 && cuMemcpyHtoDAsync_v2(place(right), b.data(), 512, stream) == 0);
    float *sums = memory<float>(stream, 256);
    u32 *early = memory<u32>(stream, 64);
    const bf16 *from_left = left, *from_right = right;
    CHECK(launch(stream, "test_matrices", 1, 32, 0, from_left, from_right, sums, early) == 0);
    auto found = read(stream, sums, 256);
    for (int i = 0; i < 256; i++) {
        float expected = 0;
        for (int k = 0; k < 16; k++) expected += widen(a[i / 16 * 16 + k]) * widen(b[k * 16 + i % 16]);
        CHECK(found[i] == expected);
    }
    auto words = read(stream, early, 64);
    for (int i = 0; i < 32; i++) {
        u32 there;
        std::memcpy(&there, &a[2 * i], 4);
        CHECK(words[i] == there && words[32 + i] == 0xffffffff);
    }
}

void unwritten() {
    Handle stream = begin();
    float *out = memory<float>(stream, 4 * 64);
    CHECK(launch(stream, "test_unwritten", 4, 32, 128, out) == 0);
    for (float value : read(stream, out, 4 * 64)) CHECK(std::isnan(value));
    for (float value : read(stream, memory<float>(stream, 99), 99)) CHECK(std::isnan(value));
}

void run_to_abort(const char *name) {
    Handle stream = begin();
    void *out = memory<u32>(stream, 64);
    int levels = 1000;
    void *arguments[] = {name == std::string("test_deep") ? static_cast<void *>(&levels) : &out};
    CHECK(cuLaunchKernel(function(name), 1, 1, 1, 64, 1, 1, 0, stream, arguments, nullptr) == 0);
    cuStreamSynchronize(stream);
}

void streams() {
    Handle one = begin(), two, start, end;
    CHECK(cuStreamCreate(&two, 1) == 0 && cuEventCreate(&start, 0) == 0 && cuEventCreate(&end, 0) == 0);
    std::vector<float> host(1000, 1.0f), back(1000, 7.0f);
    float *x = memory<float>(one, 1000), *y = memory<float>(two, 1000);
    CHECK(cuEventRecord(start, one) == 0);
    CHECK(cuMemcpyHtoDAsync_v2(place(x), host.data(), 4000, one) == 0);
    std::fill(host.begin(), host.end(), 5.0f); // the copy is staged
    for (int i = 0; i < 10; i++) CHECK(launch(one, "test_add", 4, 256, 0, x, 2.0f, u64(1000)) == 0);
    CHECK(cuEventRecord(end, one) == 0 && cuStreamWaitEvent(two, end, 0) == 0);
    CHECK(cuMemcpyDtoDAsync_v2(place(y), place(x), 4000, two) == 0);
    CHECK(cuMemsetD8Async(place(y), 0, 40, two) == 0);
    CHECK(cuMemcpyDtoHAsync_v2(back.data(), place(y), 4000, two) == 0);
    std::this_thread::sleep_for(std::chrono::milliseconds(30));
    CHECK(back[0] == 7.0f && back[999] == 7.0f); // nobody has waited for it
    CHECK(cuStreamSynchronize(two) == 0);
    for (int i = 0; i < 1000; i++) CHECK(back[i] == (i < 10 ? 0.0f : 21.0f));
    while (cuEventQuery(end) != 0) std::this_thread::yield();
    float milliseconds;
    CHECK(cuEventSynchronize(end) == 0 && cuEventElapsedTime(&milliseconds, start, end) == 0 && milliseconds > 0);
    // More than a queue keeps back is done unasked.
    for (int i = 0; i < 100; i++) CHECK(cuEventRecord(start, two) == 0);
    CHECK(cuStreamDestroy_v2(two) == 0 && cuEventSynchronize(start) == 0);
}

// A thread waits while another queues more, which nobody waits for.
void two_threads() {
    Handle stream = begin(), event;
    CHECK(cuEventCreate(&event, 0) == 0);
    for (int round = 0; round < 200; round++) {
        CHECK(cuEventRecord(event, stream) == 0);
        std::thread other([&] {
            for (int i = 0; i < 40; i++) CHECK(cuEventRecord(event, stream) == 0);
        });
        CHECK(cuStreamSynchronize(stream) == 0);
        other.join();
    }
}

void out_of_memory() {
    Handle stream = begin();
    size_t free, total;
    uint64_t first, second;
    CHECK(cuMemGetInfo_v2(&free, &total) == 0 && free == 1 << 20 && total == 1 << 20);
    CHECK(cuMemAllocAsync(&first, 700 << 10, stream) == 0 && cuMemAllocAsync(&second, 700 << 10, stream) == 2);
    CHECK(cuMemGetInfo_v2(&free, &total) == 0 && free == 324 << 10);
    CHECK(cuMemFreeAsync(first, stream) == 0 && cuMemAllocAsync(&second, 700 << 10, stream) == 0);
    CHECK(cuStreamSynchronize(stream) == 0 && cuMemFreeAsync(first, stream) == (first == second ? 0 : 1));
}

void illegal_addresses(int which) {
    Handle stream = begin(), other, event;
    CHECK(cuStreamCreate(&other, 1) == 0 && cuEventCreate(&event, 0) == 0);
    float *x = memory<float>(stream, 100), *gone = memory<float>(stream, 100);
    char host[404];
    CHECK(cuMemFreeAsync(place(gone), stream) == 0 && cuStreamSynchronize(stream) == 0);
    int queued = which == 0   ? cuMemsetD8Async(place(x) + 4, 0, 400, stream)
                 : which == 1 ? cuMemcpyHtoDAsync_v2(place(x), host, 404, stream)
                 : which == 2 ? cuMemcpyDtoHAsync_v2(host, place(gone), 4, stream)
                 : which == 3 ? cuMemcpyDtoDAsync_v2(place(x), place(gone), 4, stream)
                              : launch(stream, "test_add", 1, 32, 0, gone, 1.0f, u64(1));
    CHECK(queued == 0 && cuEventRecord(event, stream) == 0 && cuStreamWaitEvent(other, event, 0) == 0);
    // The event never comes: who waits for it goes on.
    CHECK(cuStreamSynchronize(stream) == 700 && cuStreamSynchronize(other) != 0);
    CHECK(cuMemAllocAsync(reinterpret_cast<uint64_t *>(&x), 4, stream) == 700);
}

void failures() {
    Handle stream = begin();
    uint64_t address;
    CHECK(cuMemAllocAsync(&address, 4, stream) == 0 && cuMemAllocAsync(&address, 4, stream) == 2);
    CHECK(cuMemAllocAsync(&address, 4, stream) == 0);
}

void lost_device() {
    Handle stream = begin();
    float *x = memory<float>(stream, 32);
    CHECK(launch(stream, "test_add", 1, 32, 0, x, 1.0f, u64(32)) == 0);
    CHECK(launch(stream, "test_add", 1, 32, 0, x, 1.0f, u64(32)) == 0);
    CHECK(cuStreamSynchronize(stream) == 46);
}

void limits() {
    Handle stream = begin(), it;
    int count;
    CHECK(cuDeviceGetCount(&count) == 0 && count == 3);
    CHECK(cuModuleLoadData(&it, "\x7f"
                                "ELF of another compiler") == 200);
    CHECK(cuModuleLoadData(&it, "stand-in cubin 0") == 0 && cuModuleGetFunction(&it, it, "nothing") == 500);
    float *x = memory<float>(stream, 32);
    CHECK(launch(stream, "test_add", 0, 32, 0, x, 1.0f, u64(32)) == 1);
    CHECK(launch(stream, "test_add", 1, 1056, 0, x, 1.0f, u64(32)) == 1);
    CHECK(launch(stream, "test_add", 1, 32, (227 << 10) + 1, x, 1.0f, u64(32)) == 1);
    CHECK(launch(stream, "test_add", 1, 1024, 227 << 10, x, 1.0f, u64(32)) == 0 && cuStreamSynchronize(stream) == 0);
}

struct Shape {
    uint64_t m = 5, n = 3, k = 19;
    int transa = 0, transb = 0, in = 0, out = 0, batch = 1;
    float beta = 0.5f;
    uint64_t slack = 2;
    bool dead = false;
    int shift = 0;
};

float number(const std::vector<uint8_t> &bytes, int type, size_t index) {
    if (type == 0) {
        float x;
        std::memcpy(&x, &bytes[index * 4], 4);
        return x;
    }
    u16 bits;
    std::memcpy(&bits, &bytes[index * 2], 2);
    return type == 2 ? widen(f16{bits}) : widen(bf16{bits});
}

std::vector<uint8_t> numbers(size_t count, int type, u64 seed) {
    std::vector<uint8_t> out(count * (type == 0 ? 4 : 2));
    for (size_t i = 0; i < count; i++) {
        float x = float(int(mix(seed * 1000003 + i) % 33) - 16) / 8.0f;
        u16 bits = type == 2 ? to_f16(x).bits : to_bf16(x).bits;
        if (type == 0) std::memcpy(&out[i * 4], &x, 4);
        else std::memcpy(&out[i * 2], &bits, 2);
    }
    return out;
}

// Status of a product that is refused; 0 if it is done, and right.
int product(Handle stream, Shape s) {
    uint64_t a_rows = s.transa ? s.k : s.m, a_cols = s.transa ? s.m : s.k, b_rows = s.transb ? s.n : s.k, b_cols = s.transb ? s.k : s.n;
    uint64_t rows[4] = {a_rows, b_rows, s.m, s.m}, cols[4] = {a_cols, b_cols, s.n, s.n}, leading[4];
    int types[4] = {s.in, s.in, s.out, s.out};
    Handle layouts[4], desc, preference;
    std::vector<uint8_t> values[4];
    uint8_t *places[4];
    int64_t strides[4];
    uint32_t alignment = s.out == 0 && s.in == 0 ? 4 : 2;
    CHECK(cublasLtMatmulPreferenceCreate(&preference) == 0);
    for (int i = 0; i < 4; i++) {
        leading[i] = rows[i] + s.slack;
        strides[i] = int64_t(leading[i] * cols[i] + 1);
        int made = cublasLtMatrixLayoutCreate(&layouts[i], types[i], rows[i], cols[i], int64_t(leading[i]));
        if (made) return made;
        CHECK(cublasLtMatrixLayoutSetAttribute(layouts[i], 5, &s.batch, 4) == 0);
        CHECK(cublasLtMatrixLayoutSetAttribute(layouts[i], 6, &strides[i], 8) == 0);
        CHECK(cublasLtMatmulPreferenceSetAttribute(preference, 5 + i, &alignment, 4) == 0);
        values[i] = numbers(size_t(strides[i]) * s.batch, types[i], u64(i) + s.k);
        places[i] = copied(stream, values[i]);
    }
    CHECK(cublasLtMatmulDescCreate(&desc, 68, 0) == 0);
    CHECK(cublasLtMatmulDescSetAttribute(desc, 3, &s.transa, 4) == 0 && cublasLtMatmulDescSetAttribute(desc, 4, &s.transb, 4) == 0);
    uint64_t algorithm[12];
    int found;
    int known = cublasLtMatmulAlgoGetHeuristic(nullptr, desc, layouts[0], layouts[1], layouts[2], layouts[3], preference, 1, algorithm, &found);
    if (known) return known;
    if (s.dead) CHECK(cuMemFreeAsync(place(places[1]), stream) == 0);
    float alpha = 1.5f;
    int done = cublasLtMatmul(nullptr, desc, &alpha, place(places[0]) + uint64_t(s.shift), layouts[0], place(places[1]), layouts[1], &s.beta,
                              place(places[2]), layouts[2], place(places[3]), layouts[3], algorithm, 0, 0, stream);
    if (done) return done;
    if (s.dead) return cuStreamSynchronize(stream);
    auto result = read(stream, places[3], values[3].size());
    for (int one = 0; one < s.batch; one++)
        for (uint64_t col = 0; col < leading[3] * s.n; col++) {
            uint64_t i = col % leading[3], j = col / leading[3];
            size_t at = size_t(one) * size_t(strides[3]) + col;
            float expected = number(values[3], s.out, at);
            if (i < s.m) {
                double sum = 0;
                for (uint64_t k = 0; k < s.k; k++) {
                    uint64_t x = s.transa ? i * leading[0] + k : k * leading[0] + i, y = s.transb ? k * leading[1] + j : j * leading[1] + k;
                    sum += double(number(values[0], s.in, size_t(one * strides[0]) + x)) * number(values[1], s.in, size_t(one * strides[1]) + y);
                }
                expected = float(1.5 * sum + s.beta * number(values[2], s.out, size_t(one * strides[2]) + j * leading[2] + i));
                if (s.out == 2) expected = widen(to_f16(expected));
                if (s.out == 14) expected = widen(to_bf16(expected));
            }
            CHECK(number(result, s.out, at) == expected);
        }
    return 0;
}

void products() {
    Handle stream = begin();
    for (int transposes = 0; transposes < 4; transposes++)
        for (int types = 0; types < 5; types++)
            for (int batch = 1; batch < 4; batch += 2) {
                Shape shape;
                shape.transa = transposes & 1, shape.transb = transposes >> 1, shape.batch = batch;
                shape.in = types == 0 ? 0 : types < 3 ? 14 : 2;
                shape.out = types % 2 == 0 ? shape.in : 0;
                if (transposes == 2) shape.beta = 0;
                CHECK(product(stream, shape) == 0);
            }
    Shape wrong;
    wrong.slack = uint64_t(-1); // a leading dimension below the rows
    CHECK(product(stream, wrong) == 7);
    wrong = Shape{};
    wrong.shift = 2;
    CHECK(product(stream, wrong) == 7);
    wrong = Shape{};
    wrong.out = 14; // float32 in, bfloat16 out: there is none
    CHECK(product(stream, wrong) == 15);
    wrong = Shape{};
    wrong.dead = true;
    CHECK(product(stream, wrong) == 700);
}

void counts() {
    Handle stream = begin();
    float *x = memory<float>(stream, 32);
    for (int i = 0; i < 3; i++) CHECK(launch(stream, "test_add", 1, 32, 0, x, 1.0f, u64(32)) == 0);
    CHECK(cuStreamSynchronize(stream) == 0);
}

// The process ends while streams work and wait.
void leaves() {
    Handle stream = begin();
    u32 *out = memory<u32>(stream, 3 * 256);
    for (int i = 0; i < 200; i++) CHECK(launch(stream, "test_exchanges", 1, 256, 1024, out) == 0);
}

int failed = 0;

// Runs a case with a variable, and expects that it ends so: 0, or a signal.
template <class F> void run(const char *name, const char *variable, int signal, F work) {
    std::fflush(nullptr);
    pid_t child = fork();
    if (child == 0) {
        alarm(30);
        if (const char *equals = std::strchr(variable, '=')) setenv(std::string(variable, equals).c_str(), equals + 1, 1);
        if (signal) {
            if (!std::freopen("/dev/null", "w", stderr)) std::_Exit(1);
        }
        work();
        std::exit(0);
    }
    int status = 0;
    waitpid(child, &status, 0);
    bool right = signal ? WIFSIGNALED(status) && WTERMSIG(status) == signal : WIFEXITED(status) && WEXITSTATUS(status) == 0;
    std::printf("%s %s: %s\n", name, variable, right ? "ok" : "FAILED");
    failed += !right;
}

} // namespace

int main() {
    for (const char *order : {"forward", "reverse", "greedy", "random", "random:5", "random:6"}) {
        run("threads", (std::string("TUNESMITH_STAND_IN_ORDER=") + order).c_str(), 0, threads);
        run("matrices", (std::string("TUNESMITH_STAND_IN_ORDER=") + order).c_str(), 0, matrices);
        run("divergent barriers", (std::string("TUNESMITH_STAND_IN_ORDER=") + order).c_str(), SIGABRT, [] { run_to_abort("test_divergent"); });
        run("a lane that does not come", (std::string("TUNESMITH_STAND_IN_ORDER=") + order).c_str(), SIGABRT, [] { run_to_abort("test_lost_lane"); });
    }
    run("a stack's end", "", SIGSEGV, [] { run_to_abort("test_deep"); });
    run("unwritten memory", "", 0, unwritten);
    run("streams", "", 0, streams);
    run("two threads", "", 0, two_threads);
    run("out of memory", "TUNESMITH_STAND_IN_MEMORY=1048576", 0, out_of_memory);
    for (int which = 0; which < 5; which++)
        run("illegal addresses", "", 0, [which] { illegal_addresses(which); });
    run("failures", "TUNESMITH_STAND_IN_FAIL=cuMemAllocAsync:2", 0, failures);
    run("a lost device", "TUNESMITH_STAND_IN_FAIL=lost:1", 0, lost_device);
    run("limits", "TUNESMITH_STAND_IN_DEVICES=3", 0, limits);
    run("products", "", 0, products);
    std::string file = "/tmp/tunesmith-stand-in-" + std::to_string(getpid());
    run("counts", ("TUNESMITH_STAND_IN_COUNT=" + file).c_str(), 0, counts);
    FILE *in = std::fopen(file.c_str(), "r");
    char name[64];
    unsigned launches = 0;
    if (!in || std::fscanf(in, "%63s %u", name, &launches) != 2 || launches != 3 || name != std::string("test_add")) failed++;
    if (in) std::fclose(in);
    unlink(file.c_str());
    run("the process ends", "", 0, leaves);
    if (failed) std::printf("%d FAILED\n", failed);
    return failed != 0;
}
