// Linear layers, for few rows.
//
// A weight is packed into blocks of `BLOCK` outputs, and each thread reads its blocks from beginning to end: one
// stream, which is what a CPU's memory is fastest at. A block's sums stay in registers for up to `MAX_ROWS` rows, so
// these rows cost one reading of the weight.
#pragma once
#include "formats.h"

namespace {

// One block of outputs of `rows` rows of x. `steps` is the number of words in a row of x.
template <class Format, int rows, class Output>
inline void block_product(const typename Format::Word *weights, const typename Format::Word *x, const float *bias,
                          Output *y, long outputs, long steps, long kept) {
    floats sums[rows][WIDTH], start[WIDTH] = {};
    for (long i = 0; bias && i < kept; i++) ((float *)start)[i] = bias[i];
    for (int row = 0; row < rows; row++)
        for (int v = 0; v < WIDTH; v++) sums[row][v] = start[v];
    for (long step = 0; step < steps; step++, weights += BLOCK) {
        typename Format::Vector w[WIDTH];
        for (int v = 0; v < WIDTH; v++) w[v] = *(const typename Format::Vector *)(weights + v * LANES);
        for (int row = 0; row < rows; row++)
            for (int v = 0; v < WIDTH; v++)
                sums[row][v] = Format::multiplied(sums[row][v], w[v], x[row * steps + step]);
    }
    for (int row = 0; row < rows; row++)
        for (long i = 0; i < kept; i++) put(((const float *)sums[row])[i], y + row * outputs + i);
}

// `block_product` for a number of rows that is known only now.
template <class Format, int most, class Output, class... Rest>
inline void some_rows(long rows, const typename Format::Word *weights, const typename Format::Word *x, Rest... rest) {
    if constexpr (most > 1)
        if (rows < most) return some_rows<Format, most - 1, Output>(rows, weights, x, rest...);
    block_product<Format, most, Output>(weights, x, rest...);
}

// A weight of a linear layer, with the same fields as in compiled.py: `packed` is [blocks, steps, BLOCK] words, with
// zeros after the last output.
struct Weight {
    const void *packed;
    const float *bias;  // [outputs], or null
    long outputs, steps;
};

// y [rows, outputs] = x [rows, steps] times the weight, shared by the threads of a parallel region, which wait at the
// end.
template <class Format, class Output>
void product(const Weight &weight, const typename Format::Word *x, Output *y, long rows) {
    using Word = typename Format::Word;
    const long blocks = (weight.outputs + BLOCK - 1) / BLOCK;
#pragma omp for schedule(static)
    for (long number = 0; number < blocks; number++) {
        const long first = number * BLOCK, left = weight.outputs - first;
        const Word *block = (const Word *)weight.packed + first * weight.steps;
        const float *bias = weight.bias ? weight.bias + first : nullptr;
        for (long row = 0; row < rows; row += MAX_ROWS)
            some_rows<Format, MAX_ROWS, Output>(rows - row, block, x + row * weight.steps, bias,
                                                y + row * weight.outputs + first, weight.outputs, weight.steps,
                                                left < BLOCK ? left : long(BLOCK));
    }
}

}  // namespace
