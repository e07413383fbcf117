// What the MLPs' operators share: a checked call in, the output out.
#pragma once

#include "mlp.h"
#include "tensors.h"

namespace sparsemlp {

// The options that both MLPs have, as the operators take them.
struct MlpOptions {
    const Tensor& threshold;
    const OptionalTensor& token_scale;
    const OptionalTensor& skipped_mean;
    const OptionalTensor& params;
    int64_t activation;
};

Thresholding thresholding(const MlpOptions& options, Indicator indicator, int64_t tokens, int64_t neurons);

// What the screen found, [T, F], given by its indicator and no other.
const float* scores_of(const OptionalTensor& scores, Indicator indicator, int64_t tokens, int64_t neurons);

// A weight with its bias and scale, checked; `outputs` is F, or D for the down projection.
Matrix matrix(const Tensor& w, const OptionalTensor& bias, const OptionalTensor& scale, const char* name,
              int64_t neurons, int64_t width, int64_t outputs, ScalarType type);

// Computes the call, whose x, weights and rule are set, and returns the output, of x's shape.
Tensor run(MlpCall call, const Tensor& x, int64_t isa);

} // namespace sparsemlp
