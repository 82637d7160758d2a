#include "model.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <utility>

const char* const phase_names[PHASES] = {"embed", "norm", "qkv", "attention", "output", "ffn", "head", "sample"};

namespace {

// Up to so many rows a step waits for memory: every thread reads weights that lie one behind the other.
constexpr int STREAMED_ROWS = 6;
// Items of attention for each thread from which on it hardly matters who has one more.
constexpr int EVEN_ITEMS = 4;
// Blocks of a part of an item at least, and what the parts of all items may take until they are joined.
constexpr int PART_BLOCKS = 4;
constexpr size_t PART_FLOATS = size_t(16) << 20;
// Bytes of the next weights that a thread asks for before it waits for the others, each time it looks whether they have
// come, and in all: they must not drive out of its cache what it asked for first.
constexpr size_t ASKED_FIRST = 4096, ASKED_BYTES = 256, ASKED_MOST = size_t(192) << 10;

double now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

template <typename Counter, typename Work>
void share(Counter& counter, int count, Work work) {
    for (int i; (i = counter.next.fetch_add(1, std::memory_order_relaxed)) < count;) work(i);
}

// The first of some units, strips or halves of them, that a thread has when they are dealt out evenly.
int first_of(int units, int number, int threads) { return int(int64_t(units) * number / threads); }

void grow(std::vector<float>& buffer, size_t size) {
    if (buffer.size() < size + LANES) buffer.resize(size + LANES);
}

}  // namespace

Model::Model(const Variant& variant, const Shape& shape, const Pool& pool, int threads, const std::vector<int>& cores)
    : layers(shape.layers), variant(variant), shape(shape), pool(pool), team_(threads, cores), benches_(threads),
      wide_(padded(shape.hidden)) {
    counter_count_ = shape.layers * 2 + 1;
    counters_.reset(new Counter[counter_count_]);
    share_count_ = (shape.layers * 4 + 1) * threads;
    shares_.reset(new Share[share_count_]);
    done_.reset(new Counter[threads]);
    const int group = shape.heads / shape.kv_heads;
    for (Bench& bench : benches_) {
        bench.scratch.resize(scratch_floats());
        bench.attention.resize(attention_floats(shape.head_dim, group));
        bench.attended.resize(size_t(attention_rows(group)) * group * shape.head_dim + LANES);
        const size_t widest = std::max(wide_, padded(size_t(shape.heads) * shape.head_dim));
        bench.tile.resize(variant.tile * widest + LANES);
        bench.rows.resize(variant.tile * wide_ + 2 * LANES);
        bench.sampling.resize(sampling_doubles(shape.vocab));
    }
}

// Calls work(strip, part) for this thread's share of some strips, of few rows to the half strip (or, with `whole`, to the
// strip). Of more rows it then helps others with theirs, from the end: a thread that was held up has less to do. Shares are
// the same each time, so that most of what a thread reads and writes in a phase is what it had in the one before.
template <typename Work>
void Model::each_strip(Share* shares, int strips, int rows, bool whole, int number, Work work) {
    const int threads = team_.threads();
    if (rows > STREAMED_ROWS) {
        const int units = whole ? strips : 2 * strips;
        for (int i = 0; i < threads; i++) {
            const int whose = (number + i) % threads;
            const int first = first_of(units, whose, threads), end = first_of(units, whose + 1, threads);
            for (;;) {
                const uint64_t taken = shares[whose].taken.fetch_add(i ? uint64_t(1) << 32 : 1, std::memory_order_relaxed);
                const int front = int(uint32_t(taken)), back = int(taken >> 32);
                if (front + back >= end - first) break;
                const int unit = i ? end - 1 - back : first + front;
                if (whole)
                    work(unit, Part{});
                else
                    work(unit / 2, Part{2 * (unit % 2), 2 * (unit % 2) + 2});
            }
        }
        return;
    }
    int half = first_of(2 * strips, number, threads);
    const int end = first_of(2 * strips, number + 1, threads);
    if (whole) {
        for (int s = (half + 1) / 2; s < (end + 1) / 2; s++) work(s, Part{});
        return;
    }
    if (half % 2 && half < end) work(half++ / 2, Part{2, 4});
    for (; half + 1 < end; half += 2) work(half / 2, Part{});
    if (half < end) work(half / 2, Part{0, 2});
}

