/* y = x W^T + bias for few rows of x, as fast as memory delivers W.
 *
 * W is packed into blocks of BLOCK outputs, and each thread reads its blocks from beginning to end: one stream, which is
 * what a CPU's memory is fastest at. A block's sums stay in registers for up to MAX_ROWS rows, so these rows cost one
 * reading of W. Every sum adds up in the same order, whatever the number of rows, blocks and threads: a token gets the same
 * bits in a plain step and in a verify pass.
 *
 * The compiler of the machine that runs it compiles this file for that machine's CPU (see compiled.py).
 */
#include <stdint.h>

#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__) /* 32 registers of 64 bytes */
#define VECTOR_BYTES 64
#define WIDTH 2 /* vectors of a block */
#define MAX_ROWS 12
#elif defined(__AVX__) /* 16 of 32 */
#define VECTOR_BYTES 32
#define WIDTH 2
#define MAX_ROWS 6
#else /* NEON and others: 32 of 16 */
#define VECTOR_BYTES 16
#define WIDTH 4
#define MAX_ROWS 6
#endif
#define LANES (VECTOR_BYTES / 4)
#define BLOCK (WIDTH * LANES)

typedef float floats __attribute__((vector_size(VECTOR_BYTES), aligned(4), may_alias));
typedef uint32_t pairs __attribute__((vector_size(VECTOR_BYTES), aligned(4), may_alias));
#define INLINE static inline __attribute__((always_inline))

/* Outputs of a block, by which `compiled.py` packs. */
int moray_block(void) { return BLOCK; }

INLINE float rounded_float(float sum) { return sum; }

/* To the nearest bfloat16, ties to even. */
INLINE uint16_t rounded_bfloat16(float sum) {
    union { float value; uint32_t bits; } number = {sum};
    if ((number.bits & 0x7fffffff) > 0x7f800000) return 0x7fc0; /* NaN */
    return (uint16_t)((number.bits + 0x7fff + ((number.bits >> 16) & 1)) >> 16);
}

/* acc += one vector of weights times one input of a row. */
INLINE floats multiplied_float(floats acc, floats weights, float input) { return acc + weights * input; }

/* The same for two inputs at once: each word holds the weights of inputs 2j (low half) and 2j + 1. */
INLINE floats multiplied_bfloat16(floats acc, pairs weights, uint32_t input) {
#if defined(__AVX512BF16__)
    return (floats)_mm512_dpbf16_ps((__m512)acc, (__m512bh)weights, (__m512bh)_mm512_set1_epi32((int)input));
#else
    pairs inputs = (pairs){0} + input;
    acc += (floats)(weights << 16) * (floats)(inputs << 16);
    return acc + (floats)(weights & 0xffff0000u) * (floats)(inputs & 0xffff0000u);
#endif
}

/* `rows` rows times one block of `steps` vectors' width; `rows` is a constant in every call. */
#define BLOCK_FUNCTION(name, word, vector, output, multiplied, rounded)                                                \
    INLINE void name(const word *weights, const word *x, const float *bias, output *y, long outputs, long steps,       \
                     long kept, const int rows) {                                                                      \
        floats sums[MAX_ROWS][WIDTH], start[WIDTH] = {0};                                                              \
        for (long i = 0; bias && i < kept; i++) ((float *)start)[i] = bias[i];                                         \
        for (int row = 0; row < rows; row++)                                                                           \
            for (int v = 0; v < WIDTH; v++) sums[row][v] = start[v];                                                   \
        for (long step = 0; step < steps; step++, weights += BLOCK) {                                                  \
            vector w[WIDTH];                                                                                           \
            for (int v = 0; v < WIDTH; v++) w[v] = *(const vector *)(weights + v * LANES);                             \
            for (int row = 0; row < rows; row++)                                                                       \
                for (int v = 0; v < WIDTH; v++) sums[row][v] = multiplied(sums[row][v], w[v], x[row * steps + step]);  \
        }                                                                                                              \
        for (int row = 0; row < rows; row++)                                                                           \
            for (long i = 0; i < kept; i++) y[row * outputs + i] = rounded(((const float *)sums[row])[i]);             \
    }

BLOCK_FUNCTION(block_float, float, floats, float, multiplied_float, rounded_float)
BLOCK_FUNCTION(block_bfloat16, uint32_t, pairs, uint16_t, multiplied_bfloat16, rounded_bfloat16)

#define CASE(function, rows)                                                                                           \
    case rows: function(block, inputs, own_bias, out, outputs, steps, kept, rows); break;
#if MAX_ROWS == 12
#define MORE_CASES(function) CASE(function, 6) CASE(function, 7) CASE(function, 8) CASE(function, 9)                   \
    CASE(function, 10) CASE(function, 11)
#else
#define MORE_CASES(function)
#endif

/* weights: [blocks, steps, BLOCK] words, zeros behind the last output. x: [rows, steps] words. bias: [outputs] or null.
 * y: [rows, outputs]. A word is a float, or two bfloat16; `steps` is the number of words in a row of x. */
#define LINEAR_FUNCTION(name, function, word, output)                                                                  \
    void name(const word *weights, const word *x, const float *bias, output *y, long outputs, long steps, long rows,   \
              int threads) {                                                                                           \
        long blocks = (outputs + BLOCK - 1) / BLOCK;                                                                   \
        _Pragma("omp parallel for schedule(static) num_threads(threads)")                                              \
        for (long number = 0; number < blocks; number++) {                                                             \
            long first = number * BLOCK, kept = outputs - first < BLOCK ? outputs - first : BLOCK;                     \
            const word *block = weights + first * steps;                                                               \
            const float *own_bias = bias ? bias + first : 0;                                                           \
            for (long row = 0; row < rows; row += MAX_ROWS) {                                                          \
                const word *inputs = x + row * steps;                                                                  \
                output *out = y + row * outputs + first;                                                               \
                switch (rows - row) {                                                                                  \
                    CASE(function, 1) CASE(function, 2) CASE(function, 3) CASE(function, 4) CASE(function, 5)          \
                    MORE_CASES(function)                                                                               \
                    default: function(block, inputs, own_bias, out, outputs, steps, kept, MAX_ROWS);                   \
                }                                                                                                      \
            }                                                                                                          \
        }                                                                                                              \
    }

LINEAR_FUNCTION(moray_linear_float, block_float, float, float)
LINEAR_FUNCTION(moray_linear_bfloat16, block_bfloat16, uint32_t, uint16_t)
