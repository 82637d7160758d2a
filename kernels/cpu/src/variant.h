// Everything that is compiled once for each instruction set. The file that includes this has included its lanes and defined
//   VARIANT, NAME    the table of functions and what people call it
//   REGISTERS        vector registers
//   TILE, PANEL      rows of a tile at most; vectors of a panel of unpacked weights
//   SCORE_ROWS       queries that are scored together, of many
//   FEW_QUERIES      queries that read keys and values as they lie together
//   MANY_QUERIES     from so many on, keys are turned into columns for them
//   AHEAD            bytes that weights are asked for ahead
//   FIRST_TILE       the header of the first tile's products: `direct.h` or `narrow.h`
//   DOTS             with bf16 dot products only
// All functions are in an unnamed namespace: none of one variant may be merged with one of another. For the same reason
// nothing of the C++ library but types is used here.
#include <utility>

#include "plan.h"

#include "elementwise.h"
#include "matmul.h"
#include "attention.h"
#ifdef DOTS
#include "dots.h"
#define ROUNDED dot_strip, Store::pairs
#else
#define ROUNDED multiply_rounded, FIRST_TILE_STORE
#endif
#include "sampling.h"

namespace {

uint64_t read_all(const uint8_t* data, size_t bytes) {
    Lanes sums[8];
    for (auto& each : sums) each = zero();
    size_t i = 0;
    for (; i + 512 <= bytes; i += 512) {
        ahead_once(data + i + AHEAD);
        ahead_once(data + i + AHEAD + 256);
        for (int j = 0; j < 8; j++)
            sums[j] = add(sums[j], load(reinterpret_cast<const float*>(data + i + 64 * j)));
    }
    Lanes total = zero();
    for (const auto& each : sums) total = add(total, each);
    uint64_t rest = as_bits(sum(total));
    for (; i < bytes; i++) rest += data[i];
    return rest;
}

float multiply_rounds(int64_t rounds, double* flops) {
    constexpr int chains = REGISTERS >= 32 ? 12 : 6;
    Lanes sums[chains];
    for (int c = 0; c < chains; c++) sums[c] = all(float(c));
    const Lanes factor = all(0.999f), term = all(0.001f);
    for (int64_t i = 0; i < rounds; i++)
        for (int c = 0; c < chains; c++) sums[c] = fma(sums[c], factor, term);
    Lanes total = zero();
    for (const auto& each : sums) total = add(total, each);
    *flops = 2.0 * LANES * chains * double(rounds);
    return sum(total);
}

}  // namespace

const Variant VARIANT = {NAME,        TILE,          multiply_strip, ROUNDED,      spread_rows,  gate_numbers,
                         copy_numbers, add_numbers,  inverse_rms,    scale_numbers, rotate_head, keep_numbers,
                         ask_for,     ask_for_bytes, attend_rows,    join_rows,    embed_row,    sample_row,
                         read_all,    multiply_rounds};
