// The parts of a decoder layer before and after attention, and the whole layer.
#pragma once
#include "attention.h"
#include "linear.h"

namespace {

// The sizes and weights of the part of a layer before attention; the same fields as in compiled.py.
struct Before {
    Weight qkv;
    const float *norm;
    float epsilon;
    long hidden, num_rotated, num_heads, head_dim;  // rotated: query and key heads; heads: these and value heads
};

// The same for the part after it.
struct After {
    Weight out, gate_up, down;
    const float *norm;
    float epsilon;
    long hidden, intermediate;
};

// RMSNorm of one row: to = x / sqrt(mean(x^2) + epsilon) * scale.
template <class Format>
void normalise(const typename Format::Number *x, const float *scale, float epsilon, long width,
               typename Format::Number *to) {
    floats squares = {};
    long i = 0;
    for (; i + LANES <= width; i += LANES) {
        const floats values = Format::widened_vector(x + i);
        squares += values * values;
    }
    float sum = 0;
    for (int lane = 0; lane < LANES; lane++) sum += squares[lane];
    for (; i < width; i++) sum += Format::widened(x[i]) * Format::widened(x[i]);
    const float factor = 1 / sqrtf(sum / float(width) + epsilon);
    for (i = 0; i < width; i++) to[i] = Format::rounded(Format::widened(x[i]) * factor * scale[i]);
}

// to = silu(gate) * up, for `count` numbers.
template <class Format>
void activate(const float *gate, const float *up, typename Format::Number *to, long count) {
    for (long first = 0; first < count; first += LANES) {
        const long kept = count - first;
        floats gates = {}, ups = {};
        if (kept >= LANES) {
            gates = *(const floats *)(gate + first), ups = *(const floats *)(up + first);
        } else {
            __builtin_memcpy(&gates, gate + first, kept * sizeof(float));
            __builtin_memcpy(&ups, up + first, kept * sizeof(float));
        }
        const floats product = gates / (1.0f + exponential(-gates)) * ups;
        if (kept >= LANES)
            for (int i = 0; i < LANES; i++) to[first + i] = Format::rounded(product[i]);
        else
            for (long i = 0; i < kept; i++) to[first + i] = Format::rounded(product[i]);
    }
}

// One head of a row, rotated if it is a query or a key.
template <class Format>
inline void put_head(const Before &layer, const float *from, const typename Format::Number *cosine,
                     const typename Format::Number *sine, bool is_rotated, typename Format::Number *to) {
    const long half = layer.head_dim / 2;
    if (!is_rotated) {
        for (long i = 0; i < layer.head_dim; i++) to[i] = Format::rounded(from[i]);
        return;
    }
    for (long i = 0; i < half; i++) {
        const float first = from[i], second = from[i + half];
        to[i] = Format::rounded(first * Format::widened(cosine[i]) - second * Format::widened(sine[i]));
        to[i + half] =
            Format::rounded(second * Format::widened(cosine[i + half]) + first * Format::widened(sine[i + half]));
    }
}

// hidden [rows, hidden] -> queries, keys and values side by side, [rows, outputs] in sums, which the threads of a
// parallel region share; they wait at the end. normed holds rows * hidden numbers.
template <class Format>
void project(const Before &layer, const void *hidden, typename Format::Number *normed, float *sums, long rows) {
    using Number = typename Format::Number;
#pragma omp for schedule(static)
    for (long row = 0; row < rows; row++)
        normalise<Format>((const Number *)hidden + row * layer.hidden, layer.norm, layer.epsilon, layer.hidden,
                          normed + row * layer.hidden);
    product<Format>(layer.qkv, (const typename Format::Word *)normed, sums, rows);
}

// hidden [batch, new, hidden] -> queries, keys and values [batch, heads, new, head_dim], the first two rotated.
// scratch holds rows * (hidden + outputs) floats.
template <class Format>
void before_attention(const Before &layer, const void *hidden, const void *cosines, const void *sines, void *heads,
                      float *scratch, long batch, long new_tokens, int threads) {
    using Number = typename Format::Number;
    const long rows = batch * new_tokens, outputs = layer.qkv.outputs, width = layer.head_dim;
    float *const sums = scratch;
#pragma omp parallel num_threads(threads)
    {
        project<Format>(layer, hidden, (Number *)(scratch + rows * outputs), sums, rows);
#pragma omp for schedule(static) collapse(2)
        for (long row = 0; row < rows; row++)
            for (long head = 0; head < layer.num_heads; head++) {
                const long place = (row / new_tokens * layer.num_heads + head) * new_tokens + row % new_tokens;
                put_head<Format>(layer, sums + row * outputs + head * width, (const Number *)cosines + row * width,
                                 (const Number *)sines + row * width, head < layer.num_rotated,
                                 (Number *)heads + place * width);
            }
    }
}

// attended [rows, heads * head_dim] and hidden [rows, hidden] -> y [rows, hidden]: the output projection, the norm and
// the MLP with SiLU, each added to what came in; the threads of a parallel region share them and wait at the end.
// scratch holds rows * (3 * hidden + 3 * intermediate) floats.
template <class Format>
void finish(const After &layer, const void *attended, const void *hidden, void *y, float *scratch, long rows) {
    using Number = typename Format::Number;
    using Word = typename Format::Word;
    const long width = layer.hidden, inner = layer.intermediate;
    float *const sums = scratch, *const wide = sums + rows * width;
    Number *const middle = (Number *)(wide + rows * 2 * inner), *const normed = middle + rows * width;
    Number *const active = normed + rows * width;
    product<Format>(layer.out, (const Word *)attended, sums, rows);
#pragma omp for schedule(static)
    for (long row = 0; row < rows; row++) {
        for (long i = row * width; i < (row + 1) * width; i++)
            middle[i] = Format::rounded(Format::widened(((const Number *)hidden)[i]) + sums[i]);
        normalise<Format>(middle + row * width, layer.norm, layer.epsilon, width, normed + row * width);
    }
    product<Format>(layer.gate_up, (const Word *)normed, wide, rows);
#pragma omp for schedule(static) collapse(2)
    for (long row = 0; row < rows; row++)
        for (long piece = 0; piece < (inner + BLOCK - 1) / BLOCK; piece++) {
            const float *gate = wide + row * 2 * inner, *up = gate + inner;
            const long first = piece * BLOCK, count = inner - first < BLOCK ? inner - first : long(BLOCK);
            activate<Format>(gate + first, up + first, active + row * inner + first, count);
        }
    product<Format>(layer.down, (const Word *)active, sums, rows);
#pragma omp for schedule(static)
    for (long row = 0; row < rows; row++)
        for (long i = row * width; i < (row + 1) * width; i++)
            ((Number *)y)[i] = Format::rounded(Format::widened(middle[i]) + sums[i]);
}

// A whole layer: hidden [batch, new, hidden] -> y, of the same shape. New keys and values are written to the cache `key`
// and `value`: those of a row to slots[row], or, without slots, to begin and the slots after it. scratch holds
// rows * (outputs + hidden + 2 * heads * head_dim + 3 * hidden + 3 * intermediate) + threads * MAX_QUERIES * padded
// floats, for the query heads and the slots of sizes, rounded up to a multiple of LANES.
template <class Format>
void layer(const Before &before, const After &after, const AttentionSizes &sizes, const void *hidden,
           const void *cosines, const void *sines, void *key, void *value, const int64_t *slots, long begin,
           const void *mask, void *y, float *scratch, float scale, int threads) {
    using Number = typename Format::Number;
    const long rows = sizes.batch * sizes.new_tokens, outputs = before.qkv.outputs, width = before.head_dim;
    const long num_queries = sizes.kv_heads * sizes.group, padded = (sizes.slots + LANES - 1) / LANES * LANES;
    float *const sums = scratch, *const normed = sums + rows * outputs, *const query = normed + rows * before.hidden;
    float *const attended = query + rows * num_queries * width, *const scores = attended + rows * num_queries * width;
    float *const rest = scores + threads * MAX_QUERIES * padded;
#pragma omp parallel num_threads(threads)
    {
        project<Format>(before, hidden, (Number *)normed, sums, rows);
#pragma omp for schedule(static) collapse(2)
        for (long row = 0; row < rows; row++)
            for (long head = 0; head < before.num_heads; head++) {
                const long sequence = row / sizes.new_tokens, token = row % sizes.new_tokens;
                const long slot = slots ? long(slots[row]) : begin + token;
                Number *to = (Number *)query + (row * num_queries + head) * width;
                if (head >= before.num_rotated)
                    to = (Number *)value + sequence * sizes.value_batch +
                         (head - before.num_rotated) * sizes.value_head + slot * sizes.value_slot;
                else if (head >= num_queries)
                    to = (Number *)key + sequence * sizes.key_batch + (head - num_queries) * sizes.key_head +
                         slot * sizes.key_slot;
                put_head<Format>(before, sums + row * outputs + head * width, (const Number *)cosines + row * width,
                                 (const Number *)sines + row * width, head < before.num_rotated, to);
            }
        attend<Format>(sizes, query, key, value, mask, attended, scores, scale, threads);
        finish<Format>(after, attended, hidden, y, rest, rows);
    }
}

}  // namespace
