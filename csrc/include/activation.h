// The activation operator's CPU kernels: the functions every instruction set provides.
#pragma once

#include "activations.h"
#include "scalar.h"

namespace sparsemlp {

// Entries in one call of a kernel. Which entries share a call does not depend on the number of threads.
constexpr int64_t kActivationBlock = 2048;

// All of them: n ≤ kActivationBlock entries of one dtype, `out` not overlapping the inputs, float32 inside.
struct ActivationKernels {
    // out = φ(p); with counts, adds to them how many of out are not 0 and how many of φ'(p) are not 0.
    void (*forward)(const void* p, void* out, int64_t n, Activation activation, const float* params, int64_t* counts);
    // out = grad · φ'(p), and 0 where φ'(p) is 0, whatever grad is.
    void (*backward)(const void* grad, const void* p, void* out, int64_t n, Activation activation, const float* params);
};

// By instruction set, then by element type; defined in csrc/cpu/activation_<isa>.cpp.
using ActivationTable = ActivationKernels[static_cast<int>(Dtype::count)];
extern const ActivationTable activation_portable;
#if defined(__x86_64__)
extern const ActivationTable activation_avx2;
extern const ActivationTable activation_avx512;
#endif

} // namespace sparsemlp
