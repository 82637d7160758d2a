// Sixteen floats in plain C++: slow, the definition that the other two must equal to the bit.
#pragma once
#include <cstdint>
#include <cstring>

#include "halves.h"

namespace {

struct Lanes {
    float f[16];
};

#define EACH for (int i = 0; i < 16; i++)

inline Lanes zero() { return Lanes{}; }
inline Lanes all(float x) {
    Lanes r;
    EACH r.f[i] = x;
    return r;
}
inline Lanes load(const float* p) {
    Lanes r;
    std::memcpy(r.f, p, sizeof r.f);
    return r;
}
inline void store(float* p, Lanes a) { std::memcpy(p, a.f, sizeof a.f); }
inline Lanes add(Lanes a, Lanes b) {
    EACH a.f[i] += b.f[i];
    return a;
}
inline Lanes sub(Lanes a, Lanes b) {
    EACH a.f[i] -= b.f[i];
    return a;
}
inline Lanes mul(Lanes a, Lanes b) {
    EACH a.f[i] *= b.f[i];
    return a;
}
inline Lanes div(Lanes a, Lanes b) {
    EACH a.f[i] /= b.f[i];
    return a;
}
inline Lanes fma(Lanes a, Lanes b, Lanes c) {
    EACH c.f[i] = __builtin_fmaf(a.f[i], b.f[i], c.f[i]);
    return c;
}
// a where a > b, else b: what vmaxps does, NaN included.
inline Lanes greater(Lanes a, Lanes b) {
    EACH a.f[i] = a.f[i] > b.f[i] ? a.f[i] : b.f[i];
    return a;
}
inline Lanes lesser(Lanes a, Lanes b) {
    EACH a.f[i] = a.f[i] < b.f[i] ? a.f[i] : b.f[i];
    return a;
}
// then where a < b, else otherwise.
inline Lanes where_less(Lanes a, Lanes b, Lanes then, Lanes otherwise) {
    EACH a.f[i] = a.f[i] < b.f[i] ? then.f[i] : otherwise.f[i];
    return a;
}
inline Lanes where_nan(Lanes a, Lanes then, Lanes otherwise) {
    EACH a.f[i] = a.f[i] != a.f[i] ? then.f[i] : otherwise.f[i];
    return a;
}
// Nearest whole number, ties to even.
inline Lanes nearest(Lanes a) {
    EACH a.f[i] = __builtin_rintf(a.f[i]);
    return a;
}
// 2 to the whole number n, which is from -126 to 127.
inline Lanes power_of_two(Lanes n) {
    EACH {
        const uint32_t bits = uint32_t(int32_t(n.f[i]) + 127) << 23;
        std::memcpy(&n.f[i], &bits, 4);
    }
    return n;
}
// 0, 1, … 15
inline Lanes numbers() {
    Lanes r;
    EACH r.f[i] = float(i);
    return r;
}
inline float sum(Lanes a) {
    for (int half = 8; half; half /= 2)
        for (int i = 0; i < half; i++) a.f[i] += a.f[i + half];
    return a.f[0];
}
inline float maximum(Lanes a) {
    for (int half = 8; half; half /= 2)
        for (int i = 0; i < half; i++) a.f[i] = a.f[i] > a.f[i + half] ? a.f[i] : a.f[i + half];
    return a.f[0];
}
// Rounded to bf16, ties to even; not for NaN.
inline Lanes nearest_bf16(Lanes a) {
    EACH {
        const uint32_t bits = as_bits(a.f[i]);
        a.f[i] = as_float((bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000);
    }
    return a;
}
// Words of two bf16, of numbers that are rounded: the even ones of a and then of b in the upper halves, the odd ones below.
inline Lanes pair_up(Lanes a, Lanes b) {
    Lanes r;
    EACH {
        const float* p = i < 8 ? a.f + 2 * i : b.f + 2 * (i - 8);
        r.f[i] = as_float(as_bits(p[0]) | as_bits(p[1]) >> 16);
    }
    return r;
}
// The sums of sixteen.
inline Lanes sums(const Lanes a[16]) {
    Lanes r;
    EACH r.f[i] = sum(a[i]);
    return r;
}
// Rows become columns. Behind the first rows, whose number is told, they are zero.
inline void turn(const Lanes x[16], int, Lanes columns[16]) {
    for (int j = 0; j < 16; j++) EACH columns[j].f[i] = x[i].f[j];
}
inline Lanes load_bf16(const uint16_t* p) {
    Lanes r;
    EACH r.f[i] = from_bf16(p[i]);
    return r;
}
inline Lanes load_fp16(const uint16_t* p) {
    Lanes r;
    EACH r.f[i] = from_fp16(p[i]);
    return r;
}
// e4m3 codes as their values / 256.
inline Lanes load_fp8(const uint8_t* p) {
    Lanes r;
    EACH r.f[i] = from_fp16(fp8_as_fp16(p[i]));
    return r;
}

constexpr int UNIT = 1;  // vectors that are unpacked at once

// Outputs 16q … 16q + 15 of a pair of inputs of a strip.
template <Kind kind>
inline void unpack(const uint8_t* pair, int q, Lanes even[UNIT], Lanes odd[UNIT]) {
    EACH for (int half = 0; half < 2; half++) {
        const uint8_t* p = pair + (2 * (16 * q + i) + half) * bytes_of(kind);
        float value;
        if (kind == Kind::bf16) {
            uint16_t bits;
            std::memcpy(&bits, p, 2);
            value = from_bf16(bits);
        } else if (kind == Kind::fp8) {
            value = from_fp16(fp8_as_fp16(*p));
        } else {
            value = float(int8_t(*p));
        }
        (half ? even : odd)->f[i] = value;
    }
}
inline void ahead(const void*) {}
inline void ahead_once(const void*) {}
inline void far_ahead(const void*) {}

#undef EACH

}  // namespace
