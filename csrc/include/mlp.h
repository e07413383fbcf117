// The MLPs' CPU kernels, gated and ungated: what one call needs, and the functions every instruction set provides.
#pragma once

#include "activations.h"
#include "scalar.h"

namespace sparsemlp {

// Whose magnitude decides who is kept, in the order of sparsemlp/ops/gated_mlp.py; `none`: an MLP without a gate.
enum class Indicator : int { gate, up, product, screen, none, count };

// Who is kept: the rule shared by the fused kernel and the elementwise one. Pointers may be null where marked.
struct Thresholding {
    const float* threshold;    // [1] or [F]
    int64_t threshold_step;    // 0 for a scalar, 1 for one value a neuron
    const float* token_scale;  // [T] or null
    const float* skipped_mean; // [F] or null
    const float* params;       // the activation's, or null
    Activation activation;
    Indicator indicator;
};

// A weight, one row a neuron: [F, D] of x's dtype or, with scales, of int8. Strides are in elements; rows have unit
// inner stride.
struct Matrix {
    const void* rows; // null: there is none
    int64_t stride;
    const float* scale; // [F] ([D] for the down projection) or null: a factor of each output
    const void* bias;   // [F] ([D] for the down projection) of x's dtype, or null
};

// int8 weights: the tokens as 16-bit integers, x ≈ unit · (part 0 + part 1 / kRest), part 1 for float32 only.
struct Quantized {
    const int16_t* values; // [T, parts, D], or null
    const float* unit;     // [T]
    int64_t parts;
};
constexpr float kLevels = 32767.f, kRest = 65534.f; // a part's range, and how much finer the second one is

// One call of the fused kernel.
struct MlpCall {
    int64_t tokens, width, neurons; // T, D, F
    const void* x;
    int64_t x_stride;
    Matrix gate, up, down; // an ungated MLP's first weight is `gate`
    const float* pre;      // [T, F], or null: the gate's pre-activations without bias; gate.rows is null then
    const float* scores;   // [T, F], by the indicator `screen`: what is compared
    Quantized quantized;
    const float* lanes;       // the tokens as LaneKernels packs them, or null
    const float* skipped_out; // [D] or null
    Thresholding rule;
    void* out;       // [T, D], contiguous
    int64_t slots;   // how many parts the neurons are dealt to
    float* scratch;  // slots * slot_floats(T, D)
    int64_t* active; // [slots]: how many (token, neuron) are active, added to
};

// A slot's scratch: the fp32 partial output and the running sum of finished parts, both [T, padded D], then the
// values of one batch of neurons, their indices and token masks.
constexpr int64_t kBlock = 48;          // neurons dealt to a slot at a time: whole tiles of 8 and of 6 rows
constexpr int64_t kChain = 10;          // blocks of neurons in one chain of additions, then a partial sum is closed
constexpr int64_t kBatchValues = 16384; // values held at a time: 64 KB

// Two lines more than needed: else the tokens' sums of a column would share a set of the first cache level where the
// width is a power of two (16 tokens, D 4096: 7.9 ms without, for the down projection).
inline int64_t padded(int64_t width) { return (width + 63) / 64 * 64 + 32; }
inline int64_t batch_neurons(int64_t tokens) { return kBatchValues / tokens / kBlock * kBlock; }
inline int64_t slot_floats(int64_t tokens, int64_t width) {
    return 2 * tokens * padded(width) + kBatchValues + 2 * batch_neurons(tokens) + 64;
}

// One call of the elementwise kernel: h = C(φ(pre)) ⊙ up, all [T, F] contiguous; up is null for an ungated MLP.
struct HiddenCall {
    int64_t tokens, neurons;
    const void *pre, *up;
    const float* scores; // [T, F] by the indicator `screen`
    Thresholding rule;
    void* out;
};

// Tokens side by side in a vector's lanes, for kernels of many of them: 32-bit words (pairs of bf16 where the CPU
// multiplies those, else float32), in panels of neighbouring tokens.
constexpr int64_t kPanelSteps = 256; // words of a row in one chain of additions: 512 bf16 or 256 float32 values
struct LaneKernels {
    int64_t from;   // the fewest tokens that the fused kernel wants so; it needs `quantized` for fewer, of int8 weights
    int64_t tokens; // of a panel
    int64_t (*floats)(int64_t width); // of a panel
    void (*pack)(const void* x, int64_t stride, int64_t tokens, int64_t width, int64_t panel, float* out);
};

// One call for many tokens: dense products, and what is not active masked between them.
constexpr int64_t kDenseTokens = 512; // tokens multiplied at a time, a multiple of every panel's
constexpr int64_t kDenseRows = 48;    // neurons at a time: whole tiles of 8 and of 6
constexpr int64_t kPanelMost = 64;    // columns of a panel of the down projection, at most
struct DenseCall {
    MlpCall mlp;   // its quantized, slots, scratch and active are not used
    float* hidden; // [tile of tokens][F steps][tokens of the tile] words
};
// A thread's scratch: either product's sums, beside two panels of the down projection.
constexpr int64_t kDenseFloats = 2 * kPanelMost * (kPanelSteps + kDenseTokens) + 64;
static_assert(2 * kDenseRows * kDenseTokens <= kDenseFloats);

struct DenseKernels {
    int64_t columns; // of the output that a thread should take whole multiples of
    int64_t (*hidden_floats)(int64_t tokens, int64_t neurons);
    // h of neurons [begin, end), begin a multiple of kDenseRows, for all tokens; false when it met a negative or NaN
    // threshold. By the weights' type: x's own, int8.
    bool (*hidden[2])(const DenseCall&, int64_t begin, int64_t end, float* scratch, int64_t* active);
    // out's columns [begin, end); finite[t] becomes 0 where one of token t's sums is inf or NaN.
    void (*down[2])(const DenseCall&, int64_t begin, int64_t end, float* scratch, uint8_t* finite);
};

struct MlpKernels {
    // Adds up slot's share of the neurons; false when it met a negative or NaN threshold. By the weights' type: x's
    // own, int8.
    bool (*slot[2])(const MlpCall&, int64_t slot);
    // out[begin:end) of the flat [T, D] from the slots' partial sums, in slot order; false when one is inf or NaN.
    bool (*reduce)(const MlpCall&, int64_t begin, int64_t end);
    // Rows [begin, end); false when it met a negative or NaN threshold.
    bool (*hidden)(const HiddenCall&, int64_t begin, int64_t end, int64_t* active);
    // One token of n values as integers: [parts, n] and its unit. False where they cannot hold it: an inf or NaN, or
    // all entries below 4e-34.
    bool (*quantize)(const void* x, int64_t n, int64_t parts, int16_t* values, float* unit);
    LaneKernels lanes;
    DenseKernels dense;
};

// By instruction set, then by element type; defined in csrc/cpu/mlp_<isa>.cpp.
using MlpTable = MlpKernels[static_cast<int>(Dtype::count)];
extern const MlpTable mlp_portable;
#if defined(__x86_64__)
extern const MlpTable mlp_avx2;
extern const MlpTable mlp_avx512;
extern const MlpTable mlp_avx512bf16; // without float32
extern const MlpKernels mlp_avx512bf16_f32;
#endif

} // namespace sparsemlp
