// Everything the MLPs of one instruction set consist of, in order. Included inside that unit's target region and
// anonymous namespace, after scalar.inl and its vector file.
#include "activations.inl"

#include "tiles.inl"

#include "int8.inl"

#include "hidden.inl"

#include "want.inl"

#include "outputs.inl"

#include "lanes.inl"

#include "panels.inl"

#include "dense.inl"

#include "mlp.inl"
