// The first tile of rows of a product, by vectors of eight and with sixteen registers (AVX2).
//
// The sums of a loop fill the registers nearly, so weights are unpacked just before they are multiplied: of an even input,
// then of the odd one. A byte of a pair is cut out of a 32-bit word that holds two outputs, without moves between the
// halves of a register; sums come out with the outputs of even number before the others, and are put in order at the end.
#pragma once

namespace {

// Rounded inputs come folded: codes need not be multiplied then.
constexpr Store FIRST_TILE_STORE = Store::folded;

// Outputs 16q … 16q + 15 of an input lie so many bytes behind those of q = 0.
template <Kind kind>
constexpr int vector_bytes() {
    return kind == Kind::fp32 ? 64 : 32 * bytes_of(kind);
}

// Constants of unpacking.
struct Unpacking {
    __m256i kept;  // the bits of a number that was shifted into its place
    __m256 unit;   // what fp8 bits that were taken for float32 are multiplied by
};
template <Kind kind>
OWN Unpacking unpacking() {
    return {_mm256_set1_epi32(int(kind == Kind::bf16 ? 0xffff0000u : 0x87f00000u)), _mm256_set1_ps(0x1p112f)};
}

// fp8 as value / 256, or as value / 2^120 for folded inputs: sign and code lie where float32 has its sign, the lower half of
// its exponent and the upper bits of its fraction. Exact, as subnormal numbers count.
template <bool FOLDED>
OWN __m256 from_code(__m256i shifted, const Unpacking* by) {
    const __m256 bits = _mm256_castsi256_ps(_mm256_and_si256(shifted, by->kept));
    return FOLDED ? bits : _mm256_mul_ps(bits, by->unit);
}

// Sixteen outputs of the even or the odd input of a pair.
template <Kind kind, bool FOLDED, bool ODD>
OWN Lanes unpack(const uint8_t* pair, const Unpacking* by) {
    if constexpr (kind == Kind::fp32) {
        return load(reinterpret_cast<const float*>(pair) + (ODD ? STRIP : 0));
    } else {
        const __m256i* p = reinterpret_cast<const __m256i*>(pair);
        __m256i words = _mm256_loadu_si256(p);
        if constexpr (kind == Kind::bf16) {
            const __m256i more = _mm256_loadu_si256(p + 1);
            if (ODD)
                return {_mm256_castsi256_ps(_mm256_slli_epi32(words, 16)),
                        _mm256_castsi256_ps(_mm256_slli_epi32(more, 16))};
            return {_mm256_castsi256_ps(_mm256_and_si256(words, by->kept)),
                    _mm256_castsi256_ps(_mm256_and_si256(more, by->kept))};
        } else {
            if (ODD) words = _mm256_slli_epi16(words, 8);
            if constexpr (kind == Kind::fp8) {
                words = _mm256_srai_epi16(words, 4);
                return {from_code<FOLDED>(_mm256_slli_epi32(words, 16), by), from_code<FOLDED>(words, by)};
            } else {
                return {_mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(words, 16), 24)),
                        _mm256_cvtepi32_ps(_mm256_srai_epi32(words, 24))};
            }
        }
    }
}

// Sums of sixteen outputs as they were unpacked, in the order of the outputs, and of fp8 weights / 256.
template <Kind kind, bool FOLDED>
inline Lanes finished(Lanes sums) {
    if (bytes_of(kind) > 1) return sums;
    if (FOLDED) sums = mul(sums, all(0x1p112f / FOLD));
    const __m256 low = _mm256_unpacklo_ps(sums.a, sums.b), high = _mm256_unpackhi_ps(sums.a, sums.b);
    return {_mm256_permute2f128_ps(low, high, 0x20), _mm256_permute2f128_ps(low, high, 0x31)};
}

// The sums of sixteen outputs of ROWS rows, and those of WIDTH * 16 outputs. Members, and multiply-adds by assembly: GCC 12
// keeps arrays in memory, and moves sums between registers until some are in memory too.
template <int ROWS>
struct Column {
    Lanes sum = zero();
    Column<ROWS - 1> below;
};
template <>
struct Column<0> {};
template <int ROWS, int WIDTH>
struct Columns {
    Column<ROWS> column;
    Columns<ROWS, WIDTH - 1> beside;
};
template <int ROWS>
struct Columns<ROWS, 0> {};

OWN void add_product(__m256& sum, __m256 x, __m256 y) { asm("vfmadd231ps %1, %2, %0" : "+x"(sum) : "x"(x), "x"(y)); }

