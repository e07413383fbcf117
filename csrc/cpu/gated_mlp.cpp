// The gated MLP's operators for CPU tensors: checks what could make a kernel read out of bounds, chooses the
// instruction set, and splits the work over PyTorch's threads. Public messages are Python's (sparsemlp/ops).
#include <algorithm>
#include <atomic>
#include <optional>

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include "cpu.h"
#include "gated_mlp.h"

namespace sparsemlp {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;

constexpr const char* kBadThreshold =
    "sparsemlp: threshold holds a negative or NaN value, expected values >= 0 (inf: never active)";

const GatedMlpKernels& kernels(int64_t isa, Dtype dtype) {
#if defined(__x86_64__)
    static const GatedMlpTable* const tables[] = {&gated_mlp_portable, &gated_mlp_avx2, &gated_mlp_avx512,
                                                  &gated_mlp_avx512bf16};
#else
    static const GatedMlpTable* const tables[] = {&gated_mlp_portable};
#endif
    STD_TORCH_CHECK(isa >= 0 && isa <= sparsemlp_cpu_isa(), "isa ", isa, " is not one this CPU runs");
    return (*tables[isa])[static_cast<int>(dtype)];
}

Dtype dtype_of(const Tensor& x) {
    switch (x.scalar_type()) {
    case ScalarType::Float:
        return Dtype::f32;
    case ScalarType::BFloat16:
        return Dtype::bf16;
    default:
        STD_TORCH_CHECK(x.scalar_type() == ScalarType::Half, "x must be float32, bfloat16 or float16");
        return Dtype::f16;
    }
}

const void* rows(const Tensor& t, const char* name, int64_t count, int64_t width, ScalarType type, int64_t* stride) {
    STD_TORCH_CHECK(t.is_cpu() && t.scalar_type() == type && t.dim() == 2 && t.size(0) == count && t.size(1) == width &&
                        (width <= 1 || count == 0 || t.stride(1) == 1),
                    name, " must be a CPU tensor of x's dtype, shape (", count, ", ", width, ") and unit inner stride");
    *stride = t.stride(0);
    return t.const_data_ptr();
}

const void* vector(const OptionalTensor& t, const char* name, int64_t size, ScalarType type) {
    if (!t.has_value())
        return nullptr;
    STD_TORCH_CHECK(t->is_cpu() && t->scalar_type() == type && t->dim() == 1 && t->size(0) == size &&
                        (size <= 1 || t->stride(0) == 1),
                    name, " must be a CPU tensor of shape (", size, ") and unit stride");
    return t->const_data_ptr();
}

const float* floats(const OptionalTensor& t, const char* name, int64_t size) {
    return static_cast<const float*>(vector(t, name, size, ScalarType::Float));
}

Thresholding thresholding(const Tensor& threshold, const OptionalTensor& token_scale,
                          const OptionalTensor& skipped_mean, const OptionalTensor& params, int64_t activation,
                          int64_t tokens, int64_t neurons) {
    STD_TORCH_CHECK(activation >= 0 && activation < static_cast<int64_t>(Activation::count), "unknown activation");
    Thresholding rule{};
    rule.threshold_step = threshold.dim() == 0 ? 0 : 1;
    if (threshold.dim() == 0)
        STD_TORCH_CHECK(threshold.is_cpu() && threshold.scalar_type() == ScalarType::Float,
                        "threshold must be a float32 CPU tensor");
    rule.threshold = threshold.dim() == 0 ? static_cast<const float*>(threshold.const_data_ptr())
                                          : floats(threshold, "threshold", neurons);
    rule.token_scale = floats(token_scale, "token_scale", tokens);
    rule.skipped_mean = floats(skipped_mean, "skipped_mean", neurons);
    rule.activation = static_cast<Activation>(activation);
    const int wanted = kActivationParams[activation];
    STD_TORCH_CHECK((wanted > 0) == params.has_value(), "activation_params do not fit the activation");
    rule.params = floats(params, "activation_params", wanted);
    return rule;
}

// True when w holds an inf or NaN, i.e. when 0 · w need not be 0.
bool any_not_finite(const GatedMlpCall& call, Dtype dtype) {
    std::atomic<bool> found{false};
    const auto scan = [&]<class Word>(Word exponent) {
        const Word* w = static_cast<const Word*>(call.w_down);
        torch::stable::parallel_for(0, call.neurons, 64, [&](int64_t begin, int64_t end) {
            bool bad = false;
            for (int64_t j = begin; j < end; ++j)
                for (int64_t d = 0; d < call.width; ++d)
                    bad |= (w[j * call.down_stride + d] & exponent) == exponent;
            if (bad)
                found = true;
        });
    };
    if (dtype == Dtype::f32)
        scan(uint32_t{0x7f800000});
    else
        scan(static_cast<uint16_t>(dtype == Dtype::bf16 ? 0x7f80 : 0x7c00));
    return found;
}

// Computes call.out; `finite`[t] says whether token t's sums were finite.
void compute(GatedMlpCall call, const GatedMlpKernels& kernel, std::atomic<bool>* finite) {
    const int64_t size = call.slots * slot_floats(call.tokens, call.width);
    const Tensor scratch = torch::stable::empty({size}, ScalarType::Float);
    call.scratch = static_cast<float*>(scratch.mutable_data_ptr());
    std::atomic<bool> valid{true};
    torch::stable::parallel_for(0, call.slots, 1, [&](int64_t begin, int64_t end) {
        for (int64_t slot = begin; slot < end; ++slot)
            if (!kernel.slot(call, slot))
                valid = false;
    });
    STD_TORCH_CHECK(valid, kBadThreshold);
    // One task is a run of a token's outputs; small outputs are not worth a second region.
    const int64_t total = call.tokens * call.width;
    const int64_t grain = std::max<int64_t>(1024, 16384 / call.slots);
    torch::stable::parallel_for(0, total, grain, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end;) {
            const int64_t t = i / call.width, stop = std::min(end, (t + 1) * call.width);
            if (!kernel.reduce(call, i, stop))
                finite[t] = false;
            i = stop;
        }
    });
}