// Waits for the other threads. Of few rows it asks meanwhile for this thread's share of the matrix that is read then: memory
// would do nothing.
void Model::meet(const Matrix& next, int rows, int number) {
    const int threads = team_.threads(), half = first_of(2 * next.strips(), number, threads);
    const int end = first_of(2 * next.strips(), number + 1, threads);
    if (rows > STREAMED_ROWS || half == end) return team_.barrier();
    const uint8_t* at = next.strip(half / 2);
    size_t left = std::min(ASKED_MOST, next.strip_bytes() / 2 * size_t(end - half));
    const auto ask = [&](size_t most) {
        const size_t bytes = std::min(most, left);
        variant.fetch(at, bytes);
        at += bytes;
        left -= bytes;
    };
    ask(ASKED_FIRST);
    team_.barrier([&] { left ? ask(ASKED_BYTES) : relax(); });
}

void Model::prepare(const StepInput& input) {
    const size_t rows = size_t(std::max(capacity_, input.rows));
    if (input.rows > capacity_) {
        // zeros stay behind each row's numbers: norms and sums go over whole vectors
        x_.assign(rows * wide_ + LANES, 0.0f);
        grow(normed_, rows * wide_);
        grow(projected_, rows * size_t(shape.heads + 2 * shape.kv_heads) * shape.head_dim);
        grow(mixed_, rows * size_t(shape.heads) * shape.head_dim);
        grow(tiled_, rows * size_t(shape.heads) * shape.head_dim);
        grow(gated_, rows * size_t(shape.ffn));
        for (Bench& bench : benches_) {
            grow(bench.outs, rows * STRIP);
            grow(bench.ups, rows * STRIP);
        }
        capacity_ = int(rows);
    }
    if (!input.logits) grow(logits_, input.wanted.size() * size_t(shape.vocab));
    for (int i = 0; i < counter_count_; i++) counters_[i].next.store(0, std::memory_order_relaxed);
    if (input.rows > STREAMED_ROWS)
        for (int i = 0; i < share_count_; i++) shares_[i].taken.store(0, std::memory_order_relaxed);
    items_.clear();
    turns_.clear();
    const int most = attention_rows(shape.heads / shape.kv_heads);
    for (int s = int(input.spans.size()) - 1; s >= 0; s--) {
        const Tiles tiles(input.spans[s].count, most);
        // the dearest first: late rows see the most keys
        for (int t = tiles.count - 1; t >= 0; t--)
            for (int head = 0; head < shape.kv_heads; head++) {
                const Item item{s, head, tiles.start(t), tiles.size(t)};
                items_.push_back(item);
                if (tiles.count > 1) turns_.push_back(item);
            }
    }
    cut_items(input);
}

// Cuts the last of few items into parts, blocks of keys that threads attend to at once, where else some would have nothing to
// do: what is left of an even share. Their rows are turned before.
void Model::cut_items(const StepInput& input) {
    const int threads = team_.threads(), items = int(items_.size()), left = items % threads;
    if (!left || items >= EVEN_ITEMS * threads) return;
    const int parts = std::max(2, threads / left);
    int number = 0;
    size_t floats = 0;
    std::vector<Item> cut;
    for (int i = items - left; i < items; i++) {
        const Item whole = items_[i];
        const int last = input.spans[whole.span].position + whole.first + whole.rows - 1, blocks = last / KEYS + 1;
        const size_t needed = part_floats(shape.head_dim, whole.rows * shape.heads / shape.kv_heads, blocks);
        if (blocks < parts * PART_BLOCKS || floats + needed > PART_FLOATS) {
            cut.push_back(whole);
            continue;
        }
        for (int part = 0; part < parts; part++)
            cut.push_back({whole.span, whole.kv_head, whole.first, whole.rows, part, parts, number, floats});
        if (input.spans[whole.span].count == whole.rows) turns_.push_back(whole);
        number++;
        floats += needed;
    }
    items_.resize(size_t(items - left));
    items_.insert(items_.end(), cut.begin(), cut.end());
    grow(parts_, floats);
    for (int i = 0; i < number; i++) done_[i].next.store(0, std::memory_order_relaxed);
}

void Model::step(const StepInput& input) {
    if (!input.rows) return;
    prepare(input);
    lap_ = now();
    team_.run([&](int number) { work(input, number); });
    lap(0, SAMPLE);
}

void Model::lap(int number, Phase phase) {
    if (number) return;
    const double time = now();
    seconds_[phase] += time - lap_;
    lap_ = time;
}

