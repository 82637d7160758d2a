// The kernels for AVX2, FMA and F16C.
#define VARIANT avx2_variant
#define NAME "avx2"
#define REGISTERS 16
#define TILE 6
#define PANEL 1
#define SCORE_ROWS 4
#define MANY_QUERIES 12
#define FEW_QUERIES 3
#define AHEAD 6144
#define FIRST_TILE "narrow.h"

#include "lanes_avx2.h"
#include "variant.h"