Tensor gated_mlp(Tensor x, Tensor w_gate, Tensor w_up, Tensor w_down_t, Tensor threshold, OptionalTensor token_scale,
                 OptionalTensor skipped_mean, OptionalTensor skipped_out, OptionalTensor b_gate, OptionalTensor b_up,
                 OptionalTensor b_down, OptionalTensor activation_params, int64_t activation, int64_t isa) {
    const Dtype dtype = dtype_of(x);
    const ScalarType type = x.scalar_type();
    STD_TORCH_CHECK(x.is_cpu() && x.dim() >= 1 && w_gate.dim() == 2,
                    "x must be a CPU tensor (..., D), w_gate a matrix");
    STD_TORCH_CHECK(x.dim() == 2 || x.is_contiguous(), "x must be a matrix or contiguous");
    GatedMlpCall call{};
    call.width = x.size(x.dim() - 1);
    call.tokens = 1;
    for (int64_t i = 0; i + 1 < x.dim(); ++i)
        call.tokens *= x.size(i);
    call.neurons = w_gate.size(0);
    STD_TORCH_CHECK(call.tokens <= kMaxTokens, "at most ", kMaxTokens, " tokens");
    STD_TORCH_CHECK(call.neurons <= INT32_MAX, "at most 2^31 - 1 neurons");
    call.x_stride = call.width;
    call.x = x.dim() == 2 ? rows(x, "x", call.tokens, call.width, type, &call.x_stride) : x.const_data_ptr();
    call.w_gate = rows(w_gate, "w_gate", call.neurons, call.width, type, &call.gate_stride);
    call.w_up = rows(w_up, "w_up", call.neurons, call.width, type, &call.up_stride);
    call.w_down = rows(w_down_t, "w_down_t", call.neurons, call.width, type, &call.down_stride);
    call.b_gate = vector(b_gate, "b_gate", call.neurons, type);
    call.b_up = vector(b_up, "b_up", call.neurons, type);
    call.b_down = vector(b_down, "b_down", call.width, type);
    call.skipped_out = floats(skipped_out, "skipped_out", call.width);
    call.rule =
        thresholding(threshold, token_scale, skipped_mean, activation_params, activation, call.tokens, call.neurons);
    const Tensor out = torch::stable::empty(x.sizes(), type);
    if (call.tokens == 0 || call.width == 0)
        return out;
    call.out = out.mutable_data_ptr();
    // From sizes that batch mates do not change: a token's sums are split alike in every batch.
    const int64_t useful = std::max<int64_t>(1, call.neurons * call.width / 16384);
    const int64_t blocks = std::max<int64_t>(1, (call.neurons + kBlock - 1) / kBlock);
    call.slots = std::min<int64_t>({torch::stable::get_num_threads(), useful, blocks});
    const GatedMlpKernels& kernel = kernels(isa, dtype);
    std::atomic<bool> finite[kMaxTokens];
    std::fill(std::begin(finite), std::end(finite), true);
    compute(call, kernel, finite);
    // Tokens of a batch multiply rows they do not want by 0, which is not 0 for inf and NaN: such a token is done
    // again alone, where unwanted rows are not touched.
    if (call.tokens == 1 || std::all_of(finite, finite + call.tokens, [](const auto& f) { return f.load(); }) ||
        !any_not_finite(call, dtype))
        return out;
    const int64_t bytes = dtype == Dtype::f32 ? 4 : 2;
    for (int64_t t = 0; t < call.tokens; ++t) {
        if (finite[t])
            continue;
        GatedMlpCall one = call;
        one.tokens = 1;
        one.x = static_cast<const char*>(call.x) + t * call.x_stride * bytes;
        one.out = static_cast<char*>(call.out) + t * call.width * bytes;
        one.rule.token_scale = call.rule.token_scale != nullptr ? call.rule.token_scale + t : nullptr;
        compute(one, kernel, finite + t);
    }
    return out;
}

