// The activations' ids, in the order of sparsemlp/activations.py (a test compares the two lists).
#pragma once

namespace sparsemlp {

enum class Activation : int { relu, relu2, jsrelu, weird, fatrelu, mix, silu, gelu, gelu_tanh, identity, count };

// How many parameters each has (another test compares these).
constexpr int kActivationParams[] = {0, 0, 0, 3, 1, 1, 0, 0, 0, 0};
static_assert(sizeof(kActivationParams) / sizeof(int) == static_cast<int>(Activation::count));

} // namespace sparsemlp
