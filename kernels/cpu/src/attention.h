// Attention over pages, in blocks of 64 positions at absolute boundaries.
//
// A score is sixteen chains of multiply-adds (dimension d goes to chain d % 16) that are added up as a tree; a block
// has its own maximum, sum and weighted values; blocks are joined in ascending order. A query's bits follow from its
// position alone: not from the page size, nor from which queries were computed with it. There are two ways to the same
// bits: few queries read the keys as they lie, many share keys that were turned into columns.
#pragma once

namespace {

// Where the keys (or values) of a block's positions lie in their pages: those that somebody's queries see.
struct Places {
    const uint8_t* numbers[KEYS];
    const uint8_t* scales[KEYS];  // of fp8
    int count;                    // positions that are filled

    void find(const Attention& a, int block, int which) {
        const Pool& pool = *a.pool;
        const size_t bytes = size_t(pool.head_dim) * bytes_of(pool.kind);
        const int position = block * KEYS, left = a.position + a.rows - position;
        int page = position / pool.tokens, slot = position % pool.tokens;
        count = left < KEYS ? left : KEYS;
        for (int j = 0; j < count; page++, slot = 0) {
            const uint8_t* head = pool.head(a.table[page], a.layer, which, a.kv_head);
            const int here = count - j < pool.tokens - slot ? count - j : pool.tokens - slot;
            for (int i = 0; i < here; i++) numbers[j + i] = head + size_t(slot + i) * bytes;
            if (pool.kind == Kind::fp8)
                for (int i = 0; i < here; i++) scales[j + i] = head + size_t(pool.tokens) * bytes + 4 * size_t(slot + i);
            j += here;
        }
    }

    // Asks for numbers first … end - 1 of position j, if there is one.
    template <Kind kind>
    void ask(int j, int first, int end) const {
        if (j >= count) return;
        for (int at = first * bytes_of(kind); at < end * bytes_of(kind); at += 64) far_ahead(numbers[j] + at);
        if (kind == Kind::fp8) far_ahead(scales[j]);
    }
    // The same of all positions from j on.
    template <Kind kind>
    void ask_from(int j, int first, int end) const {
        for (; j < count; j++) ask<kind>(j, first, end);
    }
};

// Numbers of one position, as float32.
template <Kind kind>
struct Row {
    const uint8_t* numbers;
    Lanes unit;

    Row(const Places& places, int j) : numbers(places.numbers[j]) {
        if constexpr (kind == Kind::fp8) {
            float scale;
            std::memcpy(&scale, places.scales[j], 4);
            unit = all(256.0f * scale);
        }
    }
    Lanes vector(int d) const {
        if constexpr (kind == Kind::fp32)
            return load(reinterpret_cast<const float*>(numbers) + LANES * d);
        else if constexpr (kind == Kind::bf16)
            return load_bf16(reinterpret_cast<const uint16_t*>(numbers) + LANES * d);
        else if constexpr (kind == Kind::fp16)
            return load_fp16(reinterpret_cast<const uint16_t*>(numbers) + LANES * d);
        else
            return mul(load_fp8(numbers + LANES * d), unit);
    }
    float number(int i) const {
        if constexpr (kind == Kind::fp32) {
            float x;
            std::memcpy(&x, numbers + 4 * i, 4);
            return x;
        } else if constexpr (kind == Kind::fp8) {
            float first[LANES];
            store(first, unit);
            return from_fp16(fp8_as_fp16(numbers[i])) * first[0];
        } else {
            uint16_t bits;
            std::memcpy(&bits, numbers + 2 * i, 2);
            return kind == Kind::bf16 ? from_bf16(bits) : from_fp16(bits);
        }
    }
};

// Copies a block to float32, [count][wide], zeros behind each row, and asks for the one that comes `then`.
template <Kind kind>
void copy_rows(const Places& places, const Places& then, int size, int wide, float* out) {
    const int whole = size / LANES;
    for (int j = 0; j < places.count; j++, out += wide) {
        then.ask<kind>(j, 0, size);
        const Row<kind> row(places, j);
        for (int d = 0; d < whole; d++) store(out + LANES * d, row.vector(d));
        for (int i = whole * LANES; i < wide; i++) out[i] = i < size ? row.number(i) : 0.0f;
    }
    then.ask_from<kind>(places.count, 0, size);
}

void ask_for_bytes(const uint8_t* data, size_t bytes) {
    for (size_t at = 0; at < bytes; at += 64) far_ahead(data + at);
}
// What a query has of a block, or of all blocks so far.
struct Share {
    float most, weight;  // the greatest score; the sum of e^(score - most)
};

// What the query at a position sees of a block: numbers low … high - 1.
struct Seen {
    int low, high;

