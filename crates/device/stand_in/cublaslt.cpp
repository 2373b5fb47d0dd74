// Products of matrices: column-major, float32 sums; strict about pointers and leading dimensions.
#include "fail.h"
#include "worker.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

namespace {

enum Status { SUCCESS = 0, INVALID_VALUE = 7, INTERNAL_ERROR = 14, NOT_SUPPORTED = 15 };
enum Type { R_32F = 0, R_16F = 2, R_16BF = 14, R_8F_E4M3 = 28 };

struct Desc {
    int compute, transa = 0, transb = 0;
};

struct Layout {
    int type;
    uint64_t rows, cols;
    int64_t leading;
    int batch = 1;
    int64_t stride = 0;
};

struct Preference {
    size_t workspace = 0;
    uint32_t alignment[4] = {256, 256, 256, 256};
};

// cublasLtMatmulHeuristicResult_t
struct Choice {
    uint64_t algorithm[8];
    size_t workspace;
    int state;
    float waves;
    int reserved[4];
};

size_t size_of(int type) { return type == R_32F ? 4 : type == R_8F_E4M3 ? 1 : 2; }

float from_bf16(uint16_t bits) {
    uint32_t wide = uint32_t(bits) << 16;
    float value;
    std::memcpy(&value, &wide, 4);
    return value;
}

uint16_t to_bf16(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return uint16_t((bits >> 16) | 0x40);
    return uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

float from_f16(uint16_t bits) {
    uint32_t sign = uint32_t(bits & 0x8000) << 16, exponent = bits >> 10 & 31, fraction = bits & 1023, wide;
    if (exponent == 31) {
        wide = sign | 0x7f800000u | fraction << 13;
    } else if (exponent) {
        wide = sign | (exponent + 112) << 23 | fraction << 13;
    } else {
        float small = float(fraction) * 5.9604644775390625e-8f;
        return sign ? -small : small;
    }
    float value;
    std::memcpy(&value, &wide, 4);
    return value;
}

uint16_t to_f16(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    uint32_t sign = bits >> 16 & 0x8000, size = bits & 0x7fffffff;
    if (size > 0x7f800000u) return uint16_t(sign | 0x7e00);
    if (size >= 0x477ff000u) return uint16_t(sign | 0x7c00);
    if (size >= 0x38800000u) return uint16_t(sign | (size + 0xfff + (size >> 13 & 1) - 0x38000000u) >> 13);
    float magnitude, half = 0.5f;
    std::memcpy(&magnitude, &size, 4);
    volatile float sum = magnitude + half;
    float rounded = sum;
    uint32_t out;
    std::memcpy(&out, &rounded, 4);
    return uint16_t(sign | (out - 0x3f000000u));
}

float from_e4m3(uint8_t bits) {
    int exponent = bits >> 3 & 15, fraction = bits & 7;
    if (exponent == 15 && fraction == 7) return NAN;
    float size = exponent ? std::ldexp(float(8 + fraction), exponent - 10) : std::ldexp(float(fraction), -9);
    return bits & 0x80 ? -size : size;
}

float read(const char *base, int type, size_t index) {
    uint16_t bits;
    if (type == R_8F_E4M3) return from_e4m3(uint8_t(base[index]));
    if (type == R_32F) {
        float value;
        std::memcpy(&value, base + 4 * index, 4);
        return value;
    }
    std::memcpy(&bits, base + 2 * index, 2);
    return type == R_16F ? from_f16(bits) : from_bf16(bits);
}

void write(char *base, int type, size_t index, float value) {
    if (type == R_32F) {
        std::memcpy(base + 4 * index, &value, 4);
        return;
    }
    uint16_t bits = type == R_16F ? to_f16(value) : to_bf16(value);
    std::memcpy(base + 2 * index, &bits, 2);
}

// Rounded to 10 bits of fraction, ties to even.
float to_tf32(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    if ((bits & 0x7f800000u) != 0x7f800000u) bits = (bits + 0xfffu + ((bits >> 13) & 1)) & ~0x1fffu;
    std::memcpy(&value, &bits, 4);
    return value;
}

// Row-major float32 [rows, cols] of what is multiplied.
std::vector<float> widened(const char *base, const Layout &layout, bool transposed, bool by_rows, bool tf32) {
    size_t rows = transposed ? layout.cols : layout.rows, cols = transposed ? layout.rows : layout.cols;
    std::vector<float> out(rows * cols);
    for (size_t row = 0; row < rows; row++)
        for (size_t col = 0; col < cols; col++) {
            size_t at = transposed ? row * layout.leading + col : col * layout.leading + row;
            float value = read(base, layout.type, at);
            out[by_rows ? row * cols + col : col * rows + row] = tf32 ? to_tf32(value) : value;
        }
    return out;
}

bool aligned(const void *pointer, const Layout &layout) {
    return reinterpret_cast<uintptr_t>(pointer) % size_of(layout.type) == 0;
}

} // namespace

extern "C" {

int cublasLtCreate(void **handle) {
    if (fails(__func__)) return INTERNAL_ERROR;
    *handle = new int(0);
    return SUCCESS;
}

size_t cublasLtGetVersion() { return 130000; }

int cublasLtMatmulDescCreate(void **desc, int compute, int scale) {
    if (fails(__func__)) return INTERNAL_ERROR;
    if ((compute != 68 && compute != 77) || scale != R_32F) return NOT_SUPPORTED;
    *desc = new Desc{compute};
    return SUCCESS;
}

int cublasLtMatmulDescDestroy(void *desc) {
    delete static_cast<Desc *>(desc);
    return SUCCESS;
}

int cublasLtMatmulDescSetAttribute(void *desc, int attribute, const void *value, size_t bytes) {
    if (fails(__func__)) return INTERNAL_ERROR;
    if (bytes != 4) return INVALID_VALUE;
    int operation;
    std::memcpy(&operation, value, 4);
    if (operation != 0 && operation != 1) return NOT_SUPPORTED;
    if (attribute == 3) static_cast<Desc *>(desc)->transa = operation;
    else if (attribute == 4) static_cast<Desc *>(desc)->transb = operation;
    else return NOT_SUPPORTED;
    return SUCCESS;
}

int cublasLtMatrixLayoutCreate(void **layout, int type, uint64_t rows, uint64_t cols, int64_t leading) {
    if (fails(__func__)) return INTERNAL_ERROR;
    if (type != R_32F && type != R_16F && type != R_16BF && type != R_8F_E4M3) return NOT_SUPPORTED;
    if (!rows || !cols || leading < int64_t(rows)) return INVALID_VALUE;
    *layout = new Layout{type, rows, cols, leading};
    return SUCCESS;
}

int cublasLtMatrixLayoutDestroy(void *layout) {
    delete static_cast<Layout *>(layout);
    return SUCCESS;
}

int cublasLtMatrixLayoutSetAttribute(void *layout, int attribute, const void *value, size_t bytes) {
    if (fails(__func__)) return INTERNAL_ERROR;
    Layout *it = static_cast<Layout *>(layout);
    if (attribute == 5 && bytes == 4) std::memcpy(&it->batch, value, 4);
    else if (attribute == 6 && bytes == 8) std::memcpy(&it->stride, value, 8);
    else return INVALID_VALUE;
    return SUCCESS;
}

int cublasLtMatmulPreferenceCreate(void **preference) {
    if (fails(__func__)) return INTERNAL_ERROR;
    *preference = new Preference;
    return SUCCESS;
}

int cublasLtMatmulPreferenceDestroy(void *preference) {
    delete static_cast<Preference *>(preference);
    return SUCCESS;
}

int cublasLtMatmulPreferenceSetAttribute(void *preference, int attribute, const void *value, size_t bytes) {
    if (fails(__func__)) return INTERNAL_ERROR;
    Preference *it = static_cast<Preference *>(preference);
    if (attribute == 1 && bytes == 8) std::memcpy(&it->workspace, value, 8);
    else if (attribute >= 5 && attribute <= 8 && bytes == 4) std::memcpy(&it->alignment[attribute - 5], value, 4);
    else return INVALID_VALUE;
    return SUCCESS;
}

int cublasLtMatmulAlgoGetHeuristic(void *, void *desc, void *a, void *b, void *c, void *d, void *preference, int wanted, void *results,
                                   int *found) {
    if (fails(__func__)) return INTERNAL_ERROR;
    *found = 0;
    Desc *it = static_cast<Desc *>(desc);
    Layout *la = static_cast<Layout *>(a), *lb = static_cast<Layout *>(b), *lc = static_cast<Layout *>(c), *ld = static_cast<Layout *>(d);
    uint64_t m = it->transa ? la->cols : la->rows, k = it->transa ? la->rows : la->cols;
    uint64_t inner = it->transb ? lb->cols : lb->rows, n = it->transb ? lb->rows : lb->cols;
    if (wanted < 1 || k != inner || ld->rows != m || ld->cols != n || lc->rows != m || lc->cols != n) return INVALID_VALUE;
    if (la->type != lb->type || lc->type != ld->type || ld->type == R_8F_E4M3) return NOT_SUPPORTED;
    if (la->type == R_8F_E4M3) {
        // "TN" only, and all that is read lies at multiples of 16 bytes.
        if (!it->transa || it->transb || k % 16 || m % 16 || la->leading % 16 || lb->leading % 16) return NOT_SUPPORTED;
        for (int i = 0; i < 4; i++)
            if (static_cast<Preference *>(preference)->alignment[i] < 16) return NOT_SUPPORTED;
    } else if (ld->type != R_32F && ld->type != la->type) {
        return NOT_SUPPORTED;
    }
    Choice choice{};
    // What the algorithm relies on is kept in it.
    for (int i = 0; i < 4; i++) choice.algorithm[i] = static_cast<Preference *>(preference)->alignment[i];
    choice.algorithm[4] = 0x5354414e44;
    std::memcpy(results, &choice, sizeof choice);
    *found = 1;
    return SUCCESS;
}

int cublasLtMatmul(void *, void *desc, const float *alpha, const void *a, void *la, const void *b, void *lb, const float *beta, const void *c,
                   void *lc, void *d, void *ld, const uint64_t *algorithm, void *, size_t, void *stream) {
    if (fails(__func__)) return INTERNAL_ERROR;
    if (algorithm[4] != 0x5354414e44) return INVALID_VALUE;
    Desc how = *static_cast<Desc *>(desc);
    Layout A = *static_cast<Layout *>(la), B = *static_cast<Layout *>(lb), C = *static_cast<Layout *>(lc), D = *static_cast<Layout *>(ld);
    if (!aligned(a, A) || !aligned(b, B) || !aligned(c, C) || !aligned(d, D)) return INVALID_VALUE;
    const void *pointers[4] = {a, b, c, d};
    for (int i = 0; i < 4; i++)
        if (reinterpret_cast<uintptr_t>(pointers[i]) % std::max<uint64_t>(algorithm[i], 1) != 0) return INVALID_VALUE;
    if (A.batch != B.batch || A.batch != D.batch || C.batch != D.batch) return INVALID_VALUE;
    float by = *alpha, add = *beta;
    auto *work = new std::function<int()>([=] {
        auto check = [](const void *base, const Layout &layout) {
            uint64_t numbers = uint64_t(layout.batch - 1) * layout.stride + (layout.cols - 1) * layout.leading + layout.rows;
            return tunesmith_stand_in_check("cublasLtMatmul", reinterpret_cast<uint64_t>(base), numbers * size_of(layout.type));
        };
        if (int error = check(a, A)) return error;
        if (int error = check(b, B)) return error;
        if (add != 0.0f)
            if (int error = check(c, C)) return error;
        if (int error = check(d, D)) return error;
        for (int one = 0; one < D.batch; one++) {
            auto at = [one](const void *base, const Layout &layout) {
                return static_cast<const char *>(base) + size_t(one) * layout.stride * size_of(layout.type);
            };
            uint64_t m = D.rows, n = D.cols, k = how.transa ? A.rows : A.cols;
            // op(A) by rows of k, op(B) by columns of k: each result is a dot product along both.
            bool tf32 = how.compute == 77 && A.type == R_32F;
            std::vector<float> left = widened(at(a, A), A, how.transa, true, tf32), right = widened(at(b, B), B, how.transb, false, tf32);
            const char *from = at(c, C);
            char *to = const_cast<char *>(at(d, D));
            for (uint64_t col = 0; col < n; col++)
                for (uint64_t row = 0; row < m; row++) {
                    const float *x = &left[row * k], *y = &right[col * k];
                    float sums[8] = {};
                    uint64_t i = 0;
                    for (; i + 8 <= k; i += 8)
                        for (int lane = 0; lane < 8; lane++) sums[lane] += x[i + lane] * y[i + lane];
                    float sum = ((sums[0] + sums[4]) + (sums[1] + sums[5])) + ((sums[2] + sums[6]) + (sums[3] + sums[7]));
                    for (; i < k; i++) sum += x[i] * y[i];
                    float value = by * sum;
                    if (add != 0.0f) value += add * read(from, C.type, col * C.leading + row);
                    write(to, D.type, col * D.leading + row, value);
                }
        }
        return 0;
    });
    tunesmith_stand_in_enqueue(stream, work);
    delete work;
    return SUCCESS;
}

const char *cublasLtGetStatusString(int status) {
    switch (status) {
    case INVALID_VALUE: return "CUBLAS_STATUS_INVALID_VALUE";
    case INTERNAL_ERROR: return "CUBLAS_STATUS_INTERNAL_ERROR";
    case NOT_SUPPORTED: return "CUBLAS_STATUS_NOT_SUPPORTED";
    default: return "an error of cublasLt";
    }
}

} // extern "C"
