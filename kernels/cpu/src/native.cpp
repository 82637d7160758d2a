// What Python sees of the kernels.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <stdexcept>
#include <tuple>

#include "model.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

template <typename T>
using Array = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <typename T>
using Table = nb::ndarray<const T, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
template <typename T>
using Out = nb::ndarray<T, nb::c_contig, nb::device::cpu>;

// Outputs, inputs, rows, tokens of anything at most: sums of a few stay far from the end of int.
constexpr int MOST = 1 << 28;

void require(bool fits, const char* otherwise) {
    if (!fits) throw std::invalid_argument(otherwise);
}

template <typename T>
bool all_below(const T* numbers, size_t count, int64_t limit) {
    for (size_t i = 0; i < count; i++)
        if (numbers[i] < 0 || numbers[i] >= limit) return false;
    return true;
}

std::vector<const Variant*> variants() {
    std::vector<const Variant*> found;
#ifdef ESTAFET_X86
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    if (avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq"))
        {
        if (__builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vbmi"))
            found.push_back(&avx512_bf16_variant);
        found.push_back(&avx512_variant);
    }
    if (avx2) found.push_back(&avx2_variant);
#endif
    found.push_back(&portable_variant);
    return found;
}

std::vector<std::string> variant_names() {
    std::vector<std::string> names;
    for (const Variant* variant : variants()) names.push_back(variant->name);
    return names;
}

const Variant& variant_named(const std::string& name) {
    for (const Variant* variant : variants())
        if (name == variant->name) return *variant;
    throw std::invalid_argument("this processor does not run the kernels for " + name);
}

Kind kind_named(const std::string& name) {
    if (name == "fp32" || name == "float32") return Kind::fp32;
    if (name == "bf16" || name == "bfloat16") return Kind::bf16;
    if (name == "fp16" || name == "float16") return Kind::fp16;
    if (name == "fp8" || name == "fp8-per-tensor" || name == "float8") return Kind::fp8;
    if (name == "int8") return Kind::int8;
    throw std::invalid_argument("there is no kind of number " + name);
}

Matrix matrix_of(const std::string& kind, int outputs, int inputs, Array<uint8_t> data, Table<float> scales) {
    Matrix m;
    m.kind = kind_named(kind);
    m.outputs = outputs;
    m.inputs = inputs;
    m.data = data.data();
    const bool scaled = m.kind == Kind::fp8 || m.kind == Kind::int8;
    if (outputs < 1 || inputs < 1 || outputs > MOST || inputs > MOST || m.kind == Kind::fp16 ||
        data.size() != m.bytes() ||
        (scaled && (scales.shape(0) != size_t(m.strips()) || scales.shape(1) != size_t(m.blocks()))))
        throw std::invalid_argument("a packed matrix does not have the size of its shape");
    m.scales = scaled ? scales.data() : nullptr;
    return m;
}

// How each of `count` rows is sampled.
//
// doubles: [rows][6] of temperature, top_p, min_p, presence, frequency, repetition penalty.
// integers: [rows][9] of seed, choice, position, top_k, mask (index or -1), first bias, biases, first log, prompt length;
// a log ends where the row's position does, and is used when first log is not -1.
// told: [rows] logprobs wanted, or -1; top_ids [rows][most] and top_logprobs [rows][1 + most] take them.
std::vector<Sampling> sampling_of(size_t count, int vocab, Table<double> doubles, Table<int64_t> integers,
                                  Table<uint32_t> masks, Array<int32_t> bias_ids, Array<double> biases, Array<int32_t> logs,
                                  Array<int32_t> told, Out<int32_t> top_ids, Out<double> top_logprobs) {
    require(doubles.shape(0) == count && integers.shape(0) == count && doubles.shape(1) == 6 && integers.shape(1) == 9 &&
                told.size() == count && bias_ids.size() == biases.size(),
            "a step's arrays differ in length");
    require(!count || (all_below(bias_ids.data(), bias_ids.size(), vocab) && all_below(logs.data(), logs.size(), vocab)),
            "a biased or logged token lies outside of the vocabulary");
    std::vector<Sampling> sampling;
    const size_t most = count ? top_ids.size() / count : 0;
    const int64_t bias_size = int64_t(biases.size()), log_size = int64_t(logs.size());
    for (size_t i = 0; i < count; i++) {
        const double* d = doubles.data() + 6 * i;
        const int64_t* n = integers.data() + 9 * i;
        const int64_t position = n[2], mask = n[4], bias = n[5], bias_count = n[6], log = n[7], logprobs = told.data()[i];
        require(mask < int64_t(masks.shape(0)) && (mask < 0 || masks.shape(1) * 32 >= size_t(vocab)),
                "a row's mask is not there, or too narrow");
        require(bias >= 0 && bias <= bias_size && bias_count >= 0 && bias_count <= bias_size - bias,
                "a row's biases lie outside of their array");
        require(log < 0 || (log <= log_size && position >= 0 && position <= log_size - log && n[8] >= 0),
                "a row's log lies outside of its array");
        require(logprobs < 0 || (logprobs <= int64_t(most) && logprobs <= vocab && top_logprobs.size() >= count * (most + 1)),
                "no room for the logprobs");
        sampling.push_back({d[0], d[1], d[2], d[3], d[4], d[5], uint64_t(n[0]), uint64_t(n[1]), uint64_t(position), n[3],
                            mask < 0 ? nullptr : masks.data() + size_t(mask) * masks.shape(1), bias_ids.data() + bias,
                            biases.data() + bias, bias_count, log < 0 ? nullptr : logs.data() + log, n[8], logprobs,
                            top_ids.data() + i * most, top_logprobs.data() + i * (most + 1)});
    }
    return sampling;
}

class NativeModel {
public:
    NativeModel(const std::string& variant, const std::vector<int>& shape, double epsilon, Out<uint8_t> pool,
                const std::string& page_kind, int page_tokens, Table<float> cos, Table<float> sin, int threads,
                const std::vector<int>& cores)
        : shape_(shape_of(shape, epsilon, threads)),
          model_(variant_named(variant), shape_, pool_of(shape_, pool, page_kind, page_tokens), threads, cores),
          pages_(int64_t(pool.size() / model_.pool.page_bytes())), threads_(threads) {
        const size_t context = size_t(shape_.context), half = size_t(shape_.head_dim / 2);
        require(cos.shape(0) == context && cos.shape(1) == half && sin.shape(0) == context && sin.shape(1) == half,
                "the rotary tables do not have the model's shape");
        model_.cos = cos.data();
        model_.sin = sin.data();
    }

    void set_matrix(int layer, const std::string& name, const std::string& kind, int outputs, int inputs,
                    Array<uint8_t> data, Table<float> scales) {
        const auto [place, expected_outputs, expected_inputs] = matrix(layer, name);
        require(outputs == expected_outputs && inputs == expected_inputs, "a matrix does not have the model's shape");
        *place = matrix_of(kind, outputs, inputs, data, scales);
    }

    void set_norm(int layer, const std::string& name, Array<float> weight) {
        if (weight.size() != size_t(model_.shape.hidden))
            throw std::invalid_argument("a norm does not have the model's width");
        if (name == "final")
            model_.final_norm = weight.data();
        else if (name == "attention")
            model_.layers.at(layer).attention_norm = weight.data();
        else if (name == "ffn")
            model_.layers.at(layer).ffn_norm = weight.data();
        else
            throw std::invalid_argument("there is no norm " + name);
    }

    void set_rounds(bool rounds) { model_.rounds = rounds; }
    void set_window(int layer, int window) {
        require(window >= 0 && window <= MOST, "a window is not negative");
        model_.layers.at(layer).window = window;
    }

    // spans: [sequences][4] of first row, rows, position, where its table begins in `tables`.
    void step(Array<int32_t> tokens, Table<int32_t> spans, Array<int32_t> tables, Array<int32_t> wanted,
              Table<double> doubles, Table<int64_t> integers, Table<uint32_t> masks, Array<int32_t> bias_ids,
              Array<double> biases, Array<int32_t> logs, Array<int32_t> told, Out<int32_t> sampled, Out<float> logits,
              Out<int32_t> top_ids, Out<double> top_logprobs) {
        const Shape& shape = shape_;
        require(complete(), "the model does not have all its matrices and norms yet");
        require(tokens.size() <= size_t(MOST) && all_below(tokens.data(), tokens.size(), shape.vocab),
                "a token is not one of the vocabulary");
        require(all_below(tables.data(), tables.size(), pages_), "a page is not one of the pool");
        require(spans.shape(1) == 4, "a span has four numbers");
        StepInput input;
        input.rows = int(tokens.size());
        input.tokens = tokens.data();
        int64_t covered = 0;
        for (size_t i = 0; i < spans.shape(0); i++) {
            const int32_t* s = spans.data() + 4 * i;
            const int64_t first = s[0], rows = s[1], position = s[2], table = s[3];
            // the table of a sequence ends where the next one's begins
            const int64_t end = i + 1 < spans.shape(0) ? s[7] : int64_t(tables.size());
            require(first == covered && rows >= 1 && rows <= input.rows - covered, "spans do not cover the rows");
            require(position >= 0 && position + rows <= shape.context, "a position is not one of the context");
            require(table >= 0 && end <= int64_t(tables.size()) &&
                        (end - table) * model_.pool.tokens >= position + rows,
                    "a block table ends before its sequence");
            covered += rows;
            input.spans.push_back({s[0], s[1], s[2], tables.data() + table});
        }
        const size_t count = wanted.size();
        require(covered == input.rows && sampled.size() == count && all_below(wanted.data(), count, input.rows),
                "a step's arrays differ in length");
        require(std::adjacent_find(wanted.data(), wanted.data() + count, std::greater_equal<>()) == wanted.data() + count,
                "the rows that are sampled are not told in their order");
        require(!logits.size() || logits.size() == count * size_t(shape.vocab),
                "logits do not have the shape [rows that want them][vocabulary]");
        input.wanted.assign(wanted.data(), wanted.data() + count);
        input.sampling = sampling_of(count, shape.vocab, doubles, integers, masks, bias_ids, biases, logs, told, top_ids,
                                     top_logprobs);
        input.sampled = sampled.data();
        input.logits = logits.size() ? logits.data() : nullptr;
        nb::gil_scoped_release released;
        const std::lock_guard<std::mutex> alone(mutex_);
        const Hold held(writers_, Writers::CALLER);
        model_.step(input);
    }

    // slots: the main thread's, which is held, who calls step's, and one for each of the other threads of a step; they stay
    // where they are.
    void hold(Out<uint8_t> slots, uint64_t epoch) {
        const Writers writers{reinterpret_cast<WriterSlot*>(slots.data()), epoch};
        require(slots.size() >= sizeof(WriterSlot) * (Writers::HELPERS + size_t(threads_) - 1) &&
                    reinterpret_cast<uintptr_t>(slots.data()) % alignof(WriterSlot) == 0,
                "writers' slots are too few for the threads, or not aligned");
        nb::gil_scoped_release released;
        const std::lock_guard<std::mutex> alone(mutex_);
        require(!writers_.slots, "the threads hold their slots already");
        model_.hold(writers);
        writers_ = writers;
    }

    std::map<std::string, double> phase_seconds() const {
        std::map<std::string, double> seconds;
        for (int i = 0; i < PHASES; i++) seconds[phase_names[i]] = model_.seconds()[i];
        return seconds;
    }

private:
    static Shape shape_of(const std::vector<int>& s, double epsilon, int threads) {
        require(s.size() == 8, "a shape has eight numbers");
        for (int n : s) require(n >= 1 && n <= MOST, "a shape has positive numbers");
        require(s[3] % s[4] == 0 && s[5] % 2 == 0, "heads do not fit");
        require(int64_t(s[3] + 2 * int64_t(s[4])) * s[5] <= MOST, "heads are too many or too wide");
        require(threads >= 1 && threads <= 1024, "a step has from 1 to 1024 threads");
        return {s[0], s[1], s[2], s[3], s[4], s[5], s[6], s[7], float(epsilon)};
    }
    static Pool pool_of(const Shape& s, Out<uint8_t> data, const std::string& kind, int tokens) {
        require(tokens >= 1 && tokens <= 1 << 16, "a page has some tokens");
        Pool pool{data.data(), kind_named(kind), tokens, s.layers, s.kv_heads, s.head_dim};
        require(pool.kind != Kind::int8, "pages are not of int8");
        require(data.size() > 0 && data.size() % pool.page_bytes() == 0, "the pool is not some whole pages");
        return pool;
    }
    // Where a matrix is kept, and its outputs and inputs.
    std::tuple<Matrix*, int, int> matrix(int layer, const std::string& name) {
        const int queries = shape_.heads * shape_.head_dim, keys = shape_.kv_heads * shape_.head_dim;
        const int hidden = shape_.hidden, ffn = shape_.ffn;
        if (name == "embedding") return {&model_.embedding, shape_.vocab, hidden};
        if (name == "head") return {&model_.head, shape_.vocab, hidden};
        Layer& l = model_.layers.at(layer);
        if (name == "q") return {&l.q, queries, hidden};
        if (name == "k") return {&l.k, keys, hidden};
        if (name == "v") return {&l.v, keys, hidden};
        if (name == "o") return {&l.o, hidden, queries};
        if (name == "gate") return {&l.gate, ffn, hidden};
        if (name == "up") return {&l.up, ffn, hidden};
        if (name == "down") return {&l.down, hidden, ffn};
        throw std::invalid_argument("there is no matrix " + name);
    }
    bool complete() const {
        for (const Layer& l : model_.layers)
            if (!l.q.data || !l.k.data || !l.v.data || !l.o.data || !l.gate.data || !l.up.data || !l.down.data ||
                !l.attention_norm || !l.ffn_norm)
                return false;
        return model_.embedding.data && model_.head.data && model_.final_norm;
    }

    const Shape shape_;
    Model model_;
    const int64_t pages_;
    const int threads_;
    Writers writers_;
    std::mutex mutex_;  // one step at a time
};

// out [rows][outputs] = x [rows][inputs] times a packed matrix, strip by strip on one thread: for tests and benchmarks.
void multiply(const std::string& variant, const std::string& kind, int outputs, int inputs, Array<uint8_t> data,
              Table<float> scales, Table<float> x, Out<float> out, bool rounds) {
    const Variant& v = variant_named(variant);
    const Matrix m = matrix_of(kind, outputs, inputs, data, scales);
    const int rows = int(x.shape(0));
    if (x.shape(1) != size_t(inputs) || out.size() != size_t(rows) * outputs || rows < 1)
        throw std::invalid_argument("shapes differ");
    nb::gil_scoped_release released;
    const Tiles tiles(rows, v.tile);
    const Store how = !rounds || m.kind != Kind::fp8 ? Store::plain : v.rounded_store;
    std::vector<float> packed(size_t(rows) * (inputs + 1) + LANES), scratch(scratch_floats()), made(size_t(rows) * STRIP);
    for (int t = 0; t < tiles.count; t++)
        v.spread(x.data() + size_t(tiles.start(t)) * inputs, size_t(inputs), inputs, 0,
                 packed.data() + tiles.place(t, inputs, how), tiles.size(t), how);
    for (int s = 0; s < m.strips(); s++) {
        (how == Store::plain ? v.strip : v.rounded_strip)(m, s, {}, packed.data(), tiles, scratch.data(), made.data());
        const int count = std::min(STRIP, outputs - s * STRIP);
        for (int r = 0; r < rows; r++)
            std::memcpy(out.data() + size_t(r) * outputs + s * STRIP, &made[size_t(r) * STRIP], size_t(count) * 4);
    }
}

void embed(const std::string& variant, const std::string& kind, int outputs, int inputs, Array<uint8_t> data,
           Table<float> scales, int token, Out<float> out) {
    const Matrix m = matrix_of(kind, outputs, inputs, data, scales);
    if (token < 0 || token >= outputs || out.size() != size_t(inputs)) throw std::invalid_argument("shapes differ");
    variant_named(variant).embed(m, token, out.data());
}

// Samples a token for each row of logits [rows][vocab]; the other arrays as in a step.
void sample(const std::string& variant, Table<float> logits, Table<double> doubles, Table<int64_t> integers,
            Table<uint32_t> masks, Array<int32_t> bias_ids, Array<double> biases, Array<int32_t> logs, Array<int32_t> told,
            Out<int32_t> sampled, Out<int32_t> top_ids, Out<double> top_logprobs) {
    const Variant& v = variant_named(variant);
    const size_t count = logits.shape(0);
    require(!count || (logits.shape(1) > 0 && logits.shape(1) <= size_t(MOST)), "a row of logits has some numbers");
    const int vocab = int(logits.shape(1));
    require(sampled.size() == count, "a step's arrays differ in length");
    const std::vector<Sampling> sampling =
        sampling_of(count, vocab, doubles, integers, masks, bias_ids, biases, logs, told, top_ids, top_logprobs);
    nb::gil_scoped_release released;
    std::vector<double> scratch(sampling_doubles(vocab));
    for (size_t i = 0; i < count; i++)
        sampled.data()[i] = v.sample(logits.data() + i * size_t(vocab), vocab, sampling[i], scratch.data());
}

// silu(gates) * ups, a multiple of 16 of them.
void gate(const std::string& variant, Array<float> gates, Array<float> ups, Out<float> out) {
    if (gates.size() % LANES || ups.size() != gates.size() || out.size() != gates.size())
        throw std::invalid_argument("shapes differ");
    variant_named(variant).gate(gates.data(), ups.data(), out.data(), int(gates.size()));
}

double seconds_of(const std::function<void()>& work) {
    const auto began = std::chrono::steady_clock::now();
    work();
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
}

// Bytes a second that `threads` threads read together from memory, each its own part of `megabytes` MiB; the best of five.
// In huge pages where there are any: a file of weights in the page cache often has them too.
double read_bandwidth(int threads, int megabytes) {
    constexpr size_t huge = size_t(2) << 20;
    require(threads >= 1 && threads <= 1024 && megabytes >= 1, "some threads and megabytes are needed");
    nb::gil_scoped_release released;
    const Variant& v = *variants().front();
    const size_t part = std::max((size_t(megabytes) << 20) / threads / huge, size_t(1)) * huge;
    const std::unique_ptr<uint8_t, decltype(&std::free)> memory(
        static_cast<uint8_t*>(std::aligned_alloc(huge, part * threads)), &std::free);
    if (!memory) throw std::bad_alloc();
    uint8_t* const data = memory.get();
#ifdef MADV_HUGEPAGE
    madvise(data, part * threads, MADV_HUGEPAGE);
#endif
    std::memset(data, 1, part * threads);
    std::vector<uint64_t> results(threads);
    Team team(threads, {});
    double best = 1e9;
    for (int round = 0; round < 5; round++)
        best = std::min(best, seconds_of([&] {
                            team.run([&](int i) { results[i] = v.read(data + part * i, part); });
                        }));
    return double(part) * threads / best;
}

// FLOP a second of fp32 multiply-adds on `threads` threads; the best of five.
double fma_rate(int threads) {
    require(threads >= 1 && threads <= 1024, "some threads are needed");
    nb::gil_scoped_release released;
    const Variant& v = *variants().front();
    std::vector<double> flops(threads);
    std::vector<float> results(threads);
    Team team(threads, {});
    double best = 0;
    for (int round = 0; round < 5; round++) {
        const double seconds =
            seconds_of([&] { team.run([&](int i) { results[i] = v.multiply(2000000, &flops[i]); }); });
        double total = 0;
        for (double each : flops) total += each;
        best = std::max(best, total / seconds);
    }
    return best;
}

}  // namespace

NB_MODULE(_native, m) {
    m.doc() = "Kernels for CPUs: one step of a model, and the parts of it that tests look at.";
    m.def("variants", &variant_names, "The variants that this processor runs, the fastest first.");
    // Arrays are taken as they are: a converted one would be a copy, which lives too short and is written in vain.
    m.def("multiply", &multiply, "variant"_a, "kind"_a, "outputs"_a, "inputs"_a, "data"_a.noconvert(),
          "scales"_a.noconvert(), "x"_a.noconvert(), "out"_a.noconvert(), "rounds"_a = false);
    m.def("embed", &embed, "variant"_a, "kind"_a, "outputs"_a, "inputs"_a, "data"_a.noconvert(), "scales"_a.noconvert(),
          "token"_a, "out"_a.noconvert());
    m.def("sample", &sample, "variant"_a, "logits"_a.noconvert(), "doubles"_a.noconvert(), "integers"_a.noconvert(),
          "masks"_a.noconvert(), "bias_ids"_a.noconvert(), "biases"_a.noconvert(), "logs"_a.noconvert(),
          "told"_a.noconvert(), "sampled"_a.noconvert(), "top_ids"_a.noconvert(), "top_logprobs"_a.noconvert());
    m.def("gate", &gate, "variant"_a, "gates"_a.noconvert(), "ups"_a.noconvert(), "out"_a.noconvert());
    m.def("read_bandwidth", &read_bandwidth, "threads"_a, "megabytes"_a = 1024);
    m.def("fma_rate", &fma_rate, "threads"_a);
    nb::class_<NativeModel>(m, "Model")
        .def(nb::init<const std::string&, const std::vector<int>&, double, Out<uint8_t>, const std::string&, int,
                      Table<float>, Table<float>, int, const std::vector<int>&>(),
             "variant"_a, "shape"_a, "epsilon"_a, "pool"_a.noconvert(), "page_kind"_a, "page_tokens"_a,
             "cos"_a.noconvert(), "sin"_a.noconvert(), "threads"_a, "cores"_a)
        .def("set_matrix", &NativeModel::set_matrix, "layer"_a, "name"_a, "kind"_a, "outputs"_a, "inputs"_a,
             "data"_a.noconvert(), "scales"_a.noconvert())
        .def("set_norm", &NativeModel::set_norm, "layer"_a, "name"_a, "weight"_a.noconvert())
        .def("set_rounds", &NativeModel::set_rounds, "rounds"_a)
        .def("set_window", &NativeModel::set_window, "layer"_a, "window"_a)
        .def("step", &NativeModel::step, "tokens"_a.noconvert(), "spans"_a.noconvert(), "tables"_a.noconvert(),
             "wanted"_a.noconvert(), "doubles"_a.noconvert(), "integers"_a.noconvert(), "masks"_a.noconvert(),
             "bias_ids"_a.noconvert(), "biases"_a.noconvert(), "logs"_a.noconvert(), "told"_a.noconvert(),
             "sampled"_a.noconvert(), "logits"_a.noconvert(), "top_ids"_a.noconvert(), "top_logprobs"_a.noconvert())
        .def("hold", &NativeModel::hold, "slots"_a.noconvert(), "epoch"_a)
        .def("phase_seconds", &NativeModel::phase_seconds);
}
