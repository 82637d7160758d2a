// Products of packed weights with rows: every output is one chain of multiply-adds over its inputs in ascending order,
// broken only where a block of 128 is multiplied by its scale. Neither the number of rows, nor tiles, nor which of
// the two ways below is taken enters the result.
#pragma once

namespace {

// Vectors of outputs of one innermost loop, chosen so that sums and weights stay in registers.
template <int ROWS>
constexpr int direct_width() {
    return REGISTERS >= 32 ? (ROWS <= 6 ? 4 : 2) : ROWS == 1 ? 4 : ROWS == 2 ? 2 : 1;
}

template <Kind kind>
constexpr float unit() {
    return kind == Kind::fp8 ? 256.0f : 1.0f;  // fp8 weights are unpacked as value / 256
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
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < WIDTH; v++) sums[r][v] = zero();
    const auto pair = [&](int k, bool whole) {
        const uint8_t* p = weights + size_t(k / 2) * pair_bytes;
        constexpr int part_bytes = WIDTH * (pair_bytes / 4);
        for (int line = 0; line < part_bytes; line += 64) ahead(p + AHEAD + first * (pair_bytes / 4) + line);
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
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < WIDTH; v++) {
            float* place = out + r * STRIP + LANES * (first + v);
            store(place, fma(sums[r][v], all(scale), load(place)));
        }
}

// Adds ROWS × WIDTH * 16 sums over `count` inputs, times `scale`, to `out`, whose rows are `out_apart` apart; weights
// are float32 rows `apart` apart. x: number k of row r lies at k * X_STEP + r * X_ROW.
template <int ROWS, int WIDTH, int X_STEP, int X_ROW>
void panel_block(const float* weights, size_t apart, int count, const float* x, float scale, float* out,
                 size_t out_apart) {
    Lanes sums[ROWS][WIDTH];
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < WIDTH; v++) sums[r][v] = zero();
#pragma GCC unroll 2
    for (int k = 0; k < count; k++) {
        Lanes w[WIDTH];
        for (int v = 0; v < WIDTH; v++) w[v] = load(weights + k * apart + 16 * v);
        for (int r = 0; r < ROWS; r++) {
            const Lanes value = all(x[k * X_STEP + r * X_ROW]);
            for (int v = 0; v < WIDTH; v++) sums[r][v] = fma(value, w[v], sums[r][v]);
        }
    }
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < WIDTH; v++) {
            float* place = out + r * out_apart + 16 * v;
            store(place, fma(sums[r][v], all(scale), load(place)));
        }
}

using PanelBlock = void (*)(const float*, size_t, int, const float*, float, float*, size_t);
// Rows of a tile: the numbers of one k are neighbours.
template <int... ROW>
PanelBlock tile_panel(int rows, std::integer_sequence<int, ROW...>) {
    static constexpr PanelBlock blocks[] = {panel_block<ROW + 1, PANEL, ROW + 1, 1>...};
    return blocks[rows - 1];
}
inline PanelBlock tile_panel(int rows) { return tile_panel(rows, std::make_integer_sequence<int, TILE>()); }

// One block of inputs of a strip for the first tile of rows, of WIDTH vectors at a time.
template <Kind kind, int ROWS, bool KEEP>
void first_tile(const uint8_t* weights, Part part, int count, const float* x, float scale, float* out, float* panel) {
    constexpr int wide = KEEP ? PANEL : direct_width<ROWS>(), half = wide < 2 ? wide : 2;
    if (wide == 4 && part.end - part.first == 4)
        return direct_block<kind, ROWS, wide, KEEP>(weights, 0, count, x, scale, out, panel);
    for (int first = part.first; first < part.end; first += half)
        direct_block<kind, ROWS, half, KEEP>(weights, first, count, x, scale, out, panel);
}
using FirstTile = void (*)(const uint8_t*, Part, int, const float*, float, float*, float*);
template <Kind kind, bool KEEP, int... ROW>
FirstTile first_tile_of(int rows, std::integer_sequence<int, ROW...>) {
    static constexpr FirstTile functions[] = {first_tile<kind, ROW + 1, KEEP>...};
    return functions[rows - 1];
}

