// The gated MLP for any CPU.
#include <cmath>
#include <cstring>

#include "gated_mlp.h"

namespace sparsemlp {
namespace {
#include "scalar.inl"

#include "vec_portable.inl"

#include "activations.inl"

#include "tiles.inl"

#include "gated_mlp.inl"
} // namespace

const GatedMlpTable gated_mlp_portable = SPARSEMLP_GATED_MLP_TABLE;
} // namespace sparsemlp
