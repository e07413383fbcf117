// The gated MLP's CPU kernels: what one call needs, and the functions every instruction set provides.
#pragma once

#include "activations.h"
#include "scalar.h"

namespace sparsemlp {

// Who is kept: the rule shared by the fused kernel and the elementwise one. Pointers may be null where marked.
struct Thresholding {
    const float* threshold;    // [1] or [F]
    int64_t threshold_step;    // 0 for a scalar, 1 for one value a neuron
    const float* token_scale;  // [T] or null
    const float* skipped_mean; // [F] or null
    const float* params;       // the activation's, or null
    Activation activation;
};

// One call of the fused kernel. Strides are in elements; rows have unit inner stride.
struct GatedMlpCall {
    int64_t tokens, width, neurons; // T, D, F
    const void *x, *w_gate, *w_up, *w_down;
    int64_t x_stride, gate_stride, up_stride, down_stride;
    const void *b_gate, *b_up, *b_down; // or null
    const float* skipped_out;           // [D] or null
    Thresholding rule;
    void* out;      // [T, D], contiguous
    int64_t slots;  // how many parts the neurons are dealt to
    float* scratch; // slots * slot_floats(T, D)
};

// A slot's scratch: the fp32 partial output and the running sum of finished parts, both [T, padded D], then the
// activations of one batch of neurons, their indices and token masks.
constexpr int64_t kBlock = 32;          // neurons dealt to a slot at a time
constexpr int64_t kGroup = 8;           // active rows in one pass over the accumulator
constexpr int64_t kChain = 16;          // blocks of neurons in one chain of additions, then a partial sum is closed
constexpr int64_t kBatchValues = 16384; // activations held at a time: 64 KB
constexpr int64_t kMaxTokens = 32;      // bits of a token mask

inline int64_t padded(int64_t width) { return (width + 63) / 64 * 64; }
inline int64_t batch_neurons(int64_t tokens) { return kBatchValues / tokens / kBlock * kBlock; }
inline int64_t slot_floats(int64_t tokens, int64_t width) {
    return 2 * tokens * padded(width) + kBatchValues + 2 * batch_neurons(tokens) + 64;
}

// One call of the elementwise kernel: h = C(φ(pre)) ⊙ up, all [T, F] contiguous.
struct HiddenCall {
    int64_t tokens, neurons;
    const void *pre, *up;
    Thresholding rule;
    void* out;
};

struct GatedMlpKernels {
    // Adds up slot's share of the neurons; false when it met a negative or NaN threshold.
    bool (*slot)(const GatedMlpCall&, int64_t slot);
    // out[begin:end) of the flat [T, D] from the slots' partial sums, in slot order; false when one is inf or NaN.
    bool (*reduce)(const GatedMlpCall&, int64_t begin, int64_t end);
    // Rows [begin, end); false when it met a negative or NaN threshold.
    bool (*hidden)(const HiddenCall&, int64_t begin, int64_t end);
};

// By instruction set, then by element type; defined in csrc/cpu/gated_mlp_<isa>.cpp.
using GatedMlpTable = GatedMlpKernels[static_cast<int>(Dtype::count)];
extern const GatedMlpTable gated_mlp_portable;
#if defined(__x86_64__)
extern const GatedMlpTable gated_mlp_avx2;
extern const GatedMlpTable gated_mlp_avx512;
extern const GatedMlpTable gated_mlp_avx512bf16;
#endif

} // namespace sparsemlp
