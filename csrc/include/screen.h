// The screen: scores of all neurons from low-bit copies of a gated MLP's gate and up weights, in integer products.
#pragma once

#include "activations.h"
#include "scalar.h"

namespace sparsemlp {

constexpr int64_t kScreenRows = 16;  // neurons side by side
constexpr int64_t kMostGroup = 128;  // inputs with one scale
constexpr int64_t kScreenTokens = 4; // multiplied with a block of codes at a time (8: 9 to 14 % slower)

// One weight's copy as sparsemlp/screen.py lays it out: [blocks][groups][bits · 2 · group] and [blocks][groups][16].
struct LowBits {
    const uint8_t* codes;
    const bf16* scale;
    const void* bias; // [F] of x's dtype, or null
};

// One call. The tokens are integers: x ≈ unit · values, by groups.
struct ScreenCall {
    int64_t tokens, width, neurons; // T, D, F
    int64_t bits, group, groups;
    LowBits gate, up;
    Activation activation;
    const float* params; // the activation's, or null
    const void* x;
    int64_t x_stride;
    int8_t* values;  // [T][groups · group], zeros past the last input
    float* unit;     // [T][groups]
    int32_t* offset; // [T][groups]: −2^(bits − 1) · Σ values, as codes are never negative
    float* out;      // [T][F]
};

struct ScreenKernels {
    void (*quantize)(const ScreenCall&, int64_t token);
    void (*blocks)(const ScreenCall&, int64_t begin, int64_t end); // of kScreenRows neurons
};

// By instruction set, then by element type; defined in csrc/cpu/screen_<isa>.cpp.
using ScreenTable = ScreenKernels[static_cast<int>(Dtype::count)];
extern const ScreenTable screen_portable;
#if defined(__x86_64__)
extern const ScreenTable screen_avx2;
extern const ScreenTable screen_avx512;
extern const ScreenTable screen_avx512bf16;
#endif

} // namespace sparsemlp
