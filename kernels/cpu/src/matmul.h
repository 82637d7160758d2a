// Products of packed weights with rows: every output is one chain of multiply-adds over its inputs in ascending order,
// broken only where a block of 128 is multiplied by its scale. Neither the number of rows, nor tiles, nor which of
// the two ways below is taken enters the result.
#pragma once

namespace {

// Row counts and vectors of one innermost loop, chosen so that sums and weights stay in registers.
template <int ROWS>
constexpr int direct_width() {
    return REGISTERS >= 32 ? (ROWS <= 6 ? 4 : 2) : ROWS == 1 ? 4 : ROWS <= 2 ? 2 : 1;
}

template <Kind kind>
constexpr float unit() {
    return kind == Kind::fp8 ? 256.0f : 1.0f;  // fp8 weights are unpacked as value / 256
}

// Adds ROWS × WIDTH * 16 sums over `count` inputs, times `scale`, to `out`; weights from packed rows.
template <Kind kind, int ROWS, int WIDTH>
inline void direct_block(const uint8_t* weights, int first, int count, const float* x, float scale, float* out) {
    constexpr size_t row_bytes = size_t(STRIP) * bytes_of(kind);
    Lanes sums[ROWS][WIDTH];
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < WIDTH; v++) sums[r][v] = zero();
#pragma GCC unroll 2
    for (int k = 0; k < count; k++) {
        Lanes w[4];
        if (WIDTH == 4)
            unpack_all<kind>(weights + k * row_bytes, w);
        else
            for (int v = 0; v < WIDTH; v++) w[v] = unpack<kind>(weights + k * row_bytes, first + v);
        ahead(weights + k * row_bytes + AHEAD);
        for (int r = 0; r < ROWS; r++) {
            const Lanes value = all(x[k * ROWS + r]);
            for (int v = 0; v < WIDTH; v++) sums[r][v] = fma(value, w[v], sums[r][v]);
        }
    }
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < WIDTH; v++) {
            float* place = out + r * STRIP + 16 * (first + v);
            store(place, fma(sums[r][v], all(scale), load(place)));
        }
}

template <Kind kind, int ROWS>
void direct_strip(const Matrix& m, int strip, const float* x, float* out) {
    constexpr int width = direct_width<ROWS>();
    const uint8_t* weights = m.strip(strip);
    const float* scales = m.scales ? m.scales + size_t(strip) * m.blocks() : nullptr;
    for (int i = 0; i < ROWS * STRIP; i += LANES) store(out + i, zero());
    for (int block = 0, k = 0; k < m.inputs; block++, k += BLOCK) {
        const int count = m.inputs - k < BLOCK ? m.inputs - k : BLOCK;
        const float scale = (scales ? scales[block] : 1.0f) * unit<kind>();
        for (int first = 0; first < 4; first += width)
            direct_block<kind, ROWS, width>(weights + size_t(k) * STRIP * bytes_of(kind), first, count, x + k * ROWS,
                                            scale, out);
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

template <Kind kind>
void panel_strip(const Matrix& m, int strip, const float* x, const Tiles& tiles, float* scratch, float* out) {
    constexpr size_t row_bytes = size_t(STRIP) * bytes_of(kind);
    const float* scales = m.scales ? m.scales + size_t(strip) * m.blocks() : nullptr;
    for (size_t i = 0; i < size_t(tiles.rows) * STRIP; i += LANES) store(out + i, zero());
    for (int block = 0, k = 0; k < m.inputs; block++, k += BLOCK) {
        const int count = m.inputs - k < BLOCK ? m.inputs - k : BLOCK;
        const float scale = (scales ? scales[block] : 1.0f) * unit<kind>();
        const uint8_t* weights = m.strip(strip) + size_t(k) * row_bytes;
        if (kind != Kind::fp32)
            for (int i = 0; i < count; i++) {
                Lanes w[4];
                unpack_all<kind>(weights + i * row_bytes, w);
                ahead(weights + i * row_bytes + AHEAD);
                // panels of PANEL vectors one after the other, so that one stays in the first-level cache
                for (int v = 0; v < 4; v++)
                    store(scratch + (v / PANEL) * (BLOCK * PANEL * 16) + i * (PANEL * 16) + v % PANEL * 16, w[v]);
            }
        for (int panel = 0; panel < 4 / PANEL; panel++) {
            const float* w = kind == Kind::fp32 ? reinterpret_cast<const float*>(weights) + panel * PANEL * 16
                                                : scratch + panel * (BLOCK * PANEL * 16);
            const size_t apart = kind == Kind::fp32 ? STRIP : PANEL * 16;
            for (int t = 0; t < tiles.count; t++) {
                const int start = tiles.start(t), size = tiles.size(t);
                tile_panel(size)(w, apart, count, x + size_t(start) * m.inputs + size_t(k) * size, scale,
                                 out + size_t(start) * STRIP + panel * PANEL * 16, STRIP);
            }
        }
    }
}

template <Kind kind>
void strip_of_kind(const Matrix& m, int strip, const float* x, const Tiles& tiles, float* scratch, float* out) {
    switch (tiles.rows) {
        case 1: return direct_strip<kind, 1>(m, strip, x, out);
        case 2: return direct_strip<kind, 2>(m, strip, x, out);
        case 3: return direct_strip<kind, 3>(m, strip, x, out);
        case 4: return direct_strip<kind, 4>(m, strip, x, out);
        case 5: return direct_strip<kind, 5>(m, strip, x, out);
        case 6: return direct_strip<kind, 6>(m, strip, x, out);
    }
    panel_strip<kind>(m, strip, x, tiles, scratch, out);
}

void multiply_strip(const Matrix& m, int strip, const float* x, const Tiles& tiles, float* scratch, float* out) {
    switch (m.kind) {
        case Kind::fp32: return strip_of_kind<Kind::fp32>(m, strip, x, tiles, scratch, out);
        case Kind::bf16: return strip_of_kind<Kind::bf16>(m, strip, x, tiles, scratch, out);
        case Kind::fp8: return strip_of_kind<Kind::fp8>(m, strip, x, tiles, scratch, out);
        case Kind::int8: return strip_of_kind<Kind::int8>(m, strip, x, tiles, scratch, out);
        case Kind::fp16: break;
    }
}

void embed_row(const Matrix& m, int token, float* out) {
    const int strip = token / STRIP, place = token % STRIP, vector = place / 16;
    const uint8_t* weights = m.strip(strip);
    const size_t row_bytes = size_t(STRIP) * bytes_of(m.kind);
    const size_t at = m.kind == Kind::fp32 ? size_t(place) : size_t(32 * (vector / 2) + 2 * (place % 16) + vector % 2);
    for (int k = 0; k < m.inputs; k++) {
        const uint8_t* p = weights + k * row_bytes + at * bytes_of(m.kind);
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
