// Kinds of numbers, and single numbers of 16 and 8 bits: exact conversions that every variant shares.
#pragma once
#include <cstdint>
#include <cstring>

enum class Kind : int { fp32 = 0, bf16 = 1, fp16 = 2, fp8 = 3, int8 = 4 };

// The unnamed namespace gives every variant its own copy: one compiled for AVX-512 must never be the one that
// the linker keeps for all.
namespace {

constexpr int bytes_of(Kind kind) {
    return kind == Kind::fp32 ? 4 : kind == Kind::bf16 || kind == Kind::fp16 ? 2 : 1;
}

inline float as_float(uint32_t bits) {
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
}
inline uint32_t as_bits(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    return bits;
}

inline float from_bf16(uint16_t bits) { return as_float(uint32_t(bits) << 16); }
inline uint16_t to_bf16(float x) {
    const uint32_t bits = as_bits(x);
    if ((bits & 0x7fffffff) > 0x7f800000) return 0x7fc0;
    return uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

inline float from_fp16(uint16_t half) {
    const uint32_t sign = uint32_t(half & 0x8000) << 16, exponent = half >> 10 & 31, fraction = half & 1023;
    if (exponent == 31) return as_float(sign | 0x7f800000 | fraction << 13);
    if (exponent) return as_float(sign | (exponent + 112) << 23 | fraction << 13);
    const float subnormal = float(fraction) * 0x1p-24f;
    return sign ? -subnormal : subnormal;
}
inline uint16_t to_fp16(float x) {
    const uint32_t bits = as_bits(x), sign = bits >> 16 & 0x8000, rest = bits & 0x7fffffff;
    if (rest > 0x7f800000) return uint16_t(sign | 0x7e00);
    if (rest >= 0x477ff000) return uint16_t(sign | 0x7c00);  // rounds to 65536 or more
    if (rest < 0x38800000) {                                 // below 2^-14: adding 0.5 rounds to units of 2^-24
        const float moved = as_float(rest) + 0.5f;
        return uint16_t(sign | (as_bits(moved) - as_bits(0.5f)));
    }
    return uint16_t(sign | ((rest + 0xfff + (rest >> 13 & 1) - (112u << 23)) >> 13));
}

// The fp16 number that is 1/256 of the e4m3 number with this code; NaN's code becomes ±480 / 256.
inline uint16_t fp8_as_fp16(uint8_t code) { return uint16_t((code & 0x80) << 8 | (code & 0x7f) << 7); }

// e4m3 code nearest to x, ties to even; what is beyond 448 becomes 448, NaN stays NaN.
inline uint8_t to_fp8(float x) {
    const uint32_t bits = as_bits(x), sign = bits >> 24 & 0x80, rest = bits & 0x7fffffff;
    if (rest > 0x7f800000) return uint8_t(sign | 0x7f);
    if (rest >= 0x43e00000) return uint8_t(sign | 0x7e);
    if (rest < 0x3c800000) {  // below 2^-6: adding 2^14 rounds to units of 2^-9
        const float moved = as_float(rest) + 0x1p14f;
        return uint8_t(sign | (as_bits(moved) - as_bits(0x1p14f)));
    }
    const uint32_t rounded = (rest + 0x7ffff + (rest >> 20 & 1) - (120u << 23)) >> 20;
    return uint8_t(sign | rounded);
}

}  // namespace
