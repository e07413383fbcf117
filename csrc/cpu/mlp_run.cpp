// Runs a call of the MLPs' fused kernel: chooses the instruction set, splits the work over PyTorch's threads, and does
// tokens again whose sums met the inf or NaN of a row they do not want.
#include "mlp_run.h"

#include <algorithm>
#include <atomic>
#include <numeric>
#include <vector>

#include "cpu.h"

namespace sparsemlp {
namespace {

const MlpKernels& kernels(int64_t isa, Dtype dtype) {
#if defined(__x86_64__)
    static const MlpTable* const tables[] = {&mlp_portable, &mlp_avx2, &mlp_avx512, &mlp_avx512bf16};
#else
    static const MlpTable* const tables[] = {&mlp_portable};
#endif
    STD_TORCH_CHECK(isa >= 0 && isa <= sparsemlp_cpu_isa(), "isa ", isa, " is not one this CPU runs");
#if defined(__x86_64__)
    if (tables[isa] == &mlp_avx512bf16 && dtype == Dtype::f32)
        return mlp_avx512bf16_f32;
#endif
    return (*tables[isa])[static_cast<int>(dtype)];
}

// How dense the layers' recent calls were, by the address of the down weight: what the router asks. Two layers may
// share a place, and threads may write at once; then a figure is lost, no more.
struct Seen {
    std::atomic<const void*> weight{nullptr};
    std::atomic<float> density{0.f};
};
constexpr size_t kSeen = 4096;
Seen seen[kSeen];

Seen& seen_of(const void* weight) {
    return seen[(reinterpret_cast<uintptr_t>(weight) >> 6) * 0x9E3779B97F4A7C15u >> 52];
}

void observe(const void* weight, int64_t active, int64_t tokens, int64_t neurons) {
    if (tokens * neurons == 0)
        return;
    const float now = static_cast<float>(static_cast<double>(active) / static_cast<double>(tokens * neurons));
    Seen& at = seen_of(weight);
    const bool known = at.weight.load(std::memory_order_relaxed) == weight;
    at.density.store(known ? 0.75f * at.density.load(std::memory_order_relaxed) + 0.25f * now : now,
                     std::memory_order_relaxed);
    at.weight.store(weight, std::memory_order_relaxed);
}

// Mean fraction of active entries in recent calls with this down weight, NaN when there were none.
double density(Tensor weight) {
    const Seen& at = seen_of(weight.const_data_ptr());
    return at.weight.load(std::memory_order_relaxed) == weight.const_data_ptr()
               ? static_cast<double>(at.density.load(std::memory_order_relaxed))
               : __builtin_nan("");
}

// Computes call.out; finite[t] becomes 0 where token t's sums were not finite.
void compute(MlpCall call, const MlpKernels& kernel, uint8_t* finite) {
    const int64_t size = call.slots * slot_floats(call.tokens, call.width);
    const Tensor scratch = torch::stable::empty({size}, ScalarType::Float);
    call.scratch = static_cast<float*>(scratch.mutable_data_ptr());
    std::vector<int64_t> active(call.slots, 0);
    call.active = active.data();
    const auto slot_kernel = kernel.slot[call.down.scale != nullptr];
    std::atomic<bool> valid{true};
    torch::stable::parallel_for(0, call.slots, 1, [&](int64_t begin, int64_t end) {
        for (int64_t slot = begin; slot < end; ++slot)
            if (!slot_kernel(call, slot))
                valid = false;
    });
    STD_TORCH_CHECK(valid, kBadThreshold);
    observe(call.down.rows, std::accumulate(active.begin(), active.end(), int64_t{0}), call.tokens, call.neurons);
    // One task is a run of a token's outputs; small outputs are not worth a second region.
    const int64_t total = call.tokens * call.width;
    const int64_t grain = std::max<int64_t>(1024, 16384 / call.slots);
    std::atomic<uint32_t> wrong{0};
    torch::stable::parallel_for(0, total, grain, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end;) {
            const int64_t t = i / call.width, stop = std::min(end, (t + 1) * call.width);
            if (!kernel.reduce(call, i, stop))
                wrong |= 1u << t;
            i = stop;
        }
    });
    for (int64_t t = 0; t < call.tokens; ++t)
        finite[t] = (wrong >> t & 1) == 0;
}