Tensor hidden(Tensor pre, Tensor up, Tensor threshold, OptionalTensor token_scale, OptionalTensor skipped_mean,
              OptionalTensor activation_params, int64_t activation, int64_t isa) {
    const Dtype dtype = dtype_of(pre);
    STD_TORCH_CHECK(pre.dim() == 2 && up.dim() == 2 && pre.is_cpu() && up.is_cpu() && pre.is_contiguous() &&
                        up.is_contiguous() && up.scalar_type() == pre.scalar_type() && up.size(0) == pre.size(0) &&
                        up.size(1) == pre.size(1),
                    "pre and up must be contiguous CPU matrices of one shape and dtype");
    HiddenCall call{};
    call.tokens = pre.size(0);
    call.neurons = pre.size(1);
    call.pre = pre.const_data_ptr();
    call.up = up.const_data_ptr();
    call.rule =
        thresholding(threshold, token_scale, skipped_mean, activation_params, activation, call.tokens, call.neurons);
    const Tensor out = torch::stable::empty({call.tokens, call.neurons}, pre.scalar_type());
    call.out = out.mutable_data_ptr();
    const GatedMlpKernels& kernel = kernels(isa, dtype);
    std::atomic<bool> valid{true};
    const int64_t grain = std::max<int64_t>(1, 8192 / std::max<int64_t>(1, call.neurons));
    torch::stable::parallel_for(0, call.tokens, grain, [&](int64_t begin, int64_t end) {
        if (!kernel.hidden(call, begin, end))
            valid = false;
    });
    STD_TORCH_CHECK(valid, kBadThreshold);
    return out;
}

} // namespace
} // namespace sparsemlp

STABLE_TORCH_LIBRARY_IMPL(sparsemlp, CPU, m) {
    m.impl("_gated_mlp_native", TORCH_BOX(&sparsemlp::gated_mlp));
    m.impl("_gated_mlp_hidden_native", TORCH_BOX(&sparsemlp::hidden));
}
