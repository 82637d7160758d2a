// A decoder-only transformer of the Llama kind over packed weights and a pool of KV pages: one call is one step.
#pragma once
#include <array>
#include <atomic>
#include <initializer_list>
#include <memory>
#include <vector>

#include "plan.h"
#include "team.h"

struct Layer {
    Matrix q, k, v, o, gate, up, down;
    const float* attention_norm = nullptr;
    const float* ffn_norm = nullptr;
    int window = 0;                                // positions that a query sees at most; 0: all
};

struct Shape {
    int vocab, hidden, layers, heads, kv_heads, head_dim, ffn, context;
    float epsilon;
};

// The consecutive rows of one sequence.
struct Span {
    int first, count, position;
    const int32_t* table;
};

struct StepInput {
    int rows = 0;
    const int32_t* tokens = nullptr;               // [rows]
    std::vector<Span> spans;
    std::vector<int32_t> wanted;                   // rows whose next token is sampled, ascending
    std::vector<Sampling> sampling;                // one for each of them
    float* logits = nullptr;                       // [wanted][vocab] out, or null
    int32_t* sampled = nullptr;                    // [wanted] out
};

enum Phase { EMBED, NORM, QKV, ATTENTION, OUTPUT, FFN, HEAD, SAMPLE, PHASES };
extern const char* const phase_names[PHASES];

class Model {
public:
    Model(const Variant& variant, const Shape& shape, const Pool& pool, int threads, const std::vector<int>& cores);

    void step(const StepInput& input);
    // Has the helpers of a step hold their slots; whoever calls a step holds its own.
    void hold(const Writers& writers) { team_.hold(writers); }
    // Seconds by phase since the model was made, as the calling thread saw them, waiting included.
    const std::array<double, PHASES>& seconds() const { return seconds_; }

    std::vector<Layer> layers;
    Matrix embedding, head;
    const float* final_norm = nullptr;
    const float* cos = nullptr;                    // [context][head_dim / 2]
    const float* sin = nullptr;
    // Whether inputs of fp8 matrices are rounded to bf16: half the work where the processor has dot products of them.
    bool rounds = false;
    const Variant& variant;
    const Shape shape;
    const Pool pool;

private:
    // Rows of a span that attend to the keys of a head, or to a part of these; then: how many parts have been attended to by
    // then is counted in done_[number], and at `place` in parts_ lies what they have.
    struct Item {
        int span, kv_head, first, rows;
        int part = 0, parts = 1, number = 0;
        size_t place = 0;
    };
    struct alignas(64) Counter {
        std::atomic<int> next{0};
    };
    // How much of a thread's share of some strips is done or under way: below from its front, by itself; in the upper half
    // from its back, by threads that have nothing left.
    struct alignas(64) Share {
        std::atomic<uint64_t> taken{0};
    };
    // Some consecutive items.
    struct Run {
        int next, end;
    };
    // What one thread works in.
    struct Bench {
        std::vector<float> outs, ups, scratch, attention, attended, rows, tile;
        std::vector<double> sampling;
    };

    void prepare(const StepInput& input);
    void cut_items(const StepInput& input);
    void work(const StepInput& input, int number);
    void attend(const StepInput& input, const Item& item, int layer, Bench& bench, const Item* next);
    Run claim(Counter& counter, int items) const;
    Attention attention_of(const StepInput& input, const Item& item, int layer);
    void turn(const StepInput& input, const Item& item, int layer);
    // Columns begin … end - 1 of tiles first … last - 1 of what is laid in tiles at `out`.
    struct Laid {
        int first, last, begin, end;
        float* out;
    };
    Laid laid_by(const Tiles& tiles, int width, std::vector<float>& shared, int number);
    const float* tiled(const std::vector<float>& rows, int width, const Tiles& tiles, Store how, int number);
    const float* normed(const float* weight, const Tiles& tiles, Store how, int number);
    static bool is_wanted(const StepInput& input, const Item& item);
    void only_wanted(const StepInput& input);
    Store store_for(std::initializer_list<const Matrix*> matrices) const;
    void strip(const Matrix& m, int s, Part part, const float* x, const Tiles& tiles, Store how, Bench& bench,
               float* out) const;
    void lap(int number, Phase phase);
    template <typename Work>
    void each_strip(Share* shares, int strips, int rows, bool whole, int number, Work work);
    void meet(const Matrix& next, int rows, int number);

    Team team_;
    std::vector<Bench> benches_;
    std::vector<Item> items_, turns_;
    std::unique_ptr<Counter[]> counters_;
    std::unique_ptr<Counter[]> done_;
    std::unique_ptr<Share[]> shares_;              // one a thread, for each time that strips are shared
    int counter_count_ = 0, share_count_ = 0;
    int capacity_ = 0;                             // rows that the buffers hold
    size_t wide_ = 0;                              // a row of x_
    std::vector<float> x_, normed_, projected_, mixed_, tiled_, gated_, logits_, parts_;
    std::array<double, PHASES> seconds_{};
    double lap_ = 0;
};
