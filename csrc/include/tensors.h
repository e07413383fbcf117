// What the CPU operators check of their tensors: enough that no kernel reads out of bounds. Public messages are
// Python's (sparsemlp/ops).
#pragma once

#include <atomic>
#include <optional>

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include "activations.h"
#include "scalar.h"

namespace sparsemlp {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;

constexpr const char* kBadThreshold =
    "sparsemlp: threshold holds a negative or NaN value, expected values >= 0 (inf: never active)";

inline Dtype dtype_of(const Tensor& x) {
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

inline const void* rows(const Tensor& t, const char* name, int64_t count, int64_t width, ScalarType type,
                        int64_t* stride) {
    STD_TORCH_CHECK(t.is_cpu() && t.scalar_type() == type && t.dim() == 2 && t.size(0) == count && t.size(1) == width &&
                        (width <= 1 || count == 0 || t.stride(1) == 1),
                    name, " must be a CPU tensor of the wanted dtype, shape (", count, ", ", width,
                    ") and unit inner stride");
    *stride = t.stride(0);
    return t.const_data_ptr();
}

inline const void* vector(const OptionalTensor& t, const char* name, int64_t size, ScalarType type) {
    if (!t.has_value())
        return nullptr;
    STD_TORCH_CHECK(t->is_cpu() && t->scalar_type() == type && t->dim() == 1 && t->size(0) == size &&
                        (size <= 1 || t->stride(0) == 1),
                    name, " must be a CPU tensor of shape (", size, ") and unit stride");
    return t->const_data_ptr();
}

inline const float* floats(const OptionalTensor& t, const char* name, int64_t size) {
    return static_cast<const float*>(vector(t, name, size, ScalarType::Float));
}

// A threshold's values, and the step between two neurons' (0 for a scalar).
inline const float* thresholds(const Tensor& threshold, int64_t size, int64_t* step) {
    *step = threshold.dim() == 0 ? 0 : 1;
    if (threshold.dim() == 0)
        STD_TORCH_CHECK(threshold.is_cpu() && threshold.scalar_type() == ScalarType::Float,
                        "threshold must be a float32 CPU tensor");
    return threshold.dim() == 0 ? static_cast<const float*>(threshold.const_data_ptr())
                                : floats(threshold, "threshold", size);
}

// x of shape (..., D) as T rows; null stride checks where x is no matrix: it must be contiguous then.
struct Tokens {
    int64_t count, width, stride;
    const void* data;
};
inline Tokens tokens_of(const Tensor& x) {
    STD_TORCH_CHECK(x.is_cpu() && x.dim() >= 1, "x must be a CPU tensor (..., D)");
    STD_TORCH_CHECK(x.dim() == 2 || x.is_contiguous(), "x must be a matrix or contiguous");
    Tokens t{1, x.size(x.dim() - 1), 0, nullptr};
    for (int64_t i = 0; i + 1 < x.dim(); ++i)
        t.count *= x.size(i);
    t.stride = t.width;
    t.data = x.dim() == 2 ? rows(x, "x", t.count, t.width, x.scalar_type(), &t.stride) : x.const_data_ptr();
    return t;
}

// True when a [count, width] matrix of floats holds an inf or NaN, i.e. when 0 · w need not be 0.
inline bool any_not_finite(const void* data, int64_t count, int64_t width, int64_t stride, Dtype dtype) {
    std::atomic<bool> found{false};
    const auto scan = [&]<class Word>(const Word* w, Word exponent) {
        torch::stable::parallel_for(0, count, 64, [&](int64_t begin, int64_t end) {
            Word bad = 0; // a word, not a bool: so the compiler compares whole vectors
            for (int64_t j = begin; j < end; ++j)
                for (int64_t d = 0; d < width; ++d)
                    bad |= static_cast<Word>((w[j * stride + d] & exponent) == exponent);
            if (bad != 0)
                found = true;
        });
    };
    if (dtype == Dtype::f32)
        scan(static_cast<const uint32_t*>(data), uint32_t{0x7f800000});
    else
        scan(static_cast<const uint16_t*>(data), static_cast<uint16_t>(dtype == Dtype::bf16 ? 0x7f80 : 0x7c00));
    return found;
}

} // namespace sparsemlp
