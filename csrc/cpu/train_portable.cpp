// The MLPs' training kernels for any CPU.
#include <cmath>
#include <cstring>

#include "train.h"

namespace sparsemlp {
namespace {
#include "scalar.inl"

#include "vec_portable.inl"

#include "activations.inl"

#include "hidden.inl"

#include "pattern.inl"

#include "gather.inl"
} // namespace

const TrainTable train_portable = {SPARSEMLP_TRAIN_KERNELS(float), SPARSEMLP_TRAIN_KERNELS(bf16),
                                   SPARSEMLP_TRAIN_KERNELS(f16)};
} // namespace sparsemlp