template <int ROWS>
OWN void add_products(Column<ROWS>& sums, Lanes weights, const float* x) {
    if constexpr (ROWS > 0) {
        const __m256 value = _mm256_broadcast_ss(x);
        add_product(sums.sum.a, weights.a, value);
        add_product(sums.sum.b, weights.b, value);
        add_products(sums.below, weights, x + 1);
    }
}
// One input of a pair; with `KEEP` its weights are left in `panel`.
template <Kind kind, bool FOLDED, bool ODD, bool KEEP, int ROWS, int WIDTH>
OWN void add_input(Columns<ROWS, WIDTH>& sums, const uint8_t* pair, const Unpacking* by, const float* x, float* panel) {
    if constexpr (WIDTH > 0) {
        const Lanes weights = unpack<kind, FOLDED, ODD>(pair, by);
        if (KEEP) store(panel, weights);
        add_products(sums.column, weights, x);
        add_input<kind, FOLDED, ODD, KEEP>(sums.beside, pair + vector_bytes<kind>(), by, x, panel + LANES);
    }
}
template <Kind kind, bool FOLDED, int ROWS>
OWN void add_scaled(const Column<ROWS>& sums, Lanes scale, float* out) {
    if constexpr (ROWS > 0) {
        store(out, fma(finished<kind, FOLDED>(sums.sum), scale, load(out)));
        add_scaled<kind, FOLDED>(sums.below, scale, out + STRIP);
    }
}
template <Kind kind, bool FOLDED, int ROWS, int WIDTH>
OWN void add_scaled(const Columns<ROWS, WIDTH>& sums, Lanes scale, float* out) {
    if constexpr (WIDTH > 0) {
        add_scaled<kind, FOLDED>(sums.column, scale, out);
        add_scaled<kind, FOLDED>(sums.beside, scale, out + LANES);
    }
}

// Asks for what lies one block behind a pair. Of vectors of half a cache line, each asks for every second line.
template <Kind kind, bool KEEP, int WIDTH>
OWN void ask_ahead(const uint8_t* weights, int first, int pair) {
    constexpr int pair_bytes = 2 * STRIP * bytes_of(kind), bytes = WIDTH * vector_bytes<kind>();
    const uint8_t* next = weights + BLOCK / 2 * pair_bytes;
    if (bytes < 64) {
        if (pair % 2 == 0) ahead(next + (first % 2 * BLOCK / 2 + pair) / 2 * pair_bytes + first / 2 * 64);
        return;
    }
    next += pair * pair_bytes + first * vector_bytes<kind>();
    for (int line = 0; line < bytes; line += 64) {
        ask_for_weights<KEEP>(next + line);
        if (kind == Kind::fp32) ask_for_weights<KEEP>(next + 4 * STRIP + line);
    }
}

// Adds ROWS × WIDTH * 16 sums over `count` inputs, times `scale`, to `out`; weights from packed rows. With `KEEP` they are
// left in `panel` for other rows, [count][WIDTH * 16].
template <Kind kind, bool FOLDED, int ROWS, int WIDTH, bool KEEP>
void narrow_block(const uint8_t* weights, int first, int count, const float* x, float scale, float* out, float* panel) {
    constexpr int pair_bytes = 2 * STRIP * bytes_of(kind);
    constexpr bool full = ROWS * WIDTH == 6;  // no register is left for constants
    const Unpacking constants = unpacking<kind>(), *by = &constants;
    Columns<ROWS, WIDTH> sums;
    const uint8_t* p = weights + first * vector_bytes<kind>();
    int k = 0;
    for (; k + 2 <= count; k += 2, p += pair_bytes) {
        ask_ahead<kind, KEEP, WIDTH>(weights, first, k / 2);
        // What is behind an address that may have changed is not loaded before.
        if (full) asm volatile("" : "+r"(by));
        asm volatile("" : "+r"(x), "+r"(p));
        add_input<kind, FOLDED, false, KEEP>(sums, p, by, x, panel + size_t(k) * WIDTH * LANES);
        if (full) asm volatile("" : "+r"(by));
        asm volatile("" : "+r"(x), "+r"(p));
        add_input<kind, FOLDED, true, KEEP>(sums, p, by, x + ROWS, panel + size_t(k + 1) * WIDTH * LANES);
        x += 2 * ROWS;
    }
    if (k < count) add_input<kind, FOLDED, false, KEEP>(sums, p, by, x, panel + size_t(k) * WIDTH * LANES);
    add_scaled<kind, FOLDED>(sums, all(scale), out + LANES * first);
}

// One block of inputs of a strip for the first tile of rows.
template <Kind kind, bool FOLDED, int ROWS, bool KEEP>
void first_tile(const uint8_t* weights, Part part, int count, const float* x, float scale, float* out, float* panel) {
    constexpr int wide = KEEP ? PANEL : ROWS == 1 ? 4 : ROWS == 2 ? 2 : 1, half = wide < 2 ? wide : 2;
    if (wide == 4 && part.end - part.first == 4)
        return narrow_block<kind, FOLDED, ROWS, wide, KEEP>(weights, 0, count, x, scale, out, panel);
    for (int first = part.first; first < part.end; first += half)
        narrow_block<kind, FOLDED, ROWS, half, KEEP>(weights, first, count, x, scale, out, panel);
}

}  // namespace
