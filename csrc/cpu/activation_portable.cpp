// The activation operator for any CPU.
#include <cmath>

#include "activation.h"

namespace sparsemlp {
namespace {
#include "scalar.inl"

#include "activations.inl"

#include "activation.inl"
} // namespace

const ActivationTable activation_portable = SPARSEMLP_ACTIVATION_TABLE;
} // namespace sparsemlp
