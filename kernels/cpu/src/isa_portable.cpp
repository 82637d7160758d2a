// The kernels in plain C++: runs anywhere, and what the other variants are tested against.
#define VARIANT portable_variant
#define NAME "portable"
#define REGISTERS 16
#define TILE 6
#define PANEL 1
#define SCORE_ROWS 2
#define MANY_QUERIES 16
#define FEW_QUERIES 1
#define AHEAD 0
#define FIRST_TILE "direct.h"

#include "lanes_portable.h"
#include "variant.h"
