// The ungated MLP's operator for CPU tensors: checks what could make a kernel read out of bounds.
#include "mlp_run.h"

namespace sparsemlp {
namespace {

Tensor mlp(Tensor x, Tensor w_in, Tensor w_out_t, Tensor threshold, OptionalTensor token_scale,
           OptionalTensor skipped_mean, OptionalTensor skipped_out, OptionalTensor b_in, OptionalTensor b_out,
           OptionalTensor scale_in, OptionalTensor scale_out, OptionalTensor activation_params, int64_t activation,
           int64_t isa) {
    const ScalarType type = x.scalar_type();
    const Tokens tokens = tokens_of(x);
    STD_TORCH_CHECK(w_in.dim() == 2, "w_in must be a matrix");
    STD_TORCH_CHECK(scale_in.has_value() == scale_out.has_value(), "all weights are int8, or none");
    MlpCall call{};
    call.tokens = tokens.count;
    call.width = tokens.width;
    call.x = tokens.data;
    call.x_stride = tokens.stride;
    call.neurons = w_in.size(0);
    call.gate = matrix(w_in, b_in, scale_in, "w_in", call.neurons, call.width, call.neurons, type);
    call.down = matrix(w_out_t, b_out, scale_out, "w_out", call.neurons, call.width, call.width, type);
    call.skipped_out = floats(skipped_out, "skipped_out", call.width);
    const MlpOptions options{threshold, token_scale, skipped_mean, activation_params, activation};
    call.rule = thresholding(options, Indicator::none, call.tokens, call.neurons);
    return run(call, x, isa);
}

} // namespace
} // namespace sparsemlp

STABLE_TORCH_LIBRARY_IMPL(sparsemlp, CPU, m) { m.impl("_mlp_native", TORCH_BOX(&sparsemlp::mlp)); }
