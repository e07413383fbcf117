// Storage types of 16-bit floats, and the element types a kernel can be called with.
#pragma once

#include <cstdint>

namespace sparsemlp {

struct bf16 {
    uint16_t bits;
};
struct f16 {
    uint16_t bits;
};

enum class Dtype : int { f32, bf16, f16, count };

} // namespace sparsemlp