// How the inputs of these matrices are kept: rounded only when all of them have fp8 weights.
Store Model::store_for(std::initializer_list<const Matrix*> matrices) const {
    for (const Matrix* m : matrices)
        if (!rounds || m->kind != Kind::fp8) return Store::plain;
    return variant.rounded_store;
}

void Model::strip(const Matrix& m, int s, Part part, const float* x, const Tiles& tiles, Store how, Bench& bench,
                  float* out) const {
    (how == Store::plain ? variant.strip : variant.rounded_strip)(m, s, part, x, tiles, bench.scratch.data(), out);
}

// Where a thread puts its share of what is laid in tiles: one tile whole into its own bench, which costs less than to wait
// for each other; some columns of few tiles, and some of many tiles, into `shared`, for all threads.
Model::Laid Model::laid_by(const Tiles& tiles, int width, std::vector<float>& shared, int number) {
    if (tiles.count == 1) return {0, 1, 0, width, benches_[number].tile.data()};
    const int threads = team_.threads();
    if (tiles.count >= 2 * threads)
        return {tiles.count * number / threads, tiles.count * (number + 1) / threads, 0, width, shared.data()};
    const int chunk = 2 * LANES, chunks = (width + chunk - 1) / chunk;
    return {0, tiles.count, std::min(chunks * number / threads * chunk, width),
            std::min(chunks * (number + 1) / threads * chunk, width), shared.data()};
}

// Rows of x_ after a norm, in tiles.
const float* Model::normed(const float* weight, const Tiles& tiles, Store how, int number) {
    const Laid laid = laid_by(tiles, shape.hidden, normed_, number);
    const int count = laid.end - laid.begin;
    float* part = benches_[number].rows.data();
    if (count > 0)
        for (int t = laid.first; t < laid.last; t++) {
            const int start = tiles.start(t), size = tiles.size(t);
            for (int r = 0; r < size; r++) {
                const float* x = &x_[(start + r) * wide_];
                const float factor = variant.inverse_rms(x, shape.epsilon, shape.hidden);
                variant.scale(x + laid.begin, weight + laid.begin, factor, count, part + size_t(r) * count);
            }
            variant.spread(part, size_t(count), count, laid.begin, laid.out + tiles.place(t, shape.hidden, how), size, how);
        }
    if (tiles.count > 1) team_.barrier();
    return laid.out;
}

// Rows of `width` numbers in tiles.
const float* Model::tiled(const std::vector<float>& rows, int width, const Tiles& tiles, Store how, int number) {
    const Laid laid = laid_by(tiles, width, tiled_, number);
    if (laid.begin < laid.end)
        for (int t = laid.first; t < laid.last; t++)
            variant.spread(&rows[size_t(tiles.start(t)) * width + laid.begin], size_t(width), laid.end - laid.begin,
                           laid.begin, laid.out + tiles.place(t, width, how), tiles.size(t), how);
    if (tiles.count > 1) team_.barrier();
    return laid.out;
}

