// Which tokens want a neuron: values compared with thresholds in whole vectors. Included after hidden.inl; includes
// nothing itself.

constexpr int64_t kTogether = 8; // so many tokens or fewer are compared with their thresholds side by side

inline uint32_t kept_lanes(const float* a, const float* u, typename V::F limit, bool zeros) {
    const typename V::F value = V::load(a);
    return V::kept(u != nullptr ? V::fma(value, V::load(u), V::zero()) : value, value, limit, zeros);
}

// Bits of the T tokens that want a neuron with these values; by the product, `u` holds the other factor. Reads a vector
// past the last token: there is scratch behind.
inline uint32_t want(const Thresholding& rule, int64_t T, const float* a, const float* u, float threshold, bool zeros) {
    uint32_t wanted = 0;
    for (int64_t t = 0; t < T; t += V::W) {
        float limits[V::W];
        if (rule.token_scale != nullptr)
            for (int64_t i = 0; i < V::W; ++i)
                limits[i] = t + i < T ? limit_of(rule, threshold, t + i) : 0.f;
        const typename V::F limit = rule.token_scale != nullptr ? V::load(limits) : V::set1(threshold);
        wanted |= kept_lanes(a + t, u != nullptr ? u + t : nullptr, limit, zeros) << t;
    }
    return T < 32 ? wanted & ((1u << T) - 1) : wanted;
}

// The same for n neurons that lie together and one limit: whole vectors of (neuron, token). wanted[i] for each.
inline void want_together(int64_t T, int64_t n, const float* a, const float* u, float most, bool zeros,
                          uint32_t* wanted) {
    uint8_t bits[kBlock * kTogether / 8 + V::W / 8 + 4];
    const typename V::F limit = V::set1(most);
    for (int64_t i = 0; i < n * T; i += V::W) {
        const uint32_t found = kept_lanes(a + i, u != nullptr ? u + i : nullptr, limit, zeros);
        memcpy(bits + i / 8, &found, V::W / 8);
    }
    for (int64_t i = 0; i < n; ++i) {
        uint16_t part;
        memcpy(&part, bits + i * T / 8, sizeof part);
        wanted[i] = part >> (i * T % 8) & ((1u << T) - 1);
    }
}
