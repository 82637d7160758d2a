// Products of fp8 weights with activations that were rounded to bf16, by dot products of pairs (AVX512_BF16, VBMI).
//
// vdpbf16ps adds the product of the upper halves of two words, rounds, adds that of the lower halves, and rounds: two
// multiply-adds, of the even input and then of the odd one, as the words are packed. Products of bf16 numbers are exact, and
// the numbers are such that nothing subnormal can occur (`rounded`), so the bits are those of `strip`.
#pragma once

namespace {

// bf16 bits of every e4m3 code without its sign, their lower and upper bytes.
struct Codes {
    alignas(64) uint8_t low[128], high[128];
    Codes() {
        for (int code = 0; code < 128; code++) {
            const uint32_t bits = as_bits(256.0f * from_fp16(fp8_as_fp16(uint8_t(code))));
            low[code] = uint8_t(bits >> 16);
            high[code] = uint8_t(bits >> 24);
        }
    }
};

struct Tables {
    __m512i low0, low1, high0, high1;
};
inline Tables load_tables() {
    static const Codes codes;
    return {_mm512_load_si512(codes.low), _mm512_load_si512(codes.low + 64), _mm512_load_si512(codes.high),
            _mm512_load_si512(codes.high + 64)};
}

// Outputs 16q … 16q + 31 of a pair of inputs as words of two bf16.
inline void unpack_words(const uint8_t* pair, int q, const Tables& t, __m512i words[2]) {
    // Bytes are joined within quarters of the register: its eighths are put so that the outputs come out in their order.
    const __m512i order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
    const __m512i codes = _mm512_permutexvar_epi64(order, _mm512_loadu_si512(pair + 32 * q));
    const __m512i low = _mm512_permutex2var_epi8(t.low0, codes, t.low1);
    const __m512i high = _mm512_ternarylogic_epi64(_mm512_permutex2var_epi8(t.high0, codes, t.high1), codes,
                                                   _mm512_set1_epi8(char(0x80)), 0xf8);  // a | (b & c)
    words[0] = _mm512_unpacklo_epi8(low, high);
    words[1] = _mm512_unpackhi_epi8(low, high);
}

// By assembly: of twenty sums GCC 12 keeps one in memory otherwise, and all wait for it.
inline Lanes dot(Lanes sum, __m512i words, uint32_t x) {
    asm("vdpbf16ps %2, %1, %0" : "+v"(sum.v) : "v"(words), "v"(_mm512_set1_epi32(int(x))));
    return sum;
}

// As `direct_block`.
template <int ROWS, int WIDTH, bool KEEP>
inline void direct_dots(const uint8_t* weights, int first, int pairs, const uint32_t* x, float scale, float* out,
                        uint32_t* panel) {
    const Tables tables = load_tables();
    Lanes sums[ROWS][WIDTH];
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < WIDTH; v++) sums[r][v] = zero();
#pragma GCC unroll 2
    for (int k = 0; k < pairs; k++) {
        const uint8_t* p = weights + size_t(k) * (2 * STRIP);
        for (int v = 0; v < WIDTH; v += 2) ask_for_weights<KEEP>(p + AHEAD + 32 * (first + v));
        for (int v = 0; v < WIDTH; v += 2) {
            __m512i words[2];
            unpack_words(p, first + v, tables, words);
            if (KEEP)
                for (int u = 0; u < 2; u++) _mm512_storeu_si512(panel + (size_t(k) * WIDTH + v + u) * LANES, words[u]);
            for (int r = 0; r < ROWS; r++)
                for (int u = 0; u < 2; u++) sums[r][v + u] = dot(sums[r][v + u], words[u], x[k * ROWS + r]);
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < WIDTH; v++) {
            float* place = out + r * STRIP + LANES * (first + v);
            store(place, fma(sums[r][v], all(scale), load(place)));
        }
}

template <int ROWS>
void panel_dots(const uint32_t* panel, int pairs, const uint32_t* x, float scale, float* out) {
    Lanes sums[ROWS][2];
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++) sums[r][0] = sums[r][1] = zero();
#pragma GCC unroll 2
    for (int k = 0; k < pairs; k++) {
        const __m512i first = _mm512_loadu_si512(panel + k * 32), second = _mm512_loadu_si512(panel + k * 32 + 16);
        for (int r = 0; r < ROWS; r++) {
            sums[r][0] = dot(sums[r][0], first, x[k * ROWS + r]);
            sums[r][1] = dot(sums[r][1], second, x[k * ROWS + r]);
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < 2; v++) {
            float* place = out + r * STRIP + LANES * v;
            store(place, fma(sums[r][v], all(scale), load(place)));
        }
}
using PanelDots = void (*)(const uint32_t*, int, const uint32_t*, float, float*);
template <int... ROW>
PanelDots panel_dots_of(int rows, std::integer_sequence<int, ROW...>) {
    static constexpr PanelDots functions[] = {panel_dots<ROW + 1>...};
    return functions[rows - 1];
}

template <int ROWS, bool KEEP>
void first_dots(const uint8_t* weights, Part part, int pairs, const uint32_t* x, float scale, float* out,
                uint32_t* panel) {
    constexpr int wide = !KEEP && ROWS <= 5 ? 4 : 2;  // as many sums as there are registers for
    if (wide == 4 && part.end - part.first == 4)
        return direct_dots<ROWS, wide, KEEP>(weights, 0, pairs, x, scale, out, panel);
    for (int first = part.first; first < part.end; first += 2)
        direct_dots<ROWS, 2, KEEP>(weights, first, pairs, x, scale, out, panel);
}
using FirstDots = void (*)(const uint8_t*, Part, int, const uint32_t*, float, float*, uint32_t*);
template <bool KEEP, int... ROW>
FirstDots first_dots_of(int rows, std::integer_sequence<int, ROW...>) {
    static constexpr FirstDots functions[] = {first_dots<ROW + 1, KEEP>...};
    return functions[rows - 1];
}

void dot_strip(const Matrix& m, int strip, Part part, const float* x_pairs, const Tiles& tiles, float* scratch, float* out) {
    constexpr auto all_rows = std::make_integer_sequence<int, TILE>();
    const uint32_t* x = reinterpret_cast<const uint32_t*>(x_pairs);
    uint32_t* panel_words = reinterpret_cast<uint32_t*>(scratch);
    const float* scales = m.scales + size_t(strip) * m.blocks();
    const bool alone = tiles.count == 1;
    const FirstDots first = alone ? first_dots_of<false>(tiles.rows, all_rows)
                                  : first_dots_of<true>(tiles.size(0), all_rows);
    const int wide = (m.inputs + 1) / 2;
    for (size_t i = 0; i < size_t(tiles.rows) * STRIP; i += LANES) store(out + i, zero());
    for (int block = 0, k = 0; k < wide; block++, k += BLOCK / 2) {
        const int pairs = wide - k < BLOCK / 2 ? wide - k : BLOCK / 2;
        const uint8_t* weights = m.strip(strip) + size_t(k) * (2 * STRIP);
        if (alone) {
            first(weights, part, pairs, x + size_t(k) * tiles.rows, scales[block], out, nullptr);
            continue;
        }
        for (int panel = part.first; panel < part.end; panel += 2) {
            first(weights, {panel, panel + 2}, pairs, x + size_t(k) * tiles.size(0), scales[block], out, panel_words);
            for (int t = 1; t < tiles.count; t++) {
                const int start = tiles.start(t), size = tiles.size(t);
                panel_dots_of(size, all_rows)(panel_words, pairs, x + size_t(start) * wide + size_t(k) * size,
                                              scales[block], out + size_t(start) * STRIP + panel * LANES);
            }
        }
    }
}

}  // namespace