void Model::work(const StepInput& input, int number) {
    Bench& bench = benches_[number];
    const int size = shape.head_dim, wanted = int(input.wanted.size());
    int rows = input.rows;
    Tiles tiles(rows, variant.tile);
    const size_t row_size = size_t(shape.heads + 2 * shape.kv_heads) * size;
    Counter* counter = counters_.get();
    Share* shares = shares_.get();
    const auto next_shares = [&] { return std::exchange(shares, shares + team_.threads()); };

    for (int r = number; r < rows; r += team_.threads()) variant.embed(embedding, input.tokens[r], &x_[r * wide_]);
    meet(layers[0].q, rows, number);
    lap(number, EMBED);

    // Adds the product of a matrix with `from` to the residual stream.
    const auto add_product = [&](const Matrix& m, const float* from, const Matrix& next) {
        each_strip(next_shares(), m.strips(), rows, false, number, [&](int s, Part part) {
            strip(m, s, part, from, tiles, store_for({&m}), bench, bench.outs.data());
            const int first = LANES * part.first, count = std::min(LANES * part.end, m.outputs - s * STRIP) - first;
            for (int r = 0; r < rows && count > 0; r++)
                variant.add(&x_[r * wide_ + s * STRIP + first], &bench.outs[size_t(r) * STRIP + first], count);
        });
        meet(next, rows, number);
    };

    for (int index = 0; index < shape.layers; index++) {
        const Layer& layer = layers[index];
        Store how = store_for({&layer.q, &layer.k, &layer.v});
        const float* h = normed(layer.attention_norm, tiles, how, number);
        lap(number, NORM);

        // What this thread attends to first it asks for now: memory is free while products are computed.
        Counter& turning = *counter++;
        Counter& attending = *counter++;
        const int items = int(items_.size());
        Run run = claim(attending, items);
        if (run.next < run.end) variant.ask(attention_of(input, items_[run.next], index));

        const Matrix* parts[3] = {&layer.q, &layer.k, &layer.v};
        const int q_strips = layer.q.strips(), k_strips = layer.k.strips();
        each_strip(next_shares(), q_strips + k_strips + layer.v.strips(), rows, false, number, [&](int s, Part part) {
            const int which = s < q_strips ? 0 : s < q_strips + k_strips ? 1 : 2;
            const Matrix& m = *parts[which];
            s -= which == 0 ? 0 : which == 1 ? q_strips : q_strips + k_strips;
            strip(m, s, part, h, tiles, how, bench, bench.outs.data());
            const size_t before = which == 0 ? 0 : size_t(shape.heads + (which - 1) * shape.kv_heads) * size;
            const int first = LANES * part.first, count = std::min(LANES * part.end, m.outputs - s * STRIP) - first;
            for (int r = 0; r < rows && count > 0; r++)
                variant.copy(&projected_[r * row_size + before + s * STRIP + first],
                             &bench.outs[size_t(r) * STRIP + first], count);
        });
        meet(layer.o, rows, number);
        lap(number, QKV);

        // Rows of one tile see keys of another: those are kept before anybody attends.
        if (!turns_.empty()) {
            share(turning, int(turns_.size()), [&](int i) { turn(input, turns_[i], index); });
            team_.barrier();
        }
        while (run.next < run.end) {
            const Item& item = items_[run.next++];
            if (run.next == run.end) run = claim(attending, items);
            if (input.spans[item.span].count == item.rows && item.parts == 1) turn(input, item, index);
            if (index + 1 == shape.layers && !is_wanted(input, item)) continue;
            attend(input, item, index, bench, run.next < run.end ? &items_[run.next] : nullptr);
        }
        meet(layer.o, rows, number);
        lap(number, ATTENTION);
        if (index + 1 == shape.layers && wanted < rows) {
            // Of the others nothing is read any more but their keys and values.
            if (!wanted) return;
            if (!number) only_wanted(input);
            rows = wanted;
            tiles = Tiles(rows, variant.tile);
            team_.barrier();
        }

        add_product(layer.o, tiled(mixed_, layer.o.inputs, tiles, store_for({&layer.o}), number), layer.gate);
        lap(number, OUTPUT);

        how = store_for({&layer.gate, &layer.up});
        h = normed(layer.ffn_norm, tiles, how, number);
        lap(number, NORM);
        each_strip(next_shares(), layer.gate.strips(), rows, rows <= STREAMED_ROWS, number, [&](int s, Part part) {
            strip(layer.gate, s, part, h, tiles, how, bench, bench.outs.data());
            strip(layer.up, s, part, h, tiles, how, bench, bench.ups.data());
            const int at = LANES * part.first, width = LANES * part.end - at, first = s * STRIP + at;
            const int count = std::min(width, shape.ffn - first);
            if (count <= 0) return;
            for (int r = 0; r < rows; r++) {
                float* gates = &bench.outs[size_t(r) * STRIP + at];
                variant.gate(gates, &bench.ups[size_t(r) * STRIP + at], gates, width);
            }
            const Store then = store_for({&layer.down});
            for (int t = 0; t < tiles.count; t++)
                variant.spread(&bench.outs[size_t(tiles.start(t)) * STRIP + at], STRIP, count, first,
                               &gated_[tiles.place(t, shape.ffn, then)], tiles.size(t), then);
        });
        meet(layer.down, rows, number);
        add_product(layer.down, gated_.data(), index + 1 < shape.layers ? layers[index + 1].q : head);
        lap(number, FFN);
    }

    const Store how = store_for({&head});
    const float* h = normed(final_norm, tiles, how, number);
    float* logits = input.logits ? input.logits : logits_.data();
    each_strip(next_shares(), head.strips(), wanted, true, number, [&](int s, Part) {
        strip(head, s, {}, h, tiles, how, bench, bench.outs.data());
        const int first = s * STRIP, count = std::min(STRIP, head.outputs - first);
        for (int r = 0; r < wanted; r++)
            variant.copy(&logits[size_t(r) * shape.vocab + first], &bench.outs[size_t(r) * STRIP], count);
    });
    team_.barrier();
    lap(number, HEAD);
    share(*counter++, wanted, [&](int i) {
        input.sampled[i] = variant.sample(&logits[size_t(i) * shape.vocab], shape.vocab, input.sampling[i],
                                          bench.sampling.data());
    });
}