template <Kind kind>
void strip_of_kind(const Matrix& m, int strip, Part part, const float* x, const Tiles& tiles, float* scratch, float* out) {
    constexpr auto all_rows = std::make_integer_sequence<int, TILE>();
    constexpr size_t row_bytes = size_t(STRIP) * bytes_of(kind);  // a block begins with a pair
    const float* scales = m.scales ? m.scales + size_t(strip) * m.blocks() : nullptr;
    const bool alone = tiles.count == 1;
    const FirstTile first_tile = alone ? first_tile_of<kind, false>(tiles.rows, all_rows)
                                       : first_tile_of<kind, true>(tiles.size(0), all_rows);
    for (size_t i = 0; i < size_t(tiles.rows) * STRIP; i += LANES) store(out + i, zero());
    for (int block = 0, k = 0; k < m.inputs; block++, k += BLOCK) {
        const int count = m.inputs - k < BLOCK ? m.inputs - k : BLOCK;
        const float scale = (scales ? scales[block] : 1.0f) * unit<kind>();
        const uint8_t* weights = m.strip(strip) + size_t(k) * row_bytes;
        if (alone) {
            first_tile(weights, part, count, x + size_t(k) * tiles.rows, scale, out, nullptr);
            continue;
        }
        for (int panel = part.first; panel < part.end; panel += PANEL) {
            first_tile(weights, {panel, panel + PANEL}, count, x + size_t(k) * tiles.size(0), scale, out, scratch);
            for (int t = 1; t < tiles.count; t++) {
                const int start = tiles.start(t), size = tiles.size(t);
                tile_panel(size)(scratch, PANEL * LANES, count, x + size_t(start) * m.inputs + size_t(k) * size, scale,
                                 out + size_t(start) * STRIP + panel * LANES, STRIP);
            }
        }
    }
}

void multiply_strip(const Matrix& m, int strip, Part part, const float* x, const Tiles& tiles, float* scratch, float* out) {
    switch (m.kind) {
        case Kind::fp32: return strip_of_kind<Kind::fp32>(m, strip, part, x, tiles, scratch, out);
        case Kind::bf16: return strip_of_kind<Kind::bf16>(m, strip, part, x, tiles, scratch, out);
        case Kind::fp8: return strip_of_kind<Kind::fp8>(m, strip, part, x, tiles, scratch, out);
        case Kind::int8: return strip_of_kind<Kind::int8>(m, strip, part, x, tiles, scratch, out);
        case Kind::fp16: break;
    }
}

void embed_row(const Matrix& m, int token, float* out) {
    const int strip = token / STRIP, place = token % STRIP;
    const uint8_t* weights = m.strip(strip);
    for (int k = 0; k < m.inputs; k++) {
        const size_t at = m.kind == Kind::fp32 ? size_t(k) * STRIP + place
                                               : (size_t(k / 2) * STRIP + place) * 2 + (k % 2 == 0);
        const uint8_t* p = weights + at * bytes_of(m.kind);
        const float scale = m.scales ? m.scales[size_t(strip) * m.blocks() + k / BLOCK] : 1.0f;
        if (m.kind == Kind::fp32) {
            std::memcpy(out + k, p, 4);
        } else if (m.kind == Kind::bf16) {
            uint16_t bits;
            std::memcpy(&bits, p, 2);
            out[k] = from_bf16(bits);
        } else if (m.kind == Kind::fp8) {
            out[k] = from_fp16(fp8_as_fp16(*p)) * (scale * 256.0f);
        } else {
            out[k] = float(int8_t(*p)) * scale;
        }
    }
}

}  // namespace
