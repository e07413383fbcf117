// The MLPs for any CPU.
#include <cmath>
#include <cstring>

#include "mlp.h"

namespace sparsemlp {
namespace {
#include "scalar.inl"

#include "vec_portable.inl"

#include "activations.inl"

#include "tiles.inl"

#include "int8.inl"

#include "hidden.inl"

#include "outputs.inl"

#include "lanes.inl"

#include "panels.inl"

#include "dense.inl"

#include "mlp.inl"
} // namespace

const MlpTable mlp_portable = SPARSEMLP_MLP_TABLE;
} // namespace sparsemlp
