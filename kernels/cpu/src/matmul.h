// Products of packed weights with rows: every output is one chain of multiply-adds over its inputs in ascending order,
// broken only where a block of 128 is multiplied by its scale. Neither the number of rows, nor tiles, nor which of
// the two ways below is taken enters the result.
#pragma once

namespace {

// Asks for weights, which nobody reads twice; but with panels and many rows the first-level cache alone could lose them.
template <bool KEEP>
inline void ask_for_weights(const uint8_t* p) {
    KEEP ? ahead(p) : ahead_once(p);
}

}  // namespace

#include FIRST_TILE

namespace {

template <Kind kind>
constexpr float unit() {
    return kind == Kind::fp8 ? 256.0f : 1.0f;  // sums are of fp8 weights / 256
}

// Adds ROWS × WIDTH * 16 sums over `count` inputs, times `scale`, to `out`, whose rows are `out_apart` apart; weights
// are float32 rows `apart` apart, in the order in which `kind` is unpacked. x: number k of row r lies at
// k * X_STEP + r * X_ROW. `next`: what is read after x, of the same size.
template <Kind kind, bool FOLDED, int ROWS, int WIDTH, int X_STEP, int X_ROW>
void panel_block(const float* weights, size_t apart, int count, const float* x, const float* next, float scale, float* out,
                 size_t out_apart) {
    constexpr bool asks = REGISTERS < 32 && X_ROW == 1;  // tiles of many rows lie far away
    Lanes sums[ROWS][WIDTH];
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < WIDTH; v++) sums[r][v] = zero();
#pragma GCC unroll 2
    for (int k = 0; k < count; k++) {
        if (asks) ahead(next + k * X_STEP);
        Lanes w[WIDTH];
        for (int v = 0; v < WIDTH; v++) w[v] = load(weights + k * apart + 16 * v);
        for (int r = 0; r < ROWS; r++) {
            const Lanes value = all(x[k * X_STEP + r * X_ROW]);
            for (int v = 0; v < WIDTH; v++) sums[r][v] = fma(value, w[v], sums[r][v]);
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < WIDTH; v++) {
            float* place = out + r * out_apart + 16 * v;
            store(place, fma(finished<kind, FOLDED>(sums[r][v]), all(scale), load(place)));
        }
}

using PanelBlock = void (*)(const float*, size_t, int, const float*, const float*, float, float*, size_t);
// Rows of a tile: the numbers of one k are neighbours.
template <Kind kind, bool FOLDED, int... ROW>
PanelBlock tile_panel(int rows, std::integer_sequence<int, ROW...>) {
    static constexpr PanelBlock blocks[] = {panel_block<kind, FOLDED, ROW + 1, PANEL, ROW + 1, 1>...};
    return blocks[rows - 1];
}

using FirstTile = void (*)(const uint8_t*, Part, int, const float*, float, float*, float*);
template <Kind kind, bool FOLDED, bool KEEP, int... ROW>
FirstTile first_tile_of(int rows, std::integer_sequence<int, ROW...>) {
    static constexpr FirstTile functions[] = {first_tile<kind, FOLDED, ROW + 1, KEEP>...};
    return functions[rows - 1];
}

template <Kind kind, bool FOLDED = false>
void strip_of_kind(const Matrix& m, int strip, Part part, const float* x, const Tiles& tiles, float* scratch, float* out) {
    constexpr auto all_rows = std::make_integer_sequence<int, TILE>();
    constexpr size_t row_bytes = size_t(STRIP) * bytes_of(kind);  // a block begins with a pair
    const float* scales = m.scales ? m.scales + size_t(strip) * m.blocks() : nullptr;
    const bool alone = tiles.count == 1;
    const FirstTile first_tile = alone ? first_tile_of<kind, FOLDED, false>(tiles.rows, all_rows)
                                       : first_tile_of<kind, FOLDED, true>(tiles.size(0), all_rows);
    for (int r = 0; r < tiles.rows; r++)
        for (int v = part.first; v < part.end; v++) store(out + size_t(r) * STRIP + LANES * v, zero());
    for (int block = 0, k = 0; k < m.inputs; block++, k += BLOCK) {
        const int count = m.inputs - k < BLOCK ? m.inputs - k : BLOCK;
        const float scale = (scales ? scales[block] : 1.0f) * unit<kind>();
        const uint8_t* weights = m.strip(strip) + size_t(k) * row_bytes;
        if (alone) {
            first_tile(weights, part, count, x + size_t(k) * tiles.rows, scale, out, nullptr);
            continue;
        }
        const auto tile = [&](int t) { return x + size_t(tiles.start(t)) * m.inputs + size_t(k) * tiles.size(t); };
        for (int panel = part.first; panel < part.end; panel += PANEL) {
            first_tile(weights, {panel, panel + PANEL}, count, x + size_t(k) * tiles.size(0), scale, out, scratch);
            for (int t = 1; t < tiles.count; t++) {
                const float* next = tile(t + 1 < tiles.count ? t + 1 : 0);
                tile_panel<kind, FOLDED>(tiles.size(t), all_rows)(scratch, PANEL * LANES, count, tile(t), next, scale,
                                                          out + size_t(tiles.start(t)) * STRIP + panel * LANES, STRIP);
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

// Of an fp8 matrix over rounded inputs, which are kept as FIRST_TILE_STORE says.
void multiply_rounded(const Matrix& m, int strip, Part part, const float* x, const Tiles& tiles, float* scratch, float* out) {
    strip_of_kind<Kind::fp8, FIRST_TILE_STORE == Store::folded>(m, strip, part, x, tiles, scratch, out);
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