// Whether a row of an item is sampled.
bool Model::is_wanted(const StepInput& input, const Item& item) {
    const int first = input.spans[item.span].first + item.first;
    const auto row = std::lower_bound(input.wanted.begin(), input.wanted.end(), first);
    return row != input.wanted.end() && *row < first + item.rows;
}

// The rows that are sampled come to the front of the residual stream and of what was attended to.
void Model::only_wanted(const StepInput& input) {
    const size_t width = size_t(shape.heads) * shape.head_dim;
    for (size_t i = 0; i < input.wanted.size(); i++) {
        const size_t from = size_t(input.wanted[i]);
        if (from == i) continue;
        variant.copy(&x_[i * wide_], &x_[from * wide_], int(wide_));
        variant.copy(&mixed_[i * width], &mixed_[from * width], int(width));
    }
}

// Rotates the queries and keys of an item's rows, and keeps keys and values in their pages.
void Model::turn(const StepInput& input, const Item& item, int layer) {
    const Span& span = input.spans[item.span];
    const int size = shape.head_dim, half = size / 2, group = shape.heads / shape.kv_heads;
    const size_t row_size = size_t(shape.heads + 2 * shape.kv_heads) * size;
    const float scale = 1.0f / std::sqrt(float(size));
    for (int r = item.first; r < item.first + item.rows; r++) {
        const int position = span.position + r;
        float* row = &projected_[(span.first + r) * row_size];
        const float* c = cos + size_t(position) * half;
        const float* s = sin + size_t(position) * half;
        for (int g = 0; g < group; g++)
            variant.rotate(row + size_t(item.kv_head * group + g) * size, c, s, half, scale);
        float* key = row + size_t(shape.heads + item.kv_head) * size;
        variant.rotate(key, c, s, half, 1.0f);
        const int64_t page = span.table[position / pool.tokens];
        const int slot = position % pool.tokens;
        variant.keep(pool, pool.head(page, layer, 0, item.kv_head), slot, key);
        variant.keep(pool, pool.head(page, layer, 1, item.kv_head), slot, key + size_t(shape.kv_heads) * size);
    }
}

// The next items of attention for a thread: all heads of some rows, whose numbers lie beside each other in their pages,
// unless there are too few for all threads.
Model::Run Model::claim(Counter& counter, int items) const {
    const int most = items >= 2 * team_.threads() * shape.kv_heads ? shape.kv_heads : 1;
    const int first = counter.next.fetch_add(most, std::memory_order_relaxed);
    return {first, std::min(first + most, items)};
}

Attention Model::attention_of(const StepInput& input, const Item& item, int layer) {
    const Span& span = input.spans[item.span];
    const int size = shape.head_dim, group = shape.heads / shape.kv_heads;
    Attention a{};
    a.pool = &pool;
    a.table = span.table;
    a.layer = layer;
    a.kv_head = item.kv_head;
    a.group = group;
    a.position = span.position + item.first;
    a.rows = item.rows;
    a.window = layers[layer].window;
    a.stride = size_t(shape.heads + 2 * shape.kv_heads) * size;
    a.queries = &projected_[(span.first + item.first) * a.stride + size_t(item.kv_head) * group * size];
    a.part = item.part;
    a.parts = item.parts;
    if (item.parts > 1) a.kept = &parts_[item.place];
    return a;
}

void Model::attend(const StepInput& input, const Item& item, int layer, Bench& bench, const Item* next) {
    Attention a = attention_of(input, item, layer), then;
    if (next) {
        then = attention_of(input, *next, layer);
        a.next = &then;
    }
    variant.attend(a, bench.attention.data(), bench.attended.data());
    if (item.parts > 1) {
        if ((done_[item.number].next.fetch_add(1, std::memory_order_acq_rel) + 1) % item.parts) return;
        variant.join(a, bench.attention.data(), bench.attended.data());  // the last one has all
    }
    const int count = a.group * shape.head_dim, first = input.spans[item.span].first + item.first;
    for (int r = 0; r < item.rows; r++)
        variant.copy(&mixed_[size_t(first + r) * shape.heads * shape.head_dim + size_t(item.kv_head) * count],
                     &bench.attended[size_t(r) * count], count);
}
