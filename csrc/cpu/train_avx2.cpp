// The MLPs' training kernels for AVX2. All includes come before the target region: inline functions of the standard
// library compiled under it would be shared with code for other CPUs.
#include <cmath>
#include <cstring>

#include "train.h"

#if defined(__x86_64__)
#include <immintrin.h>

#define SPARSEMLP_F16C

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#endif
namespace sparsemlp {
namespace {
#include "scalar.inl"

#include "vec_avx2.inl"

#include "activations.inl"

#include "hidden.inl"

#include "pattern.inl"

#include "gather.inl"
} // namespace

const TrainTable train_avx2 = {SPARSEMLP_TRAIN_KERNELS(float), SPARSEMLP_TRAIN_KERNELS(bf16),
                               SPARSEMLP_TRAIN_KERNELS(f16)};
} // namespace sparsemlp
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif // __x86_64__
