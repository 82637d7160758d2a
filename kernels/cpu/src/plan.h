// What the variants share with the rest: shapes, rows in tiles, and the table of functions of a variant.
#pragma once
#include <cstddef>
#include <cstdint>

#include "halves.h"

// Compiled into every variant and never merged by the linker: one built for AVX-512 must not be the one that all use.
#define OWN inline __attribute__((always_inline))

constexpr int STRIP = 64;     // outputs of a strip of packed weights
constexpr int BLOCK = 128;    // inputs that are summed up before they are multiplied by their scale
constexpr int KEYS = 64;      // positions of a block of attention, at absolute boundaries
constexpr int LANES = 16;     // what every reduction is cut into

// A packed matrix, as kernels/packed.py writes it. fp32: [strips][inputs][64]; smaller kinds in pairs of inputs, the second
// first, [strips][pairs][64][2]. Scales [strips][blocks]; null when the kind has none.
struct Matrix {
    const uint8_t* data = nullptr;
    const float* scales = nullptr;
    Kind kind = Kind::fp32;
    int outputs = 0, inputs = 0;

    OWN int strips() const { return (outputs + STRIP - 1) / STRIP; }
    OWN int blocks() const { return (inputs + BLOCK - 1) / BLOCK; }
    OWN size_t strip_bytes() const { return size_t(kind == Kind::fp32 ? inputs : inputs + inputs % 2) * STRIP * bytes_of(kind); }
    OWN const uint8_t* strip(int s) const { return data + s * strip_bytes(); }
    OWN size_t bytes() const { return strips() * strip_bytes(); }
};

// How the inputs of a product lie in a tile of `size` rows.
enum class Store {
    plain,    // number k of row r at [k][size] as float32
    rounded,  // the same after rounding to bf16
    folded,   // the same times FOLD
    pairs,    // bf16, k and its neighbour in one word: [k / 2][size][2], the odd k first
};
// The bits of an fp8 number, put where float32 has them, are 2^-120 times the number. Whoever multiplies by them as they are
// has the other factor larger, so that no product of what `rounded` leaves is rounded: all are multiples of 2^-136.
constexpr float FOLD = 0x1p60f;

// Vectors of 16 outputs of a strip: all four, or two of them, so that few strips are shared evenly by threads.
struct Part {
    int first = 0, end = 4;
};

// Rows cut into tiles of nearly equal size, one tile behind the other, so that the rows of one k are neighbours.
struct Tiles {
    int rows = 0, count = 0, least = 0, larger = 0;  // so many tiles, the first ones, have one row more

    OWN Tiles(int rows, int most) : rows(rows), count((rows + most - 1) / most) {
        if (!rows) return;
        least = rows / count;
        larger = rows - least * count;
    }
    OWN int start(int t) const { return t * least + (t < larger ? t : larger); }
    OWN int size(int t) const { return least + (t < larger); }
    // Where tile t of a buffer of rows of `width` numbers begins, in float32.
    OWN size_t place(int t, int width, Store how) const {
        return size_t(start(t)) * (how == Store::pairs ? (width + 1) / 2 : width);
    }
};

// A pool of KV pages: [pages][layers][2][kv_heads]{[tokens][head_dim] numbers, fp8: then [tokens] fp32 scales}.
struct Pool {
    uint8_t* data = nullptr;
    Kind kind = Kind::fp32;
    int tokens = 0, layers = 0, kv_heads = 0, head_dim = 0;

    OWN size_t head_bytes() const {
        return size_t(tokens) * (size_t(head_dim) * bytes_of(kind) + (kind == Kind::fp8 ? 4 : 0));
    }
    OWN size_t page_bytes() const { return head_bytes() * kv_heads * 2 * layers; }
    // Where the numbers of a head's tokens begin; `which` is 0 for keys, 1 for values.
    OWN uint8_t* head(int64_t page, int layer, int which, int kv_head) const {
        return data + page * page_bytes() + ((size_t(layer) * 2 + which) * kv_heads + kv_head) * head_bytes();
    }
};

// How a row is sampled; see engine.sampling for the rule.
struct Sampling {
    double temperature, top_p, min_p, presence, frequency, repetition;
    uint64_t seed, choice, position;
    int64_t top_k;
    const uint32_t* mask;                          // allowed ids as bits, or null
    const int32_t* bias_ids;                       // ids that have a bias,
    const double* biases;                          // and the biases
    int64_t bias_count;
    const int32_t* log;                            // the tokens before `position`, or null
    int64_t prompt_length;
    int64_t logprobs;                              // how many of the likeliest to tell; -1: no logprob at all
    int32_t* top_ids;                              // [logprobs] out
    double* top_logprobs;                          // [1 + logprobs] out: the token's own first
};

