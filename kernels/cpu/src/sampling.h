// From a row of logits to a token, by the rule of engine.sampling, in float64. exp and log are written out, so that every
// machine has the same bits; sums are taken in eight chains by id, joined as a tree.
#pragma once

namespace {

constexpr double NOISE_LOW = -3.6237165, NOISE_HIGH = 36.7368006;  // bounds of the Gumbel noise
constexpr double NOISE_RANGE = NOISE_HIGH - NOISE_LOW + 1e-3;

inline double as_double(uint64_t bits) {
    double x;
    std::memcpy(&x, &bits, 8);
    return x;
}
inline uint64_t double_bits(double x) {
    uint64_t bits;
    std::memcpy(&bits, &x, 8);
    return bits;
}

// e to the x for x <= 0: x = n ln 2 + r, Taylor to degree 13. 0 below -708.
inline double exponential(double x) {
    const double held = x > -708.0 ? x : -708.0;
    const double n = __builtin_rint(held * 1.4426950408889634);
    double r = __builtin_fma(n, -6.93147180369123816490e-01, held);
    r = __builtin_fma(n, -1.90821492927058770002e-10, r);
    double p = 1.0 / 6227020800;
    p = __builtin_fma(p, r, 1.0 / 479001600);
    p = __builtin_fma(p, r, 1.0 / 39916800);
    p = __builtin_fma(p, r, 1.0 / 3628800);
    p = __builtin_fma(p, r, 1.0 / 362880);
    p = __builtin_fma(p, r, 1.0 / 40320);
    p = __builtin_fma(p, r, 1.0 / 5040);
    p = __builtin_fma(p, r, 1.0 / 720);
    p = __builtin_fma(p, r, 1.0 / 120);
    p = __builtin_fma(p, r, 1.0 / 24);
    p = __builtin_fma(p, r, 1.0 / 6);
    p = __builtin_fma(p, r, 0.5);
    p = __builtin_fma(p, r, 1.0);
    p = __builtin_fma(p, r, 1.0);
    // n is at least -1022: added to the exponent it cannot leave the normal numbers. Beside 1.5 * 2^52 an integer stands in
    // the lowest bits: vectors of AVX2 have no other way to it.
    const double scaled = p * as_double(double_bits(n + (0x1.8p52 + 1023.0)) << 52);
    return x > -708.0 ? scaled : 0.0;
}

// Natural logarithm of a normal positive number: x = m 2^e with m from sqrt(1/2) to sqrt(2), and
// log m = 2 artanh((m - 1) / (m + 1)).
inline double logarithm(double x) {
    uint64_t bits = double_bits(x);
    int64_t e = int64_t(bits >> 52) - 1023;
    bits = (bits & 0x000fffffffffffffu) | 0x3ff0000000000000u;
    double m = as_double(bits);
    if (m > 1.4142135623730951) {
        m *= 0.5;
        e++;
    }
    const double s = (m - 1.0) / (m + 1.0), z = s * s;
    double p = 1.0 / 23;
    p = __builtin_fma(p, z, 1.0 / 21);
    p = __builtin_fma(p, z, 1.0 / 19);
    p = __builtin_fma(p, z, 1.0 / 17);
    p = __builtin_fma(p, z, 1.0 / 15);
    p = __builtin_fma(p, z, 1.0 / 13);
    p = __builtin_fma(p, z, 1.0 / 11);
    p = __builtin_fma(p, z, 1.0 / 9);
    p = __builtin_fma(p, z, 1.0 / 7);
    p = __builtin_fma(p, z, 1.0 / 5);
    p = __builtin_fma(p, z, 1.0 / 3);
    const double log_m = 2.0 * __builtin_fma(s * z, p, s);
    return __builtin_fma(double(e), 6.93147180369123816490e-01, __builtin_fma(double(e), 1.90821492927058770002e-10, log_m));
}

// First word of Philox4x64-10: key (seed, choice), counter (position, id, 0, 0).
inline uint64_t philox(uint64_t seed, uint64_t choice, uint64_t position, uint64_t id) {
    uint64_t c0 = position, c1 = id, c2 = 0, c3 = 0, k0 = seed, k1 = choice;
    for (int round = 0; round < 10; round++) {
        const unsigned __int128 a = (unsigned __int128)0xD2E7470EE14C6C93u * c0;
        const unsigned __int128 b = (unsigned __int128)0xCA5A826395121157u * c2;
        c0 = uint64_t(b >> 64) ^ c1 ^ k0;
        c2 = uint64_t(a >> 64) ^ c3 ^ k1;
        c1 = uint64_t(b);
        c3 = uint64_t(a);
        k0 += 0x9E3779B97F4A7C15u;
        k1 += 0xBB67AE8584CAA73Bu;
    }
    return c0;
}

inline double gumbel(uint64_t word) {
    double u = (double(word >> 11) + 0.5) * 0x1p-53;
    const double largest = 1.0 - 0x1p-53;
    u = u < largest ? u : largest;
    return -logarithm(-logarithm(u));
}

// Whether the noise of this word may reach `gap`, decided without logarithms: -log u <= e^-gap is needed, and
// 1 - u <= -log u, so 1 - u must be at most e^-gap; its leading zeros bound it from below.
inline bool may_reach(uint64_t word, double gap) {
    const uint64_t rest = ~word >> 11;
    const int zeros = rest ? __builtin_clzll(rest) - 11 : 53;
    return gap <= 0.0 || (zeros + 1) * 0.6931471805599454 + 1e-9 >= gap;
}

inline bool is_allowed(const uint32_t* mask, int id) { return mask[id >> 5] >> (id & 31) & 1; }

inline bool all_finite(const float* x, int n) {
    Lanes worst = zero();
    int i = 0;
    for (; i + LANES <= n; i += LANES) {
        const Lanes v = load(x + i);
        worst = add(worst, mul(v, zero()));  // 0, or NaN for what is not finite
    }
    float rest = sum(worst);
    for (; i < n; i++) rest += x[i] * 0.0f;
    return rest == 0.0f;
}

// The least id of the greatest logits.
inline int greatest(const float* x, int n) {
    Lanes most = all(as_float(0xff800000));
    int i = 0;
    for (; i + LANES <= n; i += LANES) most = greater(load(x + i), most);
    float top = maximum(most);
    for (; i < n; i++) top = x[i] > top ? x[i] : top;
    for (i = 0; i < n; i++)
        if (x[i] == top) return i;
    return -1;
}

// The sum of e^((value - most) / over) of n ids (0 … n - 1, or those in `among`) in their order, in eight chains joined as a
// tree.
inline double weight_of(const double* values, const int32_t* among, int n, double most, double over) {
    double chains[8] = {0, 0, 0, 0, 0, 0, 0, 0};
    int i = 0;
    if (!among)
        for (; i + 8 <= n; i += 8)
            for (int c = 0; c < 8; c++) chains[c] += exponential((values[i + c] - most) / over);
    for (; i < n; i++) chains[i % 8] += exponential((values[among ? among[i] : i] - most) / over);
    return ((chains[0] + chains[4]) + (chains[2] + chains[6])) + ((chains[1] + chains[5]) + (chains[3] + chains[7]));
}

// A heap of ids. Of two ids that with the lesser value is less likely, among equals that with the greater id; the root is the
// least likely of all, or, with `BEST`, the likeliest.
template <bool BEST>
struct Heap {
    const double* values;
    int32_t* ids;
    int count, most;

