// The kernels for AVX-512 with bf16 dot products and byte permutations (Zen 4, Sapphire Rapids and later).
#define VARIANT avx512_bf16_variant
#define NAME "avx512-bf16"
#define REGISTERS 32
#define TILE 12
#define PANEL 2
#define SCORE_ROWS 6
#define MANY_QUERIES 24
#define FEW_QUERIES 4
#define AHEAD 6144
#define DOTS
#define FIRST_TILE "direct.h"

#include "lanes_avx512.h"
#include "variant.h"
