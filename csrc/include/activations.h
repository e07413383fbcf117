// The activations' ids, in the order of sparsemlp/activations.py (a test compares the two lists).
#pragma once

namespace sparsemlp {

enum class Activation : int { relu, relu2, jsrelu, weird, fatrelu, mix, silu, gelu, gelu_tanh, identity, count };

} // namespace sparsemlp
