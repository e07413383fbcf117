// The input-sparse linear layer's CPU kernels: what one call needs, and the functions every instruction set provides.
#pragma once

#include "scalar.h"

namespace sparsemlp {

constexpr int64_t kLinearSums = 16384;   // sums a thread holds at a time: 64 KB
constexpr int64_t kLinearColumns = 4096; // columns of the output worked on at a time, at most
constexpr int64_t kLinearChain = 128;    // channels in one chain of additions, then a partial sum is closed

// One call. Strides are in elements; rows have unit inner stride.
struct SparseLinearCall {
    int64_t tokens, channels, width; // T, K, N
    const void* x;
    int64_t x_stride;
    const void* weight; // [K, N] of x's dtype, or int8 with scales
    int64_t weight_stride;
    const float* scale; // [N] or null
    const void* bias;   // [N] or null
    const float* threshold;
    int64_t threshold_step;   // 0 for a scalar, 1 for one value a channel
    const float* token_scale; // [T] or null
    bool wide;                // the output is float32
    void* out;                // [T, N], contiguous
    // The active channels, by segments of the channels, in order: found by `select`, read by `columns`.
    int64_t segments;
    int64_t* counts; // [segments]
    int32_t* index;  // [K]
    uint32_t* mask;  // [K]: which tokens want the channel
    float* values;   // [K, T]: x, 0 where a token does not want it
    int64_t begin(int64_t segment) const { return channels * segment / segments; }
};

struct SparseLinearKernels {
    // Lists a segment's active channels; false when it met a negative or NaN threshold.
    bool (*select)(const SparseLinearCall&, int64_t segment);
    // Output columns [begin, end) for all tokens, with 2 · kLinearSums floats of scratch; a bit for every token one of
    // whose sums is inf or NaN. By the weight's type: x's own, int8.
    uint32_t (*columns[2])(const SparseLinearCall&, int64_t begin, int64_t end, float* scratch);
};

// By instruction set, then by element type; defined in csrc/cpu/sparse_linear_<isa>.cpp.
using SparseLinearTable = SparseLinearKernels[static_cast<int>(Dtype::count)];
extern const SparseLinearTable sparse_linear_portable;
#if defined(__x86_64__)
extern const SparseLinearTable sparse_linear_avx2;
extern const SparseLinearTable sparse_linear_avx512;
extern const SparseLinearTable sparse_linear_avx512bf16;
#endif

} // namespace sparsemlp
