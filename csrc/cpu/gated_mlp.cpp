// The gated MLP's operator for CPU tensors: checks what could make a kernel read out of bounds.
#include "mlp_run.h"

namespace sparsemlp {
namespace {

Tensor gated_mlp(Tensor x, Tensor w_gate, Tensor w_up, Tensor w_down_t, Tensor threshold, OptionalTensor token_scale,
                 OptionalTensor skipped_mean, OptionalTensor skipped_out, OptionalTensor b_gate, OptionalTensor b_up,
                 OptionalTensor b_down, OptionalTensor scale_gate, OptionalTensor scale_up, OptionalTensor scale_down,
                 OptionalTensor pre, OptionalTensor scores, OptionalTensor activation_params, int64_t activation,
                 int64_t indicator, int64_t isa) {
    const ScalarType type = x.scalar_type();
    const Tokens tokens = tokens_of(x);
    STD_TORCH_CHECK(w_up.dim() == 2, "w_up must be a matrix");
    STD_TORCH_CHECK(indicator >= 0 && indicator < static_cast<int64_t>(Indicator::none), "unknown indicator");
    STD_TORCH_CHECK(scale_up.has_value() == scale_down.has_value() &&
                        (pre.has_value() || scale_gate.has_value() == scale_up.has_value()),
                    "all weights are int8, or none");
    MlpCall call{};
    call.tokens = tokens.count;
    call.width = tokens.width;
    call.x = tokens.data;
    call.x_stride = tokens.stride;
    call.neurons = w_up.size(0);
    if (pre.has_value()) {
        int64_t stride = 0;
        call.pre = static_cast<const float*>(rows(*pre, "pre", tokens.count, call.neurons, ScalarType::Float, &stride));
        STD_TORCH_CHECK(pre->is_contiguous(), "pre must be contiguous");
        call.gate.bias = vector(b_gate, "b_gate", call.neurons, type);
    } else {
        call.gate = matrix(w_gate, b_gate, scale_gate, "w_gate", call.neurons, call.width, call.neurons, type);
    }
    call.scores = scores_of(scores, static_cast<Indicator>(indicator), tokens.count, call.neurons);
    call.up = matrix(w_up, b_up, scale_up, "w_up", call.neurons, call.width, call.neurons, type);
    call.down = matrix(w_down_t, b_down, scale_down, "w_down", call.neurons, call.width, call.width, type);
    call.skipped_out = floats(skipped_out, "skipped_out", call.width);
    const MlpOptions options{threshold, token_scale, skipped_mean, activation_params, activation};
    call.rule = thresholding(options, static_cast<Indicator>(indicator), call.tokens, call.neurons);
    return run(call, x, isa);
}

} // namespace
} // namespace sparsemlp

STABLE_TORCH_LIBRARY_IMPL(sparsemlp, CPU, m) { m.impl("_gated_mlp_native", TORCH_BOX(&sparsemlp::gated_mlp)); }
