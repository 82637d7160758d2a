// The first tile of rows of a product, by vectors of sixteen: weights are unpacked in registers.
#pragma once

namespace {

constexpr Store FIRST_TILE_STORE = Store::rounded;

// Vectors of outputs of one innermost loop, chosen so that sums and weights stay in registers.
template <int ROWS>
constexpr int direct_width() {
    return REGISTERS >= 32 ? (ROWS <= 6 ? 4 : 2) : ROWS == 1 ? 4 : ROWS == 2 ? 2 : 1;
}

// As `unpack`, float32 included, of which the second row of the last pair may be missing.
template <Kind kind>
inline void unpack_pair(const uint8_t* pair, int q, bool whole, Lanes even[UNIT], Lanes odd[UNIT]) {
    if constexpr (kind == Kind::fp32) {
        const float* p = reinterpret_cast<const float*>(pair) + LANES * q;
        for (int u = 0; u < UNIT; u++) {
            even[u] = load(p + LANES * u);
            odd[u] = whole ? load(p + STRIP + LANES * u) : zero();
        }
    } else {
        unpack<kind>(pair, q, even, odd);
    }
}

// Adds ROWS × WIDTH * 16 sums over `count` inputs, times `scale`, to `out`; weights from packed rows, unpacked while the
// products of the ones before are under way. With `KEEP` they are left in `panel` for other rows, [count][WIDTH * 16].
template <Kind kind, int ROWS, int WIDTH, bool KEEP>
inline void direct_block(const uint8_t* weights, int first, int count, const float* x, float scale, float* out,
                         float* panel) {
    static_assert(WIDTH % UNIT == 0, "whole units");
    constexpr int pair_bytes = 2 * STRIP * bytes_of(kind);
    Lanes sums[ROWS][WIDTH];
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < WIDTH; v++) sums[r][v] = zero();
    const auto pair = [&](int k, bool whole) {
        const uint8_t* p = weights + size_t(k / 2) * pair_bytes;
        constexpr int part_bytes = WIDTH * (pair_bytes / 4);
        for (int line = 0; line < part_bytes; line += 64) ask_for_weights<KEEP>(p + AHEAD + first * (pair_bytes / 4) + line);
        for (int v = 0; v < WIDTH; v += UNIT) {
            Lanes even[UNIT], odd[UNIT];
            unpack_pair<kind>(p, first + v, whole, even, odd);
            if (KEEP)
                for (int u = 0; u < UNIT; u++) {
                    store(panel + (size_t(k) * WIDTH + v + u) * LANES, even[u]);
                    if (whole) store(panel + (size_t(k + 1) * WIDTH + v + u) * LANES, odd[u]);
                }
            for (int r = 0; r < ROWS; r++) {
                const Lanes value = all(x[k * ROWS + r]);
                for (int u = 0; u < UNIT; u++) sums[r][v + u] = fma(value, even[u], sums[r][v + u]);
            }
            if (whole)
                for (int r = 0; r < ROWS; r++) {
                    const Lanes value = all(x[(k + 1) * ROWS + r]);
                    for (int u = 0; u < UNIT; u++) sums[r][v + u] = fma(value, odd[u], sums[r][v + u]);
                }
        }
    };
    int k = 0;
    for (; k + 2 <= count; k += 2) pair(k, true);
    if (k < count) pair(k, false);
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < WIDTH; v++) {
            float* place = out + r * STRIP + LANES * (first + v);
            store(place, fma(sums[r][v], all(scale), load(place)));
        }
}

// Outputs are unpacked in their order.
template <Kind, bool>
inline Lanes finished(Lanes sums) {
    return sums;
}

// One block of inputs of a strip for the first tile of rows, of WIDTH vectors at a time.
template <Kind kind, bool FOLDED, int ROWS, bool KEEP>
void first_tile(const uint8_t* weights, Part part, int count, const float* x, float scale, float* out, float* panel) {
    static_assert(!FOLDED, "weights are unpacked whole");
    constexpr int wide = KEEP ? PANEL : direct_width<ROWS>(), half = wide < 2 ? wide : 2;
    if (wide == 4 && part.end - part.first == 4)
        return direct_block<kind, ROWS, wide, KEEP>(weights, 0, count, x, scale, out, panel);
    for (int first = part.first; first < part.end; first += half)
        direct_block<kind, ROWS, half, KEEP>(weights, first, count, x, scale, out, panel);
}

}  // namespace