// The tokens as integers, for int8 weights, into tensors that must outlive the call; zeros and a bit of `bad` where one
// cannot be held.
std::pair<Tensor, Tensor> quantize(MlpCall& call, const MlpKernels& kernel, Dtype dtype, uint32_t* bad) {
    call.quantized.parts = dtype == Dtype::f32 ? 2 : 1;
    const int64_t each = call.quantized.parts * call.width, bytes = dtype == Dtype::f32 ? 4 : 2;
    const Tensor values = torch::stable::empty({call.tokens * each}, ScalarType::Short);
    const Tensor units = torch::stable::empty({call.tokens}, ScalarType::Float);
    int16_t* out = static_cast<int16_t*>(values.mutable_data_ptr());
    float* unit = static_cast<float*>(units.mutable_data_ptr());
    std::atomic<uint32_t> not_finite{0};
    torch::stable::parallel_for(0, call.tokens, 4, [&](int64_t begin, int64_t end) {
        for (int64_t t = begin; t < end; ++t) {
            const char* x = static_cast<const char*>(call.x) + t * call.x_stride * bytes;
            if (kernel.quantize(x, call.width, call.quantized.parts, out + t * each, unit + t))
                continue;
            std::fill(out + t * each, out + (t + 1) * each, int16_t{0});
            unit[t] = 0.f;
            not_finite |= 1u << t;
        }
    });
    *bad = not_finite;
    call.quantized.values = out;
    call.quantized.unit = unit;
    return {values, units};
}

// The tokens laid out in lanes, into a tensor that must outlive the call.
Tensor pack(MlpCall& call, const LaneKernels& lanes) {
    const int64_t panels = (call.tokens + lanes.tokens - 1) / lanes.tokens;
    const Tensor packed = torch::stable::empty({panels * lanes.floats(call.width) + 16}, ScalarType::Float);
    float* out = static_cast<float*>(packed.mutable_data_ptr());
    torch::stable::parallel_for(0, panels, 1, [&](int64_t begin, int64_t end) {
        for (int64_t panel = begin; panel < end; ++panel)
            lanes.pack(call.x, call.x_stride, call.tokens, call.width, panel, out);
    });
    call.lanes = out;
    return packed;
}

// Many tokens: call.out by dense products; finite[t] says whether token t's sums were finite.
void compute_dense(MlpCall call, const MlpKernels& kernel, std::vector<uint8_t>& finite) {
    const DenseKernels& dense = kernel.dense;
    const Tensor packed = pack(call, kernel.lanes);
    const Tensor hidden =
        torch::stable::empty({dense.hidden_floats(call.tokens, call.neurons) + 16}, ScalarType::Float);
    const DenseCall work{call, static_cast<float*>(hidden.mutable_data_ptr())};
    const int64_t threads = torch::stable::get_num_threads();
    const Tensor scratch = torch::stable::empty({threads * kDenseFloats}, ScalarType::Float);
    float* own = static_cast<float*>(scratch.mutable_data_ptr());
    const bool int8 = call.down.scale != nullptr;
    std::atomic<bool> valid{true};
    // Slot s of `slots` takes whole blocks of `block`.
    const auto each = [&](int64_t size, int64_t block, const auto& body) {
        const int64_t blocks = (size + block - 1) / block, slots = std::min(threads, blocks);
        const auto edge = [=](int64_t s) { return std::min(size, blocks * s / slots * block); };
        torch::stable::parallel_for(0, slots, 1, [&](int64_t begin, int64_t end) {
            for (int64_t s = begin; s < end; ++s)
                body(s, edge(s), edge(s + 1));
        });
    };
    std::atomic<int64_t> active{0};
    each(call.neurons, kDenseRows, [&](int64_t s, int64_t begin, int64_t end) {
        int64_t count = 0;
        if (!dense.hidden[int8](work, begin, end, own + s * kDenseFloats, &count))
            valid = false;
        active += count;
    });
    STD_TORCH_CHECK(valid, kBadThreshold);
    observe(call.down.rows, active, call.tokens, call.neurons);
    std::vector<uint8_t> good(threads * call.tokens, 1);
    each(call.width, dense.columns, [&](int64_t s, int64_t begin, int64_t end) {
        dense.down[int8](work, begin, end, own + s * kDenseFloats, good.data() + s * call.tokens);
    });
    for (int64_t i = 0; i < threads * call.tokens; ++i)
        finite[i % call.tokens] &= good[i];
}