    bool none() const { return high <= 0 || low >= high; }
};
inline Seen seen_of(const Attention& a, int position, int begin) {
    const int left = position + 1 - begin, low = a.window > 0 ? left - a.window : 0;
    return {low, left < KEYS ? left : KEYS};
}

inline void leave_out(float* scores, Seen seen) {
    const Lanes nothing = all(as_float(0xff800000));
    Lanes number = numbers();
    for (int v = 0; v < KEYS; v += LANES) {
        const Lanes kept = where_less(number, all(float(seen.high)), load(scores + v), nothing);
        store(scores + v, where_less(number, all(float(seen.low)), nothing, kept));
        number = add(number, all(float(LANES)));
    }
}

// Turns the scores of `rows` queries into weights; their greatest and their sums. One thing after the other for all of them:
// what one query waits for, others do.
inline void weigh(float* scores, int rows, Share* shares) {
    float totals[TILE][LANES];
    for (int i = 0; i < rows; i++) {
        const float* s = scores + size_t(i) * KEYS;
        shares[i].most = maximum(greater(greater(load(s), load(s + 16)), greater(load(s + 32), load(s + 48))));
    }
    for (int i = 0; i < rows; i++) {
        Lanes s[4];
        const Lanes most = all(shares[i].most);
        for (int v = 0; v < 4; v++) {
            float* place = scores + size_t(i) * KEYS + 16 * v;
            s[v] = exponential_below(sub(load(place), most));
            store(place, s[v]);
        }
        store(totals[i], add(add(s[0], s[1]), add(s[2], s[3])));
    }
    for (int i = 0; i < rows; i++) shares[i].weight = sum(load(totals[i]));
}

// Joins what `rows` queries have of a block, at most 16, to what they have of the blocks before. A query that sees nothing
// of the block has -infinity as its greatest score there, and keeps what it has.
inline void join(int rows, const Share* fresh, const float* fresh_values, Share* running, float* values, int wide) {
    float old_most[LANES] = {}, new_most[LANES] = {}, before[LANES], now[LANES];
    for (int i = 0; i < rows; i++) {
        old_most[i] = running[i].most;
        new_most[i] = fresh[i].most;
    }
    // A query that sees nothing of any block yet has a finite greatest score too, lest infinities be subtracted.
    const Lanes most = greater(greater(load(new_most), load(old_most)), all(-1e30f));
    store(before, exponential(sub(load(old_most), most)));
    store(now, exponential(sub(load(new_most), most)));
    store(new_most, most);
    for (int i = 0; i < rows; i++) {
        const Lanes old_share = all(before[i]), new_share = all(now[i]);
        for (int d = 0; d < wide; d += LANES) {
            float* place = values + size_t(i) * wide + d;
            store(place, fma(load(fresh_values + size_t(i) * wide + d), new_share, mul(load(place), old_share)));
        }
        running[i] = {new_most[i], __builtin_fmaf(fresh[i].weight, now[i], running[i].weight * before[i])};
    }
}

// Scores [QUERIES][64] of queries [QUERIES][VECTORS * 16] over keys as they lie. Those that are read `then` are asked for one
// by one: a processor that is asked for many lines at once waits for them, and one that is asked while it computes does not.
template <Kind kind, int VECTORS, int QUERIES>
void score_rows(const Places& keys, const Places& then, const float* queries, float* scores) {
    Lanes query[QUERIES][VECTORS];
    for (int q = 0; q < QUERIES; q++)
        for (int d = 0; d < VECTORS; d++) query[q][d] = load(queries + (q * VECTORS + d) * LANES);
    for (int v = 0; v < KEYS / LANES; v++) {
        Lanes chains[QUERIES][LANES];
        for (int j = 0; j < LANES; j++) {
            const int at = LANES * v + j;
            Lanes chain[QUERIES];
            for (int q = 0; q < QUERIES; q++) chain[q] = zero();
            then.ask<kind>(at, 0, VECTORS * LANES);
            if (at < keys.count) {
                const Row<kind> row(keys, at);
                for (int d = 0; d < VECTORS; d++) {
                    const Lanes key = row.vector(d);
                    for (int q = 0; q < QUERIES; q++)
                        chain[q] = fma(query[q][d], key, chain[q]);
                }
            }
            for (int q = 0; q < QUERIES; q++) chains[q][j] = chain[q];
        }
        for (int q = 0; q < QUERIES; q++)
            store(scores + q * KEYS + LANES * v, LANES * v < keys.count ? sums(chains[q]) : zero());
    }
}

// Values as they lie, weighted by [QUERIES][64] from position `from` on: out [QUERIES][VECTORS * 16].
template <Kind kind, int VECTORS, int QUERIES>
void weigh_rows(const Places& values, const Places& then, int from, const float* weights, float* out) {
    constexpr int part = 4;
    static_assert(VECTORS % part == 0, "heads of 64 or 128");
    for (int first = 0; first < VECTORS; first += part) {
        Lanes sums[QUERIES][part];
        for (int q = 0; q < QUERIES; q++)
            for (int d = 0; d < part; d++) sums[q][d] = zero();
        for (int j = from; j < values.count; j++) {
            then.ask<kind>(j, first * LANES, (first + part) * LANES);
            const Row<kind> row(values, j);
            for (int d = 0; d < part; d++) {
                const Lanes value = row.vector(first + d);
                for (int q = 0; q < QUERIES; q++) sums[q][d] = fma(all(weights[q * KEYS + j]), value, sums[q][d]);
            }
        }
        for (int q = 0; q < QUERIES; q++)
            for (int d = 0; d < part; d++) store(out + (q * VECTORS + first + d) * LANES, sums[q][d]);
        then.ask_from<kind>(values.count, first * LANES, (first + part) * LANES);
    }
}

// What is done with few queries, for a kind of page and a number of vectors of a head.
struct Few {
    void (*score)(const Places&, const Places& then, const float*, float*);
    void (*weigh)(const Places&, const Places& then, int from, const float*, float*);
};
template <Kind kind, int VECTORS>
Few few_for(int queries) {
    switch (queries) {
        case 1: return {score_rows<kind, VECTORS, 1>, weigh_rows<kind, VECTORS, 1>};
        case 2: return {score_rows<kind, VECTORS, 2>, weigh_rows<kind, VECTORS, 2>};
        case 3: return {score_rows<kind, VECTORS, 3>, weigh_rows<kind, VECTORS, 3>};
        default: return {score_rows<kind, VECTORS, 4>, weigh_rows<kind, VECTORS, 4>};
    }
}
template <Kind kind>
Few few_for(int size, int queries) {
    return size == 64 ? few_for<kind, 4>(queries) : size == 128 ? few_for<kind, 8>(queries) : Few{nullptr, nullptr};
}
// Null for heads of other sizes than 64 and 128: those take the way of many queries.
inline Few few_for(const Pool& pool, int queries) {
    switch (pool.kind) {
        case Kind::bf16: return few_for<Kind::bf16>(pool.head_dim, queries);
        case Kind::fp16: return few_for<Kind::fp16>(pool.head_dim, queries);
        case Kind::fp8: return few_for<Kind::fp8>(pool.head_dim, queries);
        default: return few_for<Kind::fp32>(pool.head_dim, queries);
    }
}
inline void copy_block(const Pool& pool, const Places& places, const Places& then, int wide, float* out) {
    switch (pool.kind) {
        case Kind::bf16: return copy_rows<Kind::bf16>(places, then, pool.head_dim, wide, out);
        case Kind::fp16: return copy_rows<Kind::fp16>(places, then, pool.head_dim, wide, out);
        case Kind::fp8: return copy_rows<Kind::fp8>(places, then, pool.head_dim, wide, out);
        default: return copy_rows<Kind::fp32>(places, then, pool.head_dim, wide, out);
    }
}

// Keys by dimension: [wide][64], zeros behind the last.
inline void turn_keys(const float* keys, int count, int wide, float* columns) {
    for (int j = 0; j < KEYS; j += LANES)
        for (int d = 0; d < wide; d += LANES) {
            Lanes square[LANES], turned[LANES];
            for (int i = 0; i < LANES; i++) square[i] = j + i < count ? load(keys + size_t(j + i) * wide + d) : zero();
            turn(square, LANES, turned);
            for (int i = 0; i < LANES; i++) store(columns + size_t(d + i) * KEYS + j, turned[i]);
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
// Scores [ROWS][64] of the first `count` positions.
template <int ROWS>
void score_columns(const float* queries, const float* columns, int wide, int count, float* scores) {
    for (int v = 0; v < count; v += LANES) {
        Lanes result[ROWS];
        chain_tree<ROWS, 0, 1>(queries, columns + v, wide, result);
        for (int r = 0; r < ROWS; r++) store(scores + size_t(r) * KEYS + v, result[r]);
    }
}
using ScoreColumns = void (*)(const float*, const float*, int, int, float*);
template <int... ROW>
ScoreColumns columns_of(int rows, std::integer_sequence<int, ROW...>) {
    static constexpr ScoreColumns functions[] = {score_columns<ROW + 1>...};
    return functions[rows - 1];
}
// Weights [ROWS][64] times values [64][wide].
template <int WIDTH, int... ROW>
PanelBlock values_panel(int rows, std::integer_sequence<int, ROW...>) {
    static constexpr PanelBlock blocks[] = {panel_block<Kind::fp32, false, ROW + 1, WIDTH, 1, KEYS>...};
    return blocks[rows - 1];
}

// What attention works in, cut from one piece of memory.
struct AttentionBench {
    float* copied;    // [64][wide] keys, then values
    float* columns;   // keys by dimension, [wide][64]
    float* turned;    // queries [queries][wide], or [wide][rows] of one tile after the other
    float* values;    // what every query has so far, [queries][wide]
    float* scores;    // [queries][64]
    float* made;      // of one block, [rows of a tile][wide]
    Share* running;   // [queries]

    AttentionBench(float* memory, int queries, int wide) {
        copied = memory;
        columns = copied + size_t(KEYS) * wide;
        turned = columns + size_t(KEYS) * wide;
        values = turned + size_t(queries) * wide;
        scores = values + size_t(queries) * wide;
        made = scores + size_t(queries) * KEYS;
        running = reinterpret_cast<Share*>(made + size_t(LANES) * wide);
    }
    void clear(int queries, int wide) const {
        for (int q = 0; q < queries; q++) running[q] = {as_float(0xff800000), 0.0f};
        for (size_t i = 0; i < size_t(queries) * wide; i += LANES) store(values + i, zero());
    }
};

// The blocks whose keys the queries see, first … all - 1, and those of this part.
struct Blocks {
    int first, all, begin, end;

    explicit Blocks(const Attention& a) {
        first = (a.window > 0 && a.position >= a.window ? a.position - a.window + 1 : 0) / KEYS;
        all = (a.position + a.rows - 1) / KEYS + 1;
        begin = first + int(int64_t(all - first) * a.part / a.parts);
        end = first + int(int64_t(all - first) * (a.part + 1) / a.parts);
    }
};

// Asks for where the keys and values of somebody's own rows will be kept.
inline void ask_own(const Attention& a) {
    const Pool& pool = *a.pool;
    const size_t bytes = size_t(pool.head_dim) * bytes_of(pool.kind);
    for (int position = a.position; position < a.position + a.rows; position++)
        for (int which = 0; which < 2; which++) {
            const uint8_t* head = pool.head(a.table[position / pool.tokens], a.layer, which, a.kv_head);
            ask_for_bytes(head + size_t(position % pool.tokens) * bytes, bytes);
        }
}
// The same, and for the first that they attend to: pages lie anywhere, which no prefetcher of the processor can guess.
template <Kind kind>
void ask_first(const Attention& a) {
    ask_own(a);
    for (int which = 0; which < 2; which++) {
        Places places;
        places.find(a, Blocks(a).begin, which);
        places.ask_from<kind>(0, 0, a.pool->head_dim);
    }
}
void ask_for(const Attention& a) {
    switch (a.pool->kind) {
        case Kind::bf16: return ask_first<Kind::bf16>(a);
        case Kind::fp16: return ask_first<Kind::fp16>(a);
        case Kind::fp8: return ask_first<Kind::fp8>(a);
        default: return ask_first<Kind::fp32>(a);
    }
}

// What the queries have of one block, where it is kept.
struct Kept {
    float* values;  // [queries][wide]
    Share* shares;  // [queries]

    Kept(const Attention& a, int block, int wide) {
        const size_t queries = size_t(a.rows) * a.group;
        values = a.kept + size_t(block) * queries * (size_t(wide) + 2);
        shares = reinterpret_cast<Share*>(values + queries * wide);
    }
};

// What the queries have of all blocks: out [queries][size].
inline void finish(const AttentionBench& bench, int queries, int size, float* out) {
    const int wide = int(padded(size_t(size)));
    for (int q = 0; q < queries; q++) {
        const float* from = bench.values + size_t(q) * wide;
        float* place = out + size_t(q) * size;
        const Lanes weight = all(bench.running[q].weight);
        int d = 0;
        for (; d + LANES <= size; d += LANES) store(place + d, div(load(from + d), weight));
        for (; d < size; d++) place[d] = from[d] / bench.running[q].weight;
    }
}

void attend_rows(const Attention& a, float* memory, float* out) {
    const Pool& pool = *a.pool;
    const int size = pool.head_dim, wide = int(padded(size_t(size)));
    const int queries = a.rows * a.group;
    const bool many = queries >= MANY_QUERIES || !few_for(pool, 1).score;
    const AttentionBench bench(memory, queries, wide);
    bench.clear(queries, wide);
    // Queries of one tile are scored, weighted and joined together.
    const Tiles score_tiles(queries, many ? SCORE_ROWS : FEW_QUERIES), tiles(queries, many ? TILE : FEW_QUERIES);
    for (int t = 0; t < score_tiles.count; t++) {
        const int start = score_tiles.start(t), rows = score_tiles.size(t);
        float* turned = bench.turned + size_t(start) * wide;
        for (int i = 0; i < rows; i++) {
            const int q = start + i;
            float* row = (many ? bench.made : turned) + size_t(i) * wide;
            copy_numbers(row, a.queries + size_t(q / a.group) * a.stride + size_t(q % a.group) * size, size);
            for (int d = size; d < wide; d++) row[d] = 0.0f;
        }
        if (many) spread_as<Store::plain>(bench.made, size_t(wide), wide, 0, turned, rows);
    }
    const Blocks blocks(a);
    struct {
        Places keys, values;
        void find(const Attention& of, int block) {
            keys.find(of, block, 0);
            values.find(of, block, 1);
        }
    } places[2];  // of this block and of the one that is read then, in turns
    Places nothing;
    nothing.count = 0;
    places[0].find(a, blocks.begin);
    int now = 0;
    if (a.next && !many) ask_own(*a.next);
    for (int block = blocks.begin; block < blocks.end; block++, now = 1 - now) {
        const auto& here = places[now];
        auto& then = places[1 - now];
        const int begin = block * KEYS, count = here.keys.count;
        if (block + 1 < blocks.end)
            then.find(a, block + 1);
        else if (a.next)
            then.find(*a.next, Blocks(*a.next).begin);
        else
            then.keys.count = then.values.count = 0;
        if (many) {
            copy_block(pool, here.keys, then.keys, wide, bench.copied);
            turn_keys(bench.copied, count, wide, bench.columns);
            copy_block(pool, here.values, then.values, wide, bench.copied);
        }
        // The positions of the block that any of the queries before `end` sees.
        const auto seen_before = [&](int end) {
            const int high = a.position + (end - 1) / a.group + 1 - begin;
            return high < count ? high : count;
        };
        for (int t = 0; t < score_tiles.count; t++) {
            const int start = score_tiles.start(t), rows = score_tiles.size(t);
            const float* turned = bench.turned + size_t(start) * wide;
            float* scores = bench.scores + size_t(start) * KEYS;
            if (many)
                columns_of(rows, std::make_integer_sequence<int, SCORE_ROWS>())(turned, bench.columns, wide,
                                                                                seen_before(start + rows), scores);
            else
                few_for(pool, rows).score(here.keys, t ? nothing : then.keys, turned, scores);
        }
        const bool all_seen = a.window == 0 && begin + KEYS <= a.position + 1;
        for (int t = 0; t < tiles.count; t++) {
            const int start = tiles.start(t), rows = tiles.size(t);
            float* scores = bench.scores + size_t(start) * KEYS;
            Share own[LANES], *fresh = own;
            float* made = bench.made;
            if (a.kept) {
                const Kept kept(a, block - blocks.first, wide);
                fresh = kept.shares + start;
                made = kept.values + size_t(start) * wide;
            }
            const auto seen = [&](int i) { return seen_of(a, a.position + (start + i) / a.group, begin); };
            for (int i = 0; i < rows && !all_seen; i++) leave_out(scores + size_t(i) * KEYS, seen(i));
            weigh(scores, rows, fresh);
            for (int i = 0; i < rows && !all_seen; i++)
                if (seen(i).none()) {
                    fresh[i] = {as_float(0xff800000), 0.0f};
                    for (int j = 0; j < KEYS; j += LANES) store(scores + size_t(i) * KEYS + j, zero());
                }
            // Values before the first query's window may be of somebody else by now: not even their zero share is taken.
            const int low = a.window > 0 ? a.position + start / a.group - a.window + 1 - begin : 0;
            const int from = low > 0 ? (low < count ? low : count) : 0, high = seen_before(start + rows);
            if (many) {
                for (int i = 0; i < rows * wide; i += LANES) store(made + i, zero());
                int d = 0;
                for (; d + LANES * PANEL <= wide; d += LANES * PANEL)
                    values_panel<PANEL>(rows, std::make_integer_sequence<int, TILE>())(
                        bench.copied + size_t(from) * wide + d, wide, high - from, scores + from, nullptr, 1.0f, made + d, wide);
                for (; d < wide; d += LANES)
                    values_panel<1>(rows, std::make_integer_sequence<int, TILE>())(
                        bench.copied + size_t(from) * wide + d, wide, high - from, scores + from, nullptr, 1.0f, made + d, wide);
            } else {
                few_for(pool, rows).weigh(here.values, t ? nothing : then.values, from, scores, made);
            }
            if (!a.kept) join(rows, fresh, made, bench.running + start, bench.values + size_t(start) * wide, wide);
        }
    }
    if (!a.kept) finish(bench, queries, size, out);
}

// What the parts have, joined as if there were none.
void join_rows(const Attention& a, float* memory, float* out) {
    const int size = a.pool->head_dim, wide = int(padded(size_t(size))), queries = a.rows * a.group;
    const AttentionBench bench(memory, queries, wide);
    bench.clear(queries, wide);
    const Blocks blocks(a);
    for (int block = 0; block < blocks.all - blocks.first; block++) {
        const Kept kept(a, block, wide);
        for (int start = 0; start < queries; start += LANES) {
            const int rows = queries - start < LANES ? queries - start : LANES;
            const size_t at = size_t(start) * wide;
            join(rows, kept.shares + start, kept.values + at, bench.running + start, bench.values + at, wide);
        }
    }
    finish(bench, queries, size, out);
}

}  // namespace