// Queries of one sequence that share a KV head: `rows` rows of `group` heads each.
struct Attention {
    const Pool* pool;
    const int32_t* table;                          // page indexes of the sequence
    int layer, kv_head, group;
    int position;                                  // of the first row
    int rows;
    int window;                                    // positions that a query sees at most; 0: all before it
    const Attention* next;                         // who attends then: whose keys and values to ask for; null: nobody
    const float* queries;                          // [rows][stride]: `group` heads side by side, scaled
    size_t stride;
    int part = 0, parts = 1;                       // which part of the blocks is attended to
    float* kept = nullptr;                         // what each block has, of all parts: part_floats(); null: join them
};

// One variant of the kernels. All variants give the same bits.
struct Variant {
    const char* name;
    int tile;                                      // rows of a tile at most
    // Sums [rows][64] of a strip or of a half of it: `x` in tiles, plain; `scratch` of scratch_floats(), `out`
    // rows 64 apart, of which the half's place is filled.
    void (*strip)(const Matrix&, int strip, Part, const float* x, const Tiles&, float* scratch, float* out);
    // The same of an fp8 matrix over rounded numbers: `x` as `rounded_store`.
    void (*rounded_strip)(const Matrix&, int strip, Part, const float* x, const Tiles&, float* scratch, float* out);
    Store rounded_store;
    // Numbers first … first + count - 1 of the rows of a tile, which lie `apart` apart, into their places; first is even.
    void (*spread)(const float* numbers, size_t apart, int count, int first, float* tile, int rows, Store how);
    // out = silu(gate) * up, n numbers.
    void (*gate)(const float* gates, const float* ups, float* out, int n);
    // n numbers into another place.
    void (*copy)(float* out, const float* numbers, int n);
    // x += numbers, n of them.
    void (*add)(float* x, const float* numbers, int n);
    // 1 / rms(x) of `width` numbers, behind which x has zeros up to a multiple of 16.
    float (*inverse_rms)(const float* x, float epsilon, int width);
    // x * factor * weight of n numbers.
    void (*scale)(const float* x, const float* weight, float factor, int n, float* out);
    // Rotate the pairs (i, i + half) of a head in place, and multiply by `scale`.
    void (*rotate)(float* head, const float* cos, const float* sin, int half, float scale);
    // Round a head's key or value to the page's kind and store it as token `token` of a page.
    void (*keep)(const Pool&, uint8_t* head, int token, const float* numbers);
    // Ask for the first keys and values that will be attended to.
    void (*ask)(const Attention&);
    // Ask for some bytes.
    void (*fetch)(const uint8_t* data, size_t bytes);
    // Attention of few rows; out [rows][group * head_dim]. Scratch of attention_floats(). What is kept is for `join`.
    void (*attend)(const Attention&, float* scratch, float* out);
    // The same when all parts have been attended to.
    void (*join)(const Attention&, float* scratch, float* out);
    // One row of the embedding: number k of output `token` of the matrix, as float32.
    void (*embed)(const Matrix&, int token, float* out);
    // The token that follows a row with these logits, or -1; scratch of sampling_doubles().
    int (*sample)(const float* logits, int vocab, const Sampling&, double* scratch);
    // Reads `bytes` once; what it returns depends on all of them.
    uint64_t (*read)(const uint8_t* data, size_t bytes);
    // Runs `rounds` rounds of independent multiply-adds in registers; their FLOPs go to `flops`.
    float (*multiply)(int64_t rounds, double* flops);
};

// Rows of attention that are computed together, by the number of query heads that share a KV head.
OWN int attention_rows(int group) { return group >= 96 ? 1 : 96 / group; }
OWN size_t padded(size_t n) { return (n + LANES - 1) / LANES * LANES; }
OWN size_t scratch_floats() { return size_t(BLOCK) * STRIP; }
OWN size_t attention_floats(int head_dim, int group) {
    const size_t wide = padded(size_t(head_dim)), queries = size_t(attention_rows(group)) * group;
    return 2 * KEYS * wide + queries * (2 * wide + KEYS + 2) + LANES * wide + LANES;
}
OWN size_t part_floats(int head_dim, int queries, int blocks) {
    return size_t(blocks) * size_t(queries) * (padded(size_t(head_dim)) + 2);
}
// Values, ids and ids again.
OWN size_t sampling_doubles(int vocab) { return size_t(vocab) * 2 + 2; }

extern const Variant portable_variant;
#ifdef ESTAFET_X86
extern const Variant avx2_variant, avx512_variant, avx512_bf16_variant;
#endif
