// The input-sparse linear layer's operator for CPU tensors: checks what could make a kernel read out of bounds, and
// splits the work over PyTorch's threads.
#include <algorithm>
#include <atomic>
#include <vector>

#include "cpu.h"
#include "sparse_linear.h"
#include "tensors.h"

namespace sparsemlp {
namespace {

const SparseLinearKernels& kernels(int64_t isa, Dtype dtype) {
#if defined(__x86_64__)
    static const SparseLinearTable* const tables[] = {&sparse_linear_portable, &sparse_linear_avx2,
                                                      &sparse_linear_avx512, &sparse_linear_avx512bf16};
#else
    static const SparseLinearTable* const tables[] = {&sparse_linear_portable};
#endif
    STD_TORCH_CHECK(isa >= 0 && isa <= sparsemlp_cpu_isa(), "isa ", isa, " is not one this CPU runs");
    return (*tables[isa])[static_cast<int>(dtype)];
}

// Computes call.out; returns a bit for every token with a sum that is not finite.
uint32_t compute(SparseLinearCall call, const SparseLinearKernels& kernel) {
    const int64_t threads = torch::stable::get_num_threads();
    call.segments = std::clamp<int64_t>(call.channels * call.tokens / 4096, 1, threads);
    const int64_t slots =
        std::clamp<int64_t>(std::min(call.channels * call.width / 16384, call.width / 64), 1, threads);
    const int64_t lists = call.segments * 8 + call.channels * (8 + call.tokens * 4);
    const Tensor list = torch::stable::empty({lists}, ScalarType::Char);
    call.counts = static_cast<int64_t*>(list.mutable_data_ptr());
    call.index = reinterpret_cast<int32_t*>(call.counts + call.segments);
    call.mask = reinterpret_cast<uint32_t*>(call.index + call.channels);
    call.values = reinterpret_cast<float*>(call.mask + call.channels);
    const Tensor scratch = torch::stable::empty({slots * 2 * kLinearSums}, ScalarType::Float);
    float* sums = static_cast<float*>(scratch.mutable_data_ptr());
    std::atomic<bool> valid{true};
    torch::stable::parallel_for(0, call.segments, 1, [&](int64_t begin, int64_t end) {
        for (int64_t segment = begin; segment < end; ++segment)
            if (!kernel.select(call, segment))
                valid = false;
    });
    STD_TORCH_CHECK(valid, kBadThreshold);
    const auto columns = kernel.columns[call.scale != nullptr];
    std::atomic<uint32_t> wrong{0};
    torch::stable::parallel_for(0, slots, 1, [&](int64_t begin, int64_t end) {
        for (int64_t slot = begin; slot < end; ++slot) {
            const auto edge = [&](int64_t s) { return s == slots ? call.width : call.width * s / slots / 64 * 64; };
            wrong |= columns(call, edge(slot), edge(slot + 1), sums + slot * 2 * kLinearSums);
        }
    });
    return wrong;
}

Tensor sparse_linear(Tensor x, Tensor weight_t, Tensor threshold, OptionalTensor token_scale, OptionalTensor bias,
                     OptionalTensor scale, bool wide, int64_t isa) {
    const Dtype dtype = dtype_of(x);
    const ScalarType type = x.scalar_type();
    const Tokens tokens = tokens_of(x);
    STD_TORCH_CHECK(weight_t.dim() == 2, "weight_t must be a matrix");
    SparseLinearCall call{};
    call.tokens = tokens.count;
    call.channels = tokens.width;
    call.width = weight_t.size(1);
    call.x = tokens.data;
    call.x_stride = tokens.stride;
    STD_TORCH_CHECK(call.tokens <= kMaxTokens, "at most ", kMaxTokens, " tokens");
    STD_TORCH_CHECK(call.channels <= INT32_MAX, "at most 2^31 - 1 channels");
    call.weight = rows(weight_t, "weight_t", call.channels, call.width, scale.has_value() ? ScalarType::Char : type,
                       &call.weight_stride);
    call.scale = floats(scale, "scale", call.width);
    call.bias = vector(bias, "bias", call.width, type);
    call.threshold = thresholds(threshold, call.channels, &call.threshold_step);
    call.token_scale = floats(token_scale, "token_scale", call.tokens);
    call.wide = wide;
    std::vector<int64_t> shape(x.sizes().begin(), x.sizes().end());
    shape.back() = call.width;
    const Tensor out = torch::stable::empty(shape, wide ? ScalarType::Float : type);
    if (call.tokens == 0 || call.width == 0)
        return out;
    call.out = out.mutable_data_ptr();
    const SparseLinearKernels& kernel = kernels(isa, dtype);
    const uint32_t wrong = compute(call, kernel);
    // Tokens of a batch multiply rows they do not want by 0, which is not 0 for inf and NaN: such a token is done
    // again alone, where unwanted rows are not touched. int8 rows are finite.
    if (call.tokens == 1 || wrong == 0 || call.scale != nullptr ||
        !any_not_finite(call.weight, call.channels, call.width, call.weight_stride, dtype))
        return out;
    const int64_t bytes = dtype == Dtype::f32 ? 4 : 2;
    for (int64_t t = 0; t < call.tokens; ++t) {
        if ((wrong >> t & 1) == 0)
            continue;
        SparseLinearCall one = call;
        one.tokens = 1;
        one.x = static_cast<const char*>(call.x) + t * call.x_stride * bytes;
        one.out = static_cast<char*>(call.out) + t * call.width * (wide ? 4 : bytes);
        one.token_scale = call.token_scale != nullptr ? call.token_scale + t : nullptr;
        compute(one, kernel);
    }
    return out;
}

} // namespace
} // namespace sparsemlp

STABLE_TORCH_LIBRARY_IMPL(sparsemlp, CPU, m) { m.impl("_sparse_linear_native", TORCH_BOX(&sparsemlp::sparse_linear)); }