    bool less_likely(int32_t a, int32_t b) const { return values[a] < values[b] || (values[a] == values[b] && a > b); }
    bool above(int32_t a, int32_t b) const { return BEST ? less_likely(b, a) : less_likely(a, b); }
    void sink(int at, int end) {
        for (int child; (child = 2 * at + 1) < end; at = child) {
            if (child + 1 < end && above(ids[child + 1], ids[child])) child++;
            if (!above(ids[child], ids[at])) return;
            const int32_t other = ids[at];
            ids[at] = ids[child];
            ids[child] = other;
        }
    }
    void build() {
        for (int at = count / 2; at-- > 0;) sink(at, count);
    }
    int32_t take() {
        const int32_t root = ids[0];
        ids[0] = ids[--count];
        sink(0, count);
        return root;
    }
    void offer(int32_t id) {
        if (count < most) {
            int at = count++;
            ids[at] = id;
            for (int parent; at > 0 && above(ids[at], ids[parent = (at - 1) / 2]); at = parent) {
                const int32_t other = ids[at];
                ids[at] = ids[parent];
                ids[parent] = other;
            }
        } else if (above(ids[0], id)) {
            ids[0] = id;
            sink(0, count);
        }
    }
    // The root last.
    void sort() {
        for (int end = count - 1; end > 0; end--) {
            const int32_t other = ids[0];
            ids[0] = ids[end];
            ids[end] = other;
            sink(0, end);
        }
    }
};

// The `most` likeliest of `n` ids (0 … n - 1, or those in `among`), the likeliest first; how many there are.
inline int find_likeliest(const double* values, const int32_t* among, int n, int most, int32_t* ids) {
    Heap<false> heap{values, ids, 0, most < n ? most : n};
    for (int i = 0; i < n; i++) {
        const int32_t id = among ? among[i] : i;
        if (heap.count < heap.most || values[id] >= values[heap.ids[0]]) heap.offer(id);
    }
    heap.sort();
    return heap.count;
}

void tell_logprobs(const float* logits, int vocab, const Sampling& s, int token, double* scratch) {
    double* values = scratch;
    int32_t* ids = reinterpret_cast<int32_t*>(scratch + vocab);
    double most = logits[0];
    for (int i = 0; i < vocab; i++) {
        values[i] = logits[i];
        most = values[i] > most ? values[i] : most;
    }
    const double total = logarithm(weight_of(values, nullptr, vocab, most, 1.0));
    s.top_logprobs[0] = (values[token] - most) - total;
    const int count = s.logprobs > 0 ? find_likeliest(values, nullptr, vocab, int(s.logprobs), ids) : 0;
    for (int i = 0; i < count; i++) {
        s.top_ids[i] = ids[i];
        s.top_logprobs[1 + i] = (values[ids[i]] - most) - total;
    }
}

// The logits after biases and penalties; `counts` has room for `vocab` integers.
inline void adjust(const float* logits, int vocab, const Sampling& s, double* values, int32_t* counts) {
    for (int i = 0; i < vocab; i++) values[i] = logits[i];
    for (int64_t i = 0; i < s.bias_count; i++) values[s.bias_ids[i]] += s.biases[i];
    if (!s.log) return;
    const int64_t length = int64_t(s.position);
    std::memset(counts, 0, size_t(vocab) * sizeof *counts);
    if (s.repetition != 1.0) {
        for (int64_t i = 0; i < length; i++) {
            if (counts[s.log[i]]++) continue;
            double& value = values[s.log[i]];
            value = value > 0 ? value / s.repetition : value * s.repetition;
        }
        std::memset(counts, 0, size_t(vocab) * sizeof *counts);
    }
    if (s.presence != 0.0 || s.frequency != 0.0) {
        for (int64_t i = s.prompt_length; i < length; i++) counts[s.log[i]]++;
        for (int i = 0; i < vocab; i++)
            if (counts[i]) values[i] -= s.frequency * counts[i] + s.presence;
    }
}

int choose(const float* logits, int vocab, const Sampling& s, double* scratch) {
    const bool adjusted = s.bias_count > 0 || s.log;
    if (s.temperature == 0.0 && !adjusted && !s.mask) return greatest(logits, vocab);
    double* values = scratch;
    int32_t* ids = reinterpret_cast<int32_t*>(scratch + vocab);
    int32_t* kept = ids + vocab;
    if (adjusted)
        adjust(logits, vocab, s, values, ids);
    else
        for (int i = 0; i < vocab; i++) values[i] = logits[i];
    // What mask and filters leave stands in kept[0 … count - 1]; all of it, ids themselves, while `everything`.
    const bool everything = !s.mask;
    int count = 0;
    if (everything)
        count = vocab;
    else
        for (int i = 0; i < vocab; i++)
            if (is_allowed(s.mask, i)) kept[count++] = i;
    if (!count) return -1;
    const int32_t* among = everything ? nullptr : kept;
    int best = among ? among[0] : 0;
    for (int i = 0; i < count; i++) {
        const int id = among ? among[i] : i;
        if (values[id] > values[best]) best = id;
    }
    if (s.temperature == 0.0) return best;
    const double most = values[best], over = s.temperature;
    bool sorted = false;
    if (s.top_k > 0 && s.top_k < count) {
        count = find_likeliest(values, among, count, int(s.top_k), ids);
        std::memcpy(kept, ids, size_t(count) * sizeof *kept);
        among = kept;
        sorted = true;
    }
    if (s.top_p < 1.0) {
        const double total = weight_of(values, among, count, most, over);
        const double goal = s.top_p * total;
        // All that are less likely than this have together half of what may be missing, where that is more than rounding may
        // be: the nucleus does not come to them.
        const double missing = 1.0 - s.top_p;
        const double least = missing > 1e-6 ? logarithm(0.5 * missing * total / count) : double(as_float(0xff800000));
        int some = 0;
        for (int i = 0; i < count; i++) {
            const int id = among ? among[i] : i;
            ids[some] = id;
            some += !((values[id] - most) / over < least);
        }
        Heap<true> rest{values, ids, some, some};
        if (!sorted) rest.build();
        double sum = 0.0;
        count = 0;
        for (int i = 0; i < some; i++) {
            const int32_t id = sorted ? ids[i] : rest.take();
            const double weight = exponential((values[id] - most) / over);
            sum += weight;
            if (!(sum - weight < goal)) break;
            kept[count++] = id;
        }
        among = kept;
    }
    // Far below min_p, which is near enough to its logarithm to be told without an exponential.
    const double least = s.min_p > 0.0 ? logarithm(s.min_p) - 1e-9 : -NOISE_RANGE;
    int token = -1;
    double top = 0.0;
    for (int i = 0; i < count; i++) {
        const int id = among ? among[i] : i;
        const double score = (values[id] - most) / over;
        if (!(score >= -NOISE_RANGE) || score < least || (token >= 0 && top - score > NOISE_HIGH + 1e-3)) continue;
        if (s.min_p > 0.0 && exponential(score) < s.min_p) continue;
        const uint64_t word = philox(s.seed, s.choice, s.position, uint64_t(id));
        if (token >= 0 && !may_reach(word, top - score)) continue;
        const double value = score + gumbel(word);
        if (token < 0 || value > top || (value == top && id < token)) {
            token = id;
            top = value;
        }
    }
    return token;
}

int sample_row(const float* logits, int vocab, const Sampling& s, double* scratch) {
    if (!all_finite(logits, vocab)) return -1;
    const int token = choose(logits, vocab, s, scratch);
    if (s.logprobs >= 0 && token >= 0) tell_logprobs(logits, vocab, s, token, scratch);
    return token;
}

}  // namespace