// Token t alone.
MlpCall one_token(const MlpCall& call, Dtype dtype, int64_t t) {
    const int64_t bytes = dtype == Dtype::f32 ? 4 : 2;
    MlpCall one = call;
    one.tokens = 1;
    one.x = static_cast<const char*>(call.x) + t * call.x_stride * bytes;
    one.out = static_cast<char*>(call.out) + t * call.width * bytes;
    if (call.pre != nullptr)
        one.pre = call.pre + t * call.neurons;
    if (call.scores != nullptr)
        one.scores = call.scores + t * call.neurons;
    one.rule.token_scale = call.rule.token_scale != nullptr ? call.rule.token_scale + t : nullptr;
    return one;
}

void repeat_token(const MlpCall& call, const MlpKernels& kernel, Dtype dtype, int64_t t) {
    uint8_t finite = 1;
    compute(one_token(call, dtype, t), kernel, &finite);
}

// Few tokens. With int8 weights a token with an inf or NaN is done by floating-point products, alone: the others' bits
// do not depend on it.
void compute_fused(MlpCall call, const MlpKernels& kernel, Dtype dtype, uint8_t* finite) {
    std::optional<Tensor> packed;
    std::optional<std::pair<Tensor, Tensor>> integers;
    uint32_t bad = 0;
    if (call.tokens >= kernel.lanes.from)
        packed = pack(call, kernel.lanes);
    else if (call.down.scale != nullptr)
        integers = quantize(call, kernel, dtype, &bad);
    compute(call, kernel, finite);
    for (int64_t t = 0; t < call.tokens; ++t)
        if ((bad >> t & 1) != 0) {
            MlpCall one = one_token(call, dtype, t);
            const Tensor lanes = pack(one, kernel.lanes);
            compute(one, kernel, finite + t);
        }
}

} // namespace

Thresholding thresholding(const MlpOptions& options, Indicator indicator, int64_t tokens, int64_t neurons) {
    STD_TORCH_CHECK(options.activation >= 0 && options.activation < static_cast<int64_t>(Activation::count),
                    "unknown activation");
    Thresholding rule{};
    rule.threshold = thresholds(options.threshold, neurons, &rule.threshold_step);
    rule.token_scale = floats(options.token_scale, "token_scale", tokens);
    rule.skipped_mean = floats(options.skipped_mean, "skipped_mean", neurons);
    rule.activation = static_cast<Activation>(options.activation);
    const int wanted = kActivationParams[options.activation];
    STD_TORCH_CHECK((wanted > 0) == options.params.has_value(), "activation_params do not fit the activation");
    rule.params = floats(options.params, "activation_params", wanted);
    rule.indicator = indicator;
    return rule;
}

const float* scores_of(const OptionalTensor& scores, Indicator indicator, int64_t tokens, int64_t neurons) {
    STD_TORCH_CHECK(scores.has_value() == (indicator == Indicator::screen), "scores belong to the indicator screen");
    int64_t stride = 0;
    if (!scores.has_value())
        return nullptr;
    STD_TORCH_CHECK(scores->is_contiguous(), "scores must be contiguous");
    return static_cast<const float*>(rows(*scores, "scores", tokens, neurons, ScalarType::Float, &stride));
}

Matrix matrix(const Tensor& w, const OptionalTensor& bias, const OptionalTensor& scale, const char* name,
              int64_t neurons, int64_t width, int64_t outputs, ScalarType type) {
    Matrix m{};
    m.rows = rows(w, name, neurons, width, scale.has_value() ? ScalarType::Char : type, &m.stride);
    m.scale = floats(scale, "a weight's scale", outputs);
    m.bias = vector(bias, "a bias", outputs, type);
    return m;
}

