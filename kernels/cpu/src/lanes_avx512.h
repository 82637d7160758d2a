// Sixteen floats in one register: AVX-512 (F, BW, DQ, VL) with F16C.
#pragma once
#include <immintrin.h>

#include "halves.h"

namespace {

struct Lanes {
    __m512 v;
};

inline Lanes zero() { return {_mm512_setzero_ps()}; }
inline Lanes all(float x) { return {_mm512_set1_ps(x)}; }
inline Lanes load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline void store(float* p, Lanes a) { _mm512_storeu_ps(p, a.v); }
inline Lanes add(Lanes a, Lanes b) { return {_mm512_add_ps(a.v, b.v)}; }
inline Lanes sub(Lanes a, Lanes b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline Lanes mul(Lanes a, Lanes b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline Lanes div(Lanes a, Lanes b) { return {_mm512_div_ps(a.v, b.v)}; }
inline Lanes fma(Lanes a, Lanes b, Lanes c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline Lanes greater(Lanes a, Lanes b) { return {_mm512_max_ps(a.v, b.v)}; }
inline Lanes lesser(Lanes a, Lanes b) { return {_mm512_min_ps(a.v, b.v)}; }
inline Lanes where_less(Lanes a, Lanes b, Lanes then, Lanes otherwise) {
    return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ), otherwise.v, then.v)};
}
inline Lanes where_nan(Lanes a, Lanes then, Lanes otherwise) {
    return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q), otherwise.v, then.v)};
}
inline Lanes nearest(Lanes a) {
    return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
inline Lanes power_of_two(Lanes n) {
    const __m512i biased = _mm512_add_epi32(_mm512_cvtps_epi32(n.v), _mm512_set1_epi32(127));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(biased, 23))};
}
inline Lanes numbers() {
    return {_mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)};
}
inline float sum(Lanes a) {
    const __m256 eight =
        _mm256_add_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1));
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    four = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(four, _mm_shuffle_ps(four, four, 1)));
}
inline float maximum(Lanes a) {
    const __m256 eight =
        _mm256_max_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1));
    __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    four = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(four, _mm_shuffle_ps(four, four, 1)));
}
// Rounded to bf16, ties to even; not for NaN.
inline Lanes nearest_bf16(Lanes a) {
    const __m512i bits = _mm512_castps_si512(a.v);
    const __m512i last = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i up = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), last);
    return {_mm512_castsi512_ps(_mm512_and_si512(up, _mm512_set1_epi32(int(0xffff0000))))};
}
// Words of two bf16, of numbers that are rounded: the even ones of a and then of b in the upper halves, the odd ones below.
inline Lanes pair_up(Lanes a, Lanes b) {
    const __m512i evens = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    const __m512i odds = _mm512_add_epi32(evens, _mm512_set1_epi32(1));
    const __m512i x = _mm512_castps_si512(a.v), y = _mm512_castps_si512(b.v);
    const __m512i low = _mm512_srli_epi32(_mm512_permutex2var_epi32(x, odds, y), 16);
    return {_mm512_castsi512_ps(_mm512_or_si512(_mm512_permutex2var_epi32(x, evens, y), low))};
}
// The same additions as `sum`, sixteen at a time: every step halves what is left of two.
inline Lanes sums(const Lanes a[16]) {
    __m512 eights[8], fours[4], twos[2];
    for (int i = 0; i < 8; i++) {
        // lanes 0–7 of number i, then of number i + 8, each with its upper half added
        const __m512 low = _mm512_shuffle_f32x4(a[i].v, a[i + 8].v, 0x44);
        const __m512 high = _mm512_shuffle_f32x4(a[i].v, a[i + 8].v, 0xee);
        eights[i] = _mm512_add_ps(low, high);
    }
    for (int i = 0; i < 4; i++) {
        // of numbers i, i + 8, i + 4, i + 12, four lanes each
        const __m512 low = _mm512_shuffle_f32x4(eights[i], eights[i + 4], 0x88);
        const __m512 high = _mm512_shuffle_f32x4(eights[i], eights[i + 4], 0xdd);
        fours[i] = _mm512_add_ps(low, high);
    }
    for (int i = 0; i < 2; i++) {
        const __m512 low = _mm512_shuffle_ps(fours[i], fours[i + 2], 0x44);
        const __m512 high = _mm512_shuffle_ps(fours[i], fours[i + 2], 0xee);
        twos[i] = _mm512_add_ps(low, high);
    }
    const __m512 low = _mm512_shuffle_ps(twos[0], twos[1], 0x88);
    const __m512 high = _mm512_shuffle_ps(twos[0], twos[1], 0xdd);
    // block b of 4 holds numbers base(b) + 0, 2, 1, 3 with base 0, 8, 4, 12
    const __m512i order = _mm512_setr_epi32(0, 2, 1, 3, 8, 10, 9, 11, 4, 6, 5, 7, 12, 14, 13, 15);
    return {_mm512_permutexvar_ps(order, _mm512_add_ps(low, high))};
}
// Rows become columns: pairs, then fours within a quarter of the register, then the quarters. Behind the first rows, whose
// number is told, they are zero.
inline void turn(const Lanes x[16], int, Lanes a[16]) {
    __m512 t[16];
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_ps(x[i].v, x[i + 1].v);
        t[i + 1] = _mm512_unpackhi_ps(x[i].v, x[i + 1].v);
    }
    for (int i = 0; i < 16; i += 4) {
        const __m512d x = _mm512_castps_pd(t[i]), y = _mm512_castps_pd(t[i + 1]);
        const __m512d z = _mm512_castps_pd(t[i + 2]), w = _mm512_castps_pd(t[i + 3]);
        a[i].v = _mm512_castpd_ps(_mm512_unpacklo_pd(x, z));
        a[i + 1].v = _mm512_castpd_ps(_mm512_unpackhi_pd(x, z));
        a[i + 2].v = _mm512_castpd_ps(_mm512_unpacklo_pd(y, w));
        a[i + 3].v = _mm512_castpd_ps(_mm512_unpackhi_pd(y, w));
    }
    for (int i = 0; i < 4; i++) {
        // quarter q of a[i + 4j] holds column 4q + i of rows 4j … 4j + 3
        const __m512 low = _mm512_shuffle_f32x4(a[i].v, a[i + 4].v, 0x88);
        const __m512 low_odd = _mm512_shuffle_f32x4(a[i].v, a[i + 4].v, 0xdd);
        const __m512 high = _mm512_shuffle_f32x4(a[i + 8].v, a[i + 12].v, 0x88);
        const __m512 high_odd = _mm512_shuffle_f32x4(a[i + 8].v, a[i + 12].v, 0xdd);
        t[i] = _mm512_shuffle_f32x4(low, high, 0x88);
        t[i + 8] = _mm512_shuffle_f32x4(low, high, 0xdd);
        t[i + 4] = _mm512_shuffle_f32x4(low_odd, high_odd, 0x88);
        t[i + 12] = _mm512_shuffle_f32x4(low_odd, high_odd, 0xdd);
    }
    for (int i = 0; i < 16; i++) a[i].v = t[i];
}
inline Lanes load_bf16(const uint16_t* p) {
    const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16))};
}
inline Lanes load_fp16(const uint16_t* p) {
    return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
inline Lanes load_fp8(const uint8_t* p) {
    const __m256i word = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    const __m256i half =
        _mm256_and_si256(_mm256_srai_epi16(_mm256_slli_epi16(word, 8), 1), _mm256_set1_epi16(short(0xbfff)));
    return {_mm512_cvtph_ps(half)};
}

constexpr int UNIT = 2;  // vectors that are unpacked at once

// Outputs 16q … 16q + 31 of a pair of inputs of a strip.
template <Kind kind>
inline void unpack(const uint8_t* pair, int q, Lanes even[UNIT], Lanes odd[UNIT]) {
    const uint8_t* p = pair + size_t(32) * q * bytes_of(kind);
    const __m512i words = _mm512_loadu_si512(p);
    if (kind == Kind::bf16) {
        const __m512i more = _mm512_loadu_si512(p + 64), mask = _mm512_set1_epi32(int(0xffff0000));
        even[0] = {_mm512_castsi512_ps(_mm512_and_si512(words, mask))};
        even[1] = {_mm512_castsi512_ps(_mm512_and_si512(more, mask))};
        odd[0] = {_mm512_castsi512_ps(_mm512_slli_epi32(words, 16))};
        odd[1] = {_mm512_castsi512_ps(_mm512_slli_epi32(more, 16))};
    } else if (kind == Kind::fp8) {
        // The low bytes need the shift by 8 first, the high ones lie where they shall; the masks take out what the
        // arithmetic shift and the neighbour leave.
        const __m512i low = _mm512_and_si512(_mm512_srai_epi16(_mm512_slli_epi16(words, 8), 1),
                                             _mm512_set1_epi16(short(0xbfff)));
        const __m512i high = _mm512_and_si512(_mm512_srai_epi16(words, 1), _mm512_set1_epi16(short(0xbf80)));
        even[0] = {_mm512_cvtph_ps(_mm512_castsi512_si256(high))};
        even[1] = {_mm512_cvtph_ps(_mm512_extracti64x4_epi64(high, 1))};
        odd[0] = {_mm512_cvtph_ps(_mm512_castsi512_si256(low))};
        odd[1] = {_mm512_cvtph_ps(_mm512_extracti64x4_epi64(low, 1))};
    } else {
        for (int v = 0; v < 2; v++) {
            const __m512i wide = _mm512_cvtepi16_epi32(
                v ? _mm512_extracti64x4_epi64(words, 1) : _mm512_castsi512_si256(words));
            even[v] = {_mm512_cvtepi32_ps(_mm512_srai_epi32(wide, 8))};
            odd[v] = {_mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(wide, 24), 24))};
        }
    }
}
// By assembly: a compiler may find that a function which only prefetches does nothing, and leave out its calls.
inline void ahead(const void* p) { asm volatile("prefetcht0 (%0)" : : "r"(p)); }
// What is read once, as weights are: it takes no room in the other caches from what is read again.
inline void ahead_once(const void* p) { asm volatile("prefetchnta (%0)" : : "r"(p)); }
// Into the second-level cache: many lines at once, of which the first-level cache would drop some.
inline void far_ahead(const void* p) { asm volatile("prefetcht1 (%0)" : : "r"(p)); }

}  // namespace
