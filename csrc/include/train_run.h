// What the training operators share: stored values in, checked.
#pragma once

#include "mlp_run.h"
#include "train.h"

namespace sparsemlp {

const TrainKernels& train_kernels(int64_t isa, Dtype dtype);

// `name` must be contiguous, (count, width).
void check_matrix(const Tensor& t, const char* name, int64_t count, int64_t width, ScalarType type);

Stored stored(const Tensor& pre, const OptionalTensor& up, const MlpOptions& options, int64_t indicator);

// The words of `bits`, [2, T, words_of(F)].
const uint64_t* bits_of(const Tensor& bits, const Stored& s);

} // namespace sparsemlp
