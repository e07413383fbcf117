// Conversions of single values, for the unit that includes this; SPARSEMLP_F16C: by the CPU's own instruction.

inline float as_float(uint32_t bits) { return __builtin_bit_cast(float, bits); }
inline uint32_t as_bits(float value) { return __builtin_bit_cast(uint32_t, value); }

inline float widen(float v) { return v; }
inline float widen(int8_t v) { return v; }
inline float widen(bf16 v) { return __builtin_bit_cast(float, static_cast<uint32_t>(v.bits) << 16); }
inline void narrow(float v, float* out) { *out = v; }
inline void narrow(float v, bf16* out) {
    const uint32_t bits = as_bits(v);
    const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16; // to nearest, ties to even
    out->bits = static_cast<uint16_t>(v == v ? rounded : (bits >> 16) | 0x40);
}

#if defined(SPARSEMLP_F16C)
inline float widen(f16 v) { return _cvtsh_ss(v.bits); }
inline void narrow(float v, f16* out) { out->bits = _cvtss_sh(v, _MM_FROUND_TO_NEAREST_INT); }
#else
inline float widen(f16 v) {
    const uint32_t sign = static_cast<uint32_t>(v.bits & 0x8000) << 16, rest = v.bits & 0x7fff;
    if (rest >= 0x7c00) // inf, NaN
        return as_float(sign | 0x7f800000 | ((rest & 0x3ff) << 13));
    if (rest < 0x400) // subnormal: rest · 2^-24, exact
        return as_float(sign | as_bits(static_cast<float>(rest) * 5.96046448e-8f));
    return as_float(sign | ((rest << 13) + (112u << 23)));
}
inline void narrow(float v, f16* out) {
    const uint32_t bits = as_bits(v), sign = (bits >> 16) & 0x8000, rest = bits & 0x7fffffff;
    uint32_t half;
    if (rest > 0x7f800000) // NaN
        half = 0x7e00 | ((rest >> 13) & 0x3ff);
    else if (rest >= 0x477ff000) // 65520 and more round to inf
        half = 0x7c00;
    else if (rest < 0x38800000) // below 2^-14: adding 0.5 rounds to a multiple of 2^-24
        half = as_bits(as_float(rest) + 0.5f) - as_bits(0.5f);
    else
        half = (rest - (112u << 23) + 0xfff + ((rest >> 13) & 1)) >> 13; // to nearest, ties to even
    out->bits = static_cast<uint16_t>(sign | half);
}
#endif
