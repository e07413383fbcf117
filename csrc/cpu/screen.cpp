// The screen's operator for CPU tensors: checks what could make a kernel read out of bounds, and splits the work over
// PyTorch's threads.
#include "screen.h"

#include <algorithm>

#include "cpu.h"
#include "tensors.h"

namespace sparsemlp {
namespace {

const ScreenKernels& kernels(int64_t isa, Dtype dtype) {
#if defined(__x86_64__)
    static const ScreenTable* const tables[] = {&screen_portable, &screen_avx2, &screen_avx512, &screen_avx512bf16};
#else
    static const ScreenTable* const tables[] = {&screen_portable};
#endif
    STD_TORCH_CHECK(isa >= 0 && isa <= sparsemlp_cpu_isa(), "isa ", isa, " is not one this CPU runs");
    return (*tables[isa])[static_cast<int>(dtype)];
}

LowBits low_bits(const ScreenCall& call, const Tensor& codes, const Tensor& scale, const OptionalTensor& bias,
                 ScalarType type) {
    const int64_t blocks = (call.neurons + kScreenRows - 1) / kScreenRows;
    STD_TORCH_CHECK(codes.is_cpu() && codes.scalar_type() == ScalarType::Byte && codes.dim() == 4 &&
                        codes.size(0) == blocks && codes.size(1) == call.groups && codes.size(2) == call.bits &&
                        codes.size(3) == 2 * call.group && codes.is_contiguous(),
                    "a screen's codes must be a contiguous CPU tensor of the sizes that pack makes");
    STD_TORCH_CHECK(scale.is_cpu() && scale.scalar_type() == ScalarType::BFloat16 && scale.dim() == 3 &&
                        scale.size(0) == blocks && scale.size(1) == call.groups && scale.size(2) == kScreenRows &&
                        scale.is_contiguous(),
                    "a screen's scales must be a contiguous CPU tensor of the sizes that pack makes");
    return {static_cast<const uint8_t*>(codes.const_data_ptr()), static_cast<const bf16*>(scale.const_data_ptr()),
            vector(bias, "a bias", call.neurons, type)};
}

// Bytes of codes that are worth a thread of their own.
constexpr int64_t kShare = 32768;

Tensor screen(Tensor x, Tensor gate, Tensor up, Tensor scale_gate, Tensor scale_up, OptionalTensor b_gate,
              OptionalTensor b_up, OptionalTensor activation_params, int64_t neurons, int64_t activation, int64_t isa) {
    const Tokens tokens = tokens_of(x);
    STD_TORCH_CHECK(gate.dim() == 4, "a screen's codes must be (F / 16, D / group, bits, 2 · group)");
    STD_TORCH_CHECK(activation >= 0 && activation < static_cast<int64_t>(Activation::count), "unknown activation");
    ScreenCall call{};
    call.tokens = tokens.count;
    call.width = tokens.width;
    call.neurons = neurons;
    call.bits = gate.size(2);
    call.group = gate.size(3) / 2;
    STD_TORCH_CHECK(neurons >= 0 && (call.bits == 3 || call.bits == 4 || call.bits == 8) && call.group > 0 &&
                        call.group % 32 == 0 && call.group <= kMostGroup,
                    "a screen has 3, 4 or 8 bits in groups of 32, 64 or 128");
    call.groups = (call.width + call.group - 1) / call.group;
    call.gate = low_bits(call, gate, scale_gate, b_gate, x.scalar_type());
    call.up = low_bits(call, up, scale_up, b_up, x.scalar_type());
    call.activation = static_cast<Activation>(activation);
    const int wanted = kActivationParams[activation];
    STD_TORCH_CHECK((wanted > 0) == activation_params.has_value(), "activation_params do not fit the activation");
    call.params = floats(activation_params, "activation_params", wanted);
    call.x = tokens.data;
    call.x_stride = tokens.stride;
    const Tensor values = torch::stable::empty({call.tokens * call.groups * call.group}, ScalarType::Char);
    const Tensor unit = torch::stable::empty({call.tokens * call.groups}, ScalarType::Float);
    const Tensor offset = torch::stable::empty({call.tokens * call.groups}, ScalarType::Int);
    const Tensor out = torch::stable::empty({call.tokens, neurons}, ScalarType::Float);
    call.values = static_cast<int8_t*>(values.mutable_data_ptr());
    call.unit = static_cast<float*>(unit.mutable_data_ptr());
    call.offset = static_cast<int32_t*>(offset.mutable_data_ptr());
    call.out = static_cast<float*>(out.mutable_data_ptr());
    const ScreenKernels& kernel = kernels(isa, dtype_of(x));
    torch::stable::parallel_for(0, call.tokens, 8, [&](int64_t begin, int64_t end) {
        for (int64_t token = begin; token < end; ++token)
            kernel.quantize(call, token);
    });
    const int64_t blocks = (neurons + kScreenRows - 1) / kScreenRows;
    const int64_t bytes = call.groups * call.group * call.bits * 4;
    const int64_t grain = std::max<int64_t>(1, kShare / std::max<int64_t>(1, bytes));
    torch::stable::parallel_for(0, blocks, grain, [&](int64_t begin, int64_t end) { kernel.blocks(call, begin, end); });
    return out;
}

} // namespace
} // namespace sparsemlp

STABLE_TORCH_LIBRARY_IMPL(sparsemlp, CPU, m) { m.impl("_screen_native", TORCH_BOX(&sparsemlp::screen)); }
