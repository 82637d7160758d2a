// Attention over pages, in blocks of 64 positions at absolute boundaries.
//
// A score is sixteen chains of multiply-adds (dimension d goes to chain d % 16) that are added up as a tree; a block
// has its own maximum, sum and weighted values; blocks are joined in ascending order. A query's bits follow from its
// position alone: not from the page size, nor from which queries were computed with it. There are two ways to the same
// bits: few queries read the keys as they lie, many share keys that were turned into columns.
#pragma once

namespace {

struct Block {
    const float* keys[KEYS];    // head_dim numbers each, zeros up to a multiple of 16
    const float* values[KEYS];
    int count;                  // positions that are filled
};

inline void unpack_head(const Pool& pool, const uint8_t* head, int slot, float* out, int wide) {
    const int size = pool.head_dim, whole = size / LANES * LANES;
    switch (pool.kind) {
        case Kind::fp32: std::memcpy(out, head + size_t(slot) * size * 4, size_t(size) * 4); break;
        case Kind::bf16: {
            const uint16_t* p = reinterpret_cast<const uint16_t*>(head) + size_t(slot) * size;
            for (int i = 0; i < whole; i += LANES) store(out + i, load_bf16(p + i));
            for (int i = whole; i < size; i++) out[i] = from_bf16(p[i]);
            break;
        }
        case Kind::fp16: {
            const uint16_t* p = reinterpret_cast<const uint16_t*>(head) + size_t(slot) * size;
            for (int i = 0; i < whole; i += LANES) store(out + i, load_fp16(p + i));
            for (int i = whole; i < size; i++) out[i] = from_fp16(p[i]);
            break;
        }
        case Kind::fp8: {
            const uint8_t* p = head + size_t(slot) * size;
            float scale;
            std::memcpy(&scale, head + size_t(pool.tokens) * size + 4 * size_t(slot), 4);
            // NaN's code would become ±480: the row that wrote it had no number to keep
            uint32_t broken = 0;
            for (int i = 0; i < size; i++) broken |= (p[i] & 0x7f) == 0x7f;
            const float unit = broken ? as_float(0x7fc00000) : 256.0f * scale;
            for (int i = 0; i < whole; i += LANES) store(out + i, mul(load_fp8(p + i), all(unit)));
            for (int i = whole; i < size; i++) out[i] = from_fp16(fp8_as_fp16(p[i])) * unit;
            break;
        }
        case Kind::int8: break;
    }
    for (int i = size; i < wide; i++) out[i] = 0.0f;
}

// Ask for `count` keys (or values) from a position on: pages lie anywhere, which no prefetcher of the processor can guess.
inline void ask_for(const Pool& pool, const int32_t* table, int layer, int kv_head, int which, int position, int count) {
    const size_t bytes = size_t(pool.head_dim) * bytes_of(pool.kind);
    while (count > 0) {
        const int slot = position % pool.tokens, here = count < pool.tokens - slot ? count : pool.tokens - slot;
        const uint8_t* begin = pool.head(table[position / pool.tokens], layer, which, kv_head) + size_t(slot) * bytes;
        for (size_t at = 0; at < size_t(here) * bytes; at += 64) ahead(begin + at);
        position += here;
        count -= here;
    }
}
inline void ask_for(const Attention& a, int position, int count, int which) {
    ask_for(*a.pool, a.table, a.layer, a.kv_head, which, position, count);
}
void ask_for_both(const Pool& pool, const int32_t* table, int layer, int kv_head, int position, int count) {
    for (int which = 0; which < 2; which++) ask_for(pool, table, layer, kv_head, which, position, count);
}

// Find the keys (or values) of a block; those that do not lie as float32 are unpacked to `scratch` [64][wide].
inline void fetch(const Attention& a, int position, int count, int which, int wide, bool copy, float* scratch,
                  const float* found[KEYS]) {
    const Pool& pool = *a.pool;
    copy = copy || pool.kind != Kind::fp32 || wide != pool.head_dim;
    for (int j = 0; j < count; j++) {
        const int slot = (position + j) % pool.tokens;
        const uint8_t* head = pool.head(a.table[(position + j) / pool.tokens], a.layer, which, a.kv_head);
        if (copy) {
            float* out = scratch + size_t(j) * wide;
            unpack_head(pool, head, slot, out, wide);
            found[j] = out;
        } else {
            found[j] = reinterpret_cast<const float*>(head) + size_t(slot) * wide;
        }
    }
}

// The running state of one query.
struct Running {
    float most, weight;
};

// Turns the scores of one query, of which numbers low … high - 1 count, into weights; their greatest and their sum.
inline Running weigh(float* scores, int low, int high) {
    const Lanes nothing = all(as_float(0xff800000));
    Lanes s[4], number = numbers();
    for (int v = 0; v < 4; v++) {
        s[v] = where_less(number, all(float(high)), load(scores + 16 * v), nothing);
        if (low > 0) s[v] = where_less(number, all(float(low)), nothing, s[v]);
        number = add(number, all(16.0f));
    }
    const float most = maximum(greater(greater(s[0], s[1]), greater(s[2], s[3])));
    for (int v = 0; v < 4; v++) {
        s[v] = exponential(sub(s[v], all(most)));
        store(scores + 16 * v, s[v]);
    }
    return {most, sum(add(add(s[0], s[1]), add(s[2], s[3])))};
}

// Joins a block's result to what the query has of the blocks before.
inline void join(Running& running, Running block, const float* block_values, float* values, int wide) {
    const float most = block.most > running.most ? block.most : running.most;
    float both[LANES] = {running.most - most, block.most - most};
    store(both, exponential(load(both)));
    const float before = both[0], now = both[1];
    for (int i = 0; i < wide; i += LANES)
        store(values + i, fma(load(block_values + i), all(now), mul(load(values + i), all(before))));
    running = {most, __builtin_fmaf(block.weight, now, running.weight * before)};
}

template <int WIDTH>
inline void weighted_values(const Block& block, const float* weights, int first, float* out) {
    Lanes sums[WIDTH];
    for (int v = 0; v < WIDTH; v++) sums[v] = zero();
    for (int j = 0; j < block.count; j++) {
        const Lanes weight = all(weights[j]);
        for (int v = 0; v < WIDTH; v++) sums[v] = fma(weight, load(block.values[j] + first + 16 * v), sums[v]);
    }
    for (int v = 0; v < WIDTH; v++) store(out + first + 16 * v, sums[v]);
}

inline void score_as_they_lie(const Block& block, const float* query, int wide, float* scores) {
    for (int v = 0; v < 4; v++) {
        Lanes chains[LANES];
        for (int j = 0; j < LANES; j++) {
            const int at = 16 * v + j;
            chains[j] = zero();
            if (at < block.count)
                for (int d = 0; d < wide; d += LANES)
                    chains[j] = fma(load(query + d), load(block.keys[at] + d), chains[j]);
        }
        store(scores + 16 * v, 16 * v < block.count ? sums(chains) : zero());
    }
}

// Keys by dimension: [wide][64], zeros behind the last.
inline void turn_keys(const Block& block, int wide, float* columns) {
    for (int j = 0; j < KEYS; j += LANES)
        for (int d = 0; d < wide; d += LANES) {
            Lanes square[LANES];
            for (int i = 0; i < LANES; i++) square[i] = j + i < block.count ? load(block.keys[j + i] + d) : zero();
            turn(square);
            for (int i = 0; i < LANES; i++) store(columns + size_t(d + i) * KEYS + j, square[i]);
        }
}

// The tree of `sum` over chains, for ROWS queries [wide][ROWS] and 16 positions of keys by dimension [wide][64].
template <int ROWS, int CHAIN, int APART>
inline void chain_tree(const float* queries, const float* columns, int wide, Lanes out[ROWS]) {
    if constexpr (APART == LANES) {
        for (int r = 0; r < ROWS; r++) out[r] = zero();
        for (int d = CHAIN; d < wide; d += LANES) {
            const Lanes key = load(columns + size_t(d) * KEYS);
            for (int r = 0; r < ROWS; r++) out[r] = fma(all(queries[d * ROWS + r]), key, out[r]);
        }
    } else {
        Lanes other[ROWS];
        chain_tree<ROWS, CHAIN, 2 * APART>(queries, columns, wide, out);
        chain_tree<ROWS, CHAIN + APART, 2 * APART>(queries, columns, wide, other);
        for (int r = 0; r < ROWS; r++) out[r] = add(out[r], other[r]);
    }
}
template <int ROWS>
void score_columns(const float* queries, const float* columns, int wide, float* scores) {
    for (int v = 0; v < 4; v++) {
        Lanes result[ROWS];
        chain_tree<ROWS, 0, 1>(queries, columns + 16 * v, wide, result);
        for (int r = 0; r < ROWS; r++) store(scores + size_t(r) * KEYS + 16 * v, result[r]);
    }
}
using ScoreColumns = void (*)(const float*, const float*, int, float*);
template <int... ROW>
ScoreColumns columns_of(int rows, std::integer_sequence<int, ROW...>) {
    static constexpr ScoreColumns functions[] = {score_columns<ROW + 1>...};
    return functions[rows - 1];
}
// Weights [ROWS][64] times values [64][wide].
template <int WIDTH, int... ROW>
PanelBlock values_panel(int rows, std::integer_sequence<int, ROW...>) {
    static constexpr PanelBlock blocks[] = {panel_block<ROW + 1, WIDTH, 1, KEYS>...};
    return blocks[rows - 1];
}

void attend_rows(const Attention& a, float* scratch, float* out) {
    const int size = a.pool->head_dim, wide = int(padded(size_t(size)));
    const int queries = a.rows * a.group, last = a.position + a.rows - 1;
    const bool many = queries >= MANY_QUERIES;
    float* fetched = scratch;                             // [2][64][wide]
    float* columns = fetched + 2 * size_t(KEYS) * wide;   // [wide][64]
    float* turned = columns + size_t(KEYS) * wide;        // queries [wide][rows of a tile], tile after tile
    float* values = turned + (size_t(queries) + 16) * wide;  // [queries][wide]
    float* scores = values + size_t(queries) * wide;      // [queries][64]
    float* made = scores + size_t(queries) * KEYS;        // [rows of a tile][wide] of one block
    float* state = made + 16 * size_t(wide);              // [queries] of Running
    Running* running = reinterpret_cast<Running*>(state);
    for (int q = 0; q < queries; q++) running[q] = {as_float(0xff800000), 0.0f};
    for (size_t i = 0; i < size_t(queries) * wide; i++) values[i] = 0.0f;
    const Tiles tiles(queries, SCORE_ROWS);
    for (int q = 0; q < queries; q++) {
        const int t = tiles.of(q), step = many ? tiles.size(t) : 1;
        float* place = turned + (many ? tiles.place(t, wide, Store::plain) + (q - tiles.start(t)) : size_t(q) * wide);
        const float* query = a.queries + size_t(q / a.group) * a.stride + size_t(q % a.group) * size;
        for (int d = 0; d < wide; d++) place[size_t(d) * step] = d < size ? query[d] : 0.0f;
    }
    const int first = a.window > 0 && a.position >= a.window ? a.position - a.window + 1 : 0;
    ask_for(a, first / KEYS * KEYS, last + 1 - first / KEYS * KEYS < KEYS ? last + 1 - first / KEYS * KEYS : KEYS, 0);
    for (int block = first / KEYS; block <= last / KEYS; block++) {
        const int begin = block * KEYS, count = last + 1 - begin < KEYS ? last + 1 - begin : KEYS;
        const int next = last + 1 - begin - KEYS;
        Block found;
        found.count = count;
        ask_for(a, begin, count, 1);
        fetch(a, begin, count, 0, wide, many, fetched, found.keys);
        if (next > 0) ask_for(a, begin + KEYS, next < KEYS ? next : KEYS, 0);
        if (many) {
            turn_keys(found, wide, columns);
            for (int t = 0; t < tiles.count; t++)
                columns_of(tiles.size(t), std::make_integer_sequence<int, SCORE_ROWS>())(
                    turned + size_t(tiles.start(t)) * wide, columns, wide, scores + size_t(tiles.start(t)) * KEYS);
        } else {
            for (int q = 0; q < queries; q++)
                score_as_they_lie(found, turned + size_t(q) * wide, wide, scores + size_t(q) * KEYS);
        }
        fetch(a, begin, count, 1, wide, many, fetched + size_t(KEYS) * wide, found.values);
        const Tiles rows(queries, many ? TILE : 1);
        for (int t = 0; t < rows.count; t++) {
            const int start = rows.start(t), tile = rows.size(t);
            Running fresh[TILE];
            bool seen[TILE];
            for (int i = 0; i < tile; i++) {
                const int position = a.position + (start + i) / a.group;
                const int high = position + 1 - begin < count ? position + 1 - begin : count;
                const int low = a.window > 0 ? position - a.window + 1 - begin : 0;
                float* mine = scores + size_t(start + i) * KEYS;
                seen[i] = high > 0 && low < high;
                if (seen[i])
                    fresh[i] = weigh(mine, low, high);
                else
                    for (int j = 0; j < KEYS; j++) mine[j] = 0.0f;
            }
            if (many) {
                for (int i = 0; i < tile * wide; i += LANES) store(made + i, zero());
                int d = 0;
                for (; d + 16 * PANEL <= wide; d += 16 * PANEL)
                    values_panel<PANEL>(tile, std::make_integer_sequence<int, TILE>())(
                        found.values[0] + d, wide, count, scores + size_t(start) * KEYS, 1.0f, made + d, wide);
                for (; d < wide; d += 16)
                    values_panel<1>(tile, std::make_integer_sequence<int, TILE>())(
                        found.values[0] + d, wide, count, scores + size_t(start) * KEYS, 1.0f, made + d, wide);
            } else {
                int d = 0;
                for (; d + 64 <= wide; d += 64) weighted_values<4>(found, scores + size_t(start) * KEYS, d, made);
                for (; d < wide; d += 16) weighted_values<1>(found, scores + size_t(start) * KEYS, d, made);
            }
            for (int i = 0; i < tile; i++)
                if (seen[i])
                    join(running[start + i], fresh[i], made + size_t(i) * wide, values + size_t(start + i) * wide, wide);
        }
    }
    for (int q = 0; q < queries; q++) {
        const float* from = values + size_t(q) * wide;
        float* place = out + size_t(q) * size;
        for (int d = 0; d < size; d++) place[d] = from[d] / running[q].weight;
    }
}

}  // namespace
