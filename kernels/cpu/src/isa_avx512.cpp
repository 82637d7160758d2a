// The kernels for AVX-512.
#define VARIANT avx512_variant
#define NAME "avx512"
#define REGISTERS 32
#define TILE 12
#define PANEL 2
#define SCORE_ROWS 6
#define MANY_QUERIES 24
#define FEW_QUERIES 4
#define AHEAD 6144
#define FIRST_TILE "direct.h"

#include "lanes_avx512.h"
#include "variant.h"