Tensor run(MlpCall call, const Tensor& x, int64_t isa) {
    const Dtype dtype = dtype_of(x);
    const MlpKernels& kernel = kernels(isa, dtype);
    STD_TORCH_CHECK(call.neurons <= INT32_MAX, "at most 2^31 - 1 neurons");
    const Tensor out = torch::stable::empty(x.sizes(), x.scalar_type());
    if (call.tokens == 0 || call.width == 0)
        return out;
    call.out = out.mutable_data_ptr();
    // From sizes that batch mates do not change: a token's sums are split alike in every batch of the fused kernel.
    const int64_t useful = std::max<int64_t>(1, call.neurons * call.width / 16384);
    const int64_t blocks = std::max<int64_t>(1, (call.neurons + kBlock - 1) / kBlock);
    call.slots = std::min<int64_t>({torch::stable::get_num_threads(), useful, blocks});
    std::vector<uint8_t> finite(call.tokens, 1);
    const bool int8 = call.down.scale != nullptr;
    if (call.tokens > kMaxTokens)
        compute_dense(call, kernel, finite);
    else
        compute_fused(call, kernel, dtype, finite.data());
    // Tokens of a batch multiply rows they do not want by 0, which is not 0 for inf and NaN: such a token is done
    // again alone, where unwanted rows are not touched. int8 rows are finite.
    if (call.tokens == 1 || int8 || std::find(finite.begin(), finite.end(), 0) == finite.end() ||
        !any_not_finite(call.down.rows, call.neurons, call.width, call.down.stride, dtype))
        return out;
    for (int64_t t = 0; t < call.tokens; ++t)
        if (!finite[t])
            repeat_token(call, kernel, dtype, t);
    return out;
}

namespace {

Tensor hidden(Tensor pre, OptionalTensor up, Tensor threshold, OptionalTensor token_scale, OptionalTensor skipped_mean,
              OptionalTensor activation_params, int64_t activation, int64_t indicator, int64_t isa,
              OptionalTensor weight, OptionalTensor scores) {
    const Dtype dtype = dtype_of(pre);
    STD_TORCH_CHECK(pre.is_cpu() && pre.dim() == 2 && pre.is_contiguous(), "pre must be contiguous, (T, F)");
    STD_TORCH_CHECK(!up.has_value() || (up->is_cpu() && up->dim() == 2 && up->is_contiguous() &&
                                        up->scalar_type() == pre.scalar_type() && up->size(0) == pre.size(0) &&
                                        up->size(1) == pre.size(1)),
                    "up must be like pre");
    STD_TORCH_CHECK(indicator >= 0 && indicator < static_cast<int64_t>(Indicator::none), "unknown indicator");
    HiddenCall call{};
    call.tokens = pre.size(0);
    call.neurons = pre.size(1);
    call.pre = pre.const_data_ptr();
    call.up = up.has_value() ? up->const_data_ptr() : nullptr;
    call.scores = scores_of(scores, static_cast<Indicator>(indicator), call.tokens, call.neurons);
    const MlpOptions options{threshold, token_scale, skipped_mean, activation_params, activation};
    call.rule = thresholding(options, up.has_value() ? static_cast<Indicator>(indicator) : Indicator::none, call.tokens,
                             call.neurons);
    const Tensor out = torch::stable::empty({call.tokens, call.neurons}, pre.scalar_type());
    call.out = out.mutable_data_ptr();
    const MlpKernels& kernel = kernels(isa, dtype);
    std::atomic<bool> valid{true};
    const int64_t grain = std::max<int64_t>(1, 8192 / std::max<int64_t>(1, call.neurons));
    std::atomic<int64_t> active{0};
    torch::stable::parallel_for(0, call.tokens, grain, [&](int64_t begin, int64_t end) {
        int64_t count = 0;
        if (!kernel.hidden(call, begin, end, &count))
            valid = false;
        active += count;
    });
    STD_TORCH_CHECK(valid, kBadThreshold);
    if (weight.has_value())
        observe(weight->const_data_ptr(), active, call.tokens, call.neurons);
    return out;
}

} // namespace
} // namespace sparsemlp

STABLE_TORCH_LIBRARY_IMPL(sparsemlp, CPU, m) {
    m.impl("_hidden_native", TORCH_BOX(&sparsemlp::hidden));
    m.impl("_density_native", TORCH_BOX(&sparsemlp::density));
}
