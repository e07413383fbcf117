// Storage types of 16-bit floats, the element types a kernel can be called with, and how many rows it adds at once.
#pragma once

#include <cstdint>

namespace sparsemlp {

struct bf16 {
    uint16_t bits;
};
struct f16 {
    uint16_t bits;
};

constexpr int64_t kMaxTokens = 32; // bits of a token mask
constexpr int64_t kGroup = 48;     // weight rows in one pass over the sums, at most
// For several tokens the sums pass through the caches as often as there are groups: 10.2 ms with 8 rows at 16 tokens,
// 7.2 with 48 (D 4096, F 14336, bf16). For one they stay in the first level, and few rows follow the prefetching best.
inline int64_t group_rows(int64_t tokens) { return tokens == 1 ? 16 : kGroup; }

enum class Dtype : int { f32, bf16, f16, count };

} // namespace sparsemlp
