// exp, SiLU, norms, rotary positions, and what pages store.
#pragma once

namespace {

// e to the x, where n is the integer nearest to x / ln 2.
inline Lanes exponential_rest(Lanes x, Lanes n) {
    Lanes r = fma(n, all(-0.693359375f), x);
    r = fma(n, all(2.12194440e-4f), r);
    Lanes p = all(1.0f / 5040);
    p = fma(p, r, all(1.0f / 720));
    p = fma(p, r, all(1.0f / 120));
    p = fma(p, r, all(1.0f / 24));
    p = fma(p, r, all(1.0f / 6));
    p = fma(p, r, all(0.5f));
    p = fma(p, r, all(1.0f));
    p = fma(p, r, all(1.0f));
    return mul(p, power_of_two(n));
}

// e to the x, to about one unit in the last place: x = n ln 2 + r, and the Taylor series of degree 7 of e^r, whose
// error at |r| <= ln 2 / 2 is 5e-9. 0 below -87.3, infinite above 88.3, NaN for NaN. exp(0) is exactly 1.
inline Lanes exponential(Lanes x) {
    const Lanes least = all(-87.3f), most = all(88.3f);
    const Lanes held = lesser(greater(x, least), most);
    Lanes p = exponential_rest(held, nearest(mul(held, all(1.44269504f))));
    p = where_less(x, least, zero(), p);
    p = where_less(most, x, all(as_float(0x7f800000)), p);
    return where_nan(x, x, p);
}

// The same bits for what is at most 0, or NaN.
inline Lanes exponential_below(Lanes x) {
    const Lanes least = all(-87.3f), held = greater(x, least);
    const Lanes p = exponential_rest(held, nearest(mul(held, all(1.44269504f))));
    return where_nan(x, x, where_less(x, least, zero(), p));
}

void gate_numbers(const float* gates, const float* ups, float* out, int n) {
    for (int i = 0; i < n; i += LANES) {
        const Lanes g = load(gates + i);
        const Lanes silu = div(g, add(all(1.0f), exponential(sub(zero(), g))));
        store(out + i, mul(silu, load(ups + i)));
    }
}

float inverse_rms(const float* x, float epsilon, int width) {
    Lanes squares = zero();
    for (int i = 0; i < width; i += LANES) {
        const Lanes v = load(x + i);
        squares = fma(v, v, squares);
    }
    return 1.0f / __builtin_sqrtf(sum(squares) / float(width) + epsilon);
}

void scale_numbers(const float* x, const float* weight, float factor, int n, float* out) {
    for (int i = 0; i < n; i++) out[i] = x[i] * factor * weight[i];
}

inline void store_first(float* out, int count, Lanes x) {
    float numbers[LANES];
    store(numbers, x);
    for (int i = 0; i < count; i++) out[i] = numbers[i];
}

void copy_numbers(float* out, const float* numbers, int n) {
    int i = 0;
    for (; i + LANES <= n; i += LANES) store(out + i, load(numbers + i));
    for (; i < n; i++) out[i] = numbers[i];
}
void add_numbers(float* x, const float* numbers, int n) {
    int i = 0;
    for (; i + LANES <= n; i += LANES) store(x + i, add(load(x + i), load(numbers + i)));
    for (; i < n; i++) x[i] += numbers[i];
}

// As activations are rounded: to bf16, and what is smaller than 2^-60 to 0, what is greater than 2^64 to infinity. Products
// with fp8 weights are then multiples of 2^-85, so no sum of them is subnormal and instructions that take subnormals for 0
// give the same bits; and whether a sum overflows does not depend on how weights are unpacked, nor on FOLD.
inline Lanes rounded(Lanes x) {
    const Lanes size = greater(x, sub(zero(), x));
    Lanes r = nearest_bf16(x);
    r = where_less(size, all(0x1p-60f), zero(), r);
    r = where_less(all(0x1p64f), size, mul(x, all(as_float(0x7f800000))), r);
    return where_nan(x, x, r);
}

// Sixteen places of a tile's row as they are kept: numbers, or words of two. What is behind the first `count` numbers is 0.
template <Store how>
inline Lanes places_of(const float* numbers, int count) {
    float part[2 * LANES] = {};
    constexpr int most = how == Store::pairs ? 2 * LANES : LANES;
    if (count < most) {
        for (int i = 0; i < count; i++) part[i] = numbers[i];
        numbers = part;
    }
    if (how == Store::plain) return load(numbers);
    const Lanes first = rounded(load(numbers));
    if (how == Store::folded) return mul(first, all(FOLD));
    return how == Store::rounded ? first : pair_up(first, rounded(load(numbers + LANES)));
}

template <Store how>
void spread_as(const float* numbers, size_t apart, int count, int first, float* tile, int rows) {
    constexpr int each = how == Store::pairs ? 2 : 1;
    const int places = (count + each - 1) / each;
    float* out = tile + size_t(first / each) * rows;
    float* const end = out + size_t(places) * rows;  // behind it others write
    Lanes lying[LANES], columns[LANES];
    for (auto& row : lying) row = zero();
    for (int place = 0; place < places; place += LANES) {
        const int left = count - place * each;
        for (int r = 0; r < rows; r++) lying[r] = places_of<how>(numbers + r * apart + place * each, left);
        const int here = places - place < LANES ? places - place : LANES;
        if (rows == 1) {
            if (here == LANES)
                store(out, lying[0]);
            else
                store_first(out, here, lying[0]);
            out += here;
            continue;
        }
        turn(lying, rows, columns);
        // A whole vector covers the places of the next numbers too, which are written after it.
        for (int i = 0; i < here; i++, out += rows) {
            if (end - out >= LANES)
                store(out, columns[i]);
            else
                store_first(out, rows, columns[i]);
        }
    }
}

void spread_rows(const float* numbers, size_t apart, int count, int first, float* tile, int rows, Store how) {
    switch (how) {
        case Store::plain: return spread_as<Store::plain>(numbers, apart, count, first, tile, rows);
        case Store::rounded: return spread_as<Store::rounded>(numbers, apart, count, first, tile, rows);
        case Store::folded: return spread_as<Store::folded>(numbers, apart, count, first, tile, rows);
        case Store::pairs: return spread_as<Store::pairs>(numbers, apart, count, first, tile, rows);
    }
}

void rotate_head(float* head, const float* cos, const float* sin, int half, float scale) {
    for (int i = 0; i < half; i++) {
        const float first = head[i], second = head[half + i];
        head[i] = (first * cos[i] - second * sin[i]) * scale;
        head[half + i] = (second * cos[i] + first * sin[i]) * scale;
    }
}

void keep_numbers(const Pool& pool, uint8_t* head, int token, const float* numbers) {
    const int size = pool.head_dim;
    uint8_t* place = head + size_t(token) * size * bytes_of(pool.kind);
    switch (pool.kind) {
        case Kind::fp32: std::memcpy(place, numbers, size_t(size) * 4); break;
        case Kind::bf16:
            for (int i = 0; i < size; i++) {
                const uint16_t bits = to_bf16(numbers[i]);
                std::memcpy(place + 2 * i, &bits, 2);
            }
            break;
        case Kind::fp16:
            for (int i = 0; i < size; i++) {
                const uint16_t bits = to_fp16(numbers[i]);
                std::memcpy(place + 2 * i, &bits, 2);
            }
            break;
        case Kind::fp8: {
            // One scale a token and head: the greatest magnitude becomes 448. What is not finite makes it NaN, as NaN's
            // code reads as 480.
            float most = 0.0f, rest = 0.0f;
            for (int i = 0; i < size; i++) {
                const float magnitude = as_float(as_bits(numbers[i]) & 0x7fffffff);
                most = magnitude > most ? magnitude : most;
                rest += numbers[i] * 0.0f;
            }
            const float scale = rest == 0.0f ? (most > 1e-4f ? most : 1e-4f) / 448.0f : as_float(0x7fc00000);
            for (int i = 0; i < size; i++) place[i] = to_fp8(numbers[i] / scale);
            std::memcpy(head + size_t(pool.tokens) * size + 4 * size_t(token), &scale, 4);
            break;
        }
        case Kind::int8: break;
    }
}

}  // namespace
