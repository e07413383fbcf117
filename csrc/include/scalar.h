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
// Whether a group's rows are added whole to the tokens' sums, which stay in the second cache level, while the next
// group's rows are prefetched whole; else a stretch of columns at a time.
constexpr int64_t kWholeSums = 16384;
inline bool whole_rows(int64_t tokens, int64_t width) { return tokens == 1 || tokens * width <= kWholeSums; }

// The sums pass through the caches as often as there are groups, and what is prefetched must stay in them: about 96 KB
// of rows (4 tokens, D 4096, bf16: 12 rows 7.9 ms, 24 rows 9.3; D 768: 12 rows 0.48 ms, 48 rows 0.41). By stretches
// 16 tokens take 10.2 ms with 8 rows, 7.2 with 48. One token's sums stay in the first level: few rows follow best.
constexpr int64_t kWholeBytes = 98304;
inline int64_t group_rows(int64_t tokens, int64_t width, int64_t size, bool whole) {
    if (tokens == 1)
        return 16;
    if (!whole)
        return kGroup;
    const int64_t rows = kWholeBytes / (width * size + 1) / 12 * 12; // whole tiles of 6
    return rows < 12 ? 12 : rows > kGroup ? kGroup : rows;
}

enum class Dtype : int { f32, bf16, f16, count };

} // namespace sparsemlp
