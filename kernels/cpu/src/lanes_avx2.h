// Sixteen floats in two registers: AVX2, FMA, F16C.
#pragma once
#include <immintrin.h>

#include "halves.h"

namespace {

struct Lanes {
    __m256 a, b;  // lanes 0–7 and 8–15
};

inline Lanes zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline Lanes all(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline Lanes load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline void store(float* p, Lanes x) {
    _mm256_storeu_ps(p, x.a);
    _mm256_storeu_ps(p + 8, x.b);
}
inline Lanes add(Lanes x, Lanes y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
inline Lanes sub(Lanes x, Lanes y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
inline Lanes mul(Lanes x, Lanes y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
inline Lanes div(Lanes x, Lanes y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
inline Lanes fma(Lanes x, Lanes y, Lanes z) {
    return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)};
}
inline Lanes greater(Lanes x, Lanes y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
inline Lanes lesser(Lanes x, Lanes y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
inline Lanes where_less(Lanes x, Lanes y, Lanes then, Lanes otherwise) {
    return {_mm256_blendv_ps(otherwise.a, then.a, _mm256_cmp_ps(x.a, y.a, _CMP_LT_OQ)),
            _mm256_blendv_ps(otherwise.b, then.b, _mm256_cmp_ps(x.b, y.b, _CMP_LT_OQ))};
}
inline Lanes where_nan(Lanes x, Lanes then, Lanes otherwise) {
    return {_mm256_blendv_ps(otherwise.a, then.a, _mm256_cmp_ps(x.a, x.a, _CMP_UNORD_Q)),
            _mm256_blendv_ps(otherwise.b, then.b, _mm256_cmp_ps(x.b, x.b, _CMP_UNORD_Q))};
}
inline Lanes nearest(Lanes x) {
    return {_mm256_round_ps(x.a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC),
            _mm256_round_ps(x.b, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
inline __m256 power_of_two(__m256 n) {
    const __m256i biased = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
    return _mm256_castsi256_ps(_mm256_slli_epi32(biased, 23));
}
inline Lanes power_of_two(Lanes n) { return {power_of_two(n.a), power_of_two(n.b)}; }
inline Lanes numbers() {
    return {_mm256_setr_ps(0, 1, 2, 3, 4, 5, 6, 7), _mm256_setr_ps(8, 9, 10, 11, 12, 13, 14, 15)};
}
inline float sum(Lanes x) {
    const __m256 eight = _mm256_add_ps(x.a, x.b);
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    four = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(four, _mm_shuffle_ps(four, four, 1)));
}
inline float maximum(Lanes x) {
    const __m256 eight = _mm256_max_ps(x.a, x.b);
    __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    four = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(four, _mm_shuffle_ps(four, four, 1)));
}
// Rounded to bf16, ties to even; not for NaN.
inline __m256 nearest_bf16(__m256 x) {
    const __m256i bits = _mm256_castps_si256(x);
    const __m256i last = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i up = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), last);
    return _mm256_castsi256_ps(_mm256_and_si256(up, _mm256_set1_epi32(int(0xffff0000))));
}
inline Lanes nearest_bf16(Lanes x) { return {nearest_bf16(x.a), nearest_bf16(x.b)}; }
// Words of two bf16, of numbers that are rounded: the even ones of a and then of b in the upper halves, the odd ones below.
inline __m256 pair_up(__m256 a, __m256 b) {
    const __m256 evens = _mm256_shuffle_ps(a, b, 0x88), odds = _mm256_shuffle_ps(a, b, 0xdd);
    const __m256i words = _mm256_or_si256(_mm256_castps_si256(evens), _mm256_srli_epi32(_mm256_castps_si256(odds), 16));
    return _mm256_castsi256_ps(_mm256_permute4x64_epi64(words, 0xd8));
}
inline Lanes pair_up(Lanes x, Lanes y) { return {pair_up(x.a, x.b), pair_up(y.a, y.b)}; }
// The same additions as `sum`, eight at a time: every step halves what is left of two.
inline __m256 sums_of_eight(const Lanes x[8]) {
    __m256 fours[4], twos[2];
    for (int i = 0; i < 4; i++) {
        const __m256 one = _mm256_add_ps(x[i].a, x[i].b), other = _mm256_add_ps(x[i + 4].a, x[i + 4].b);
        fours[i] = _mm256_add_ps(_mm256_permute2f128_ps(one, other, 0x20),
                                 _mm256_permute2f128_ps(one, other, 0x31));
    }
    for (int i = 0; i < 2; i++)
        twos[i] = _mm256_add_ps(_mm256_shuffle_ps(fours[i], fours[i + 2], 0x44),
                                _mm256_shuffle_ps(fours[i], fours[i + 2], 0xee));
    const __m256 summed = _mm256_add_ps(_mm256_shuffle_ps(twos[0], twos[1], 0x88),
                                        _mm256_shuffle_ps(twos[0], twos[1], 0xdd));
    return _mm256_shuffle_ps(summed, summed, 0xd8);  // numbers 0, 2, 1, 3 | 4, 6, 5, 7 in their order
}
inline Lanes sums(const Lanes x[16]) { return {sums_of_eight(x), sums_of_eight(x + 8)}; }

// Rows of eight become columns.
inline void turn_eight(__m256 a[8]) {
    __m256 t[8];
    for (int i = 0; i < 8; i += 2) {
        t[i] = _mm256_unpacklo_ps(a[i], a[i + 1]);
        t[i + 1] = _mm256_unpackhi_ps(a[i], a[i + 1]);
    }
    for (int i = 0; i < 8; i += 4) {
        a[i] = _mm256_shuffle_ps(t[i], t[i + 2], 0x44);
        a[i + 1] = _mm256_shuffle_ps(t[i], t[i + 2], 0xee);
        a[i + 2] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0x44);
        a[i + 3] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0xee);
    }
    for (int i = 0; i < 4; i++) {
        t[i] = _mm256_permute2f128_ps(a[i], a[i + 4], 0x20);
        t[i + 4] = _mm256_permute2f128_ps(a[i], a[i + 4], 0x31);
    }
    for (int i = 0; i < 8; i++) a[i] = t[i];
}
// The first `rows` of sixteen rows become columns; the others are zero.
inline void turn(const Lanes x[16], int rows, Lanes out[16]) {
    __m256 quarters[2][8];
    for (int half = 0; half < 2; half++) {
        const Lanes* of = x + 8 * half;
        if (8 * half >= rows) {
            for (int i = 0; i < 16; i++) out[i].b = _mm256_setzero_ps();
            return;
        }
        for (int i = 0; i < 8; i++) {
            quarters[0][i] = of[i].a;
            quarters[1][i] = of[i].b;
        }
        for (auto& quarter : quarters) turn_eight(quarter);
        for (int i = 0; i < 16; i++) (half ? out[i].b : out[i].a) = quarters[i / 8][i % 8];
    }
}

inline __m256 eight_bf16(const uint16_t* p) {
    const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
}
inline Lanes load_bf16(const uint16_t* p) { return {eight_bf16(p), eight_bf16(p + 8)}; }
inline Lanes from_halves(__m256i half) {
    return {_mm256_cvtph_ps(_mm256_castsi256_si128(half)), _mm256_cvtph_ps(_mm256_extracti128_si256(half, 1))};
}
inline __m256 eight_fp16(const uint16_t* p) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
inline Lanes load_fp16(const uint16_t* p) { return {eight_fp16(p), eight_fp16(p + 8)}; }
// Low bytes of 16-bit words as fp16, each e4m3 value / 256: up, down by one with the sign, the sign's copy out.
inline __m256i low_codes(__m256i words) {
    return _mm256_and_si256(_mm256_srai_epi16(_mm256_slli_epi16(words, 8), 1), _mm256_set1_epi16(short(0xbfff)));
}
inline Lanes load_fp8(const uint8_t* p) {
    return from_halves(low_codes(_mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))));
}

// By assembly: a compiler may find that a function which only prefetches does nothing, and leave out its calls.
inline void ahead(const void* p) { asm volatile("prefetcht0 (%0)" : : "r"(p)); }
// What is read once, as weights are: it takes no room in the other caches from what is read again.
inline void ahead_once(const void* p) { asm volatile("prefetchnta (%0)" : : "r"(p)); }
// Into the second-level cache: many lines at once, of which the first-level cache would drop some.
inline void far_ahead(const void* p) { asm volatile("prefetcht1 (%0)" : : "r"(p)); }

}  // namespace
