// Attention of few queries to keys and values in a cache.
#pragma once
#include <omp.h>

#include "formats.h"

namespace {

// Lane i of the result is the sum of all lanes of vectors[i], for `count` <= LANES vectors; overwrites them. Each step
// interleaves vectors i and i + count / 2, half of their lanes added to the other half.
template <int count>
inline floats added_up(floats *vectors) {
    if constexpr (count == 1) {
        return vectors[0];
    } else {
        integers low, high;
        for (int lane = 0; lane < LANES; lane++) {
            low[lane] = lane / 2 + lane % 2 * LANES;
            high[lane] = low[lane] + LANES / 2;
        }
        for (int i = 0; i < count / 2; i++) {
            const floats first = vectors[i], second = vectors[i + count / 2];
            vectors[i] = __builtin_shuffle(first, second, low) + __builtin_shuffle(first, second, high);
        }
        return added_up<count / 2>(vectors);
    }
}

// Scores become shares: e^(score - highest), whose sum is returned. `count` is a multiple of LANES.
inline float exponentials(float *scores, long count) {
    floats highest = floats{} - INFINITY, total = {};
    for (long i = 0; i < count; i += LANES) {
        const floats some = *(const floats *)(scores + i);
        highest = some > highest ? some : highest;
    }
    float most = -INFINITY;
    for (int lane = 0; lane < LANES; lane++) most = highest[lane] > most ? highest[lane] : most;
    if (most == -INFINITY) most = 0;  // a mask hides everything: all shares are 0
    for (long i = 0; i < count; i += LANES) {
        const floats below = *(const floats *)(scores + i) - most;
        const floats share = below < -87.0f ? floats{} : exponential(below);
        *(floats *)(scores + i) = share;
        total += share;
    }
    float sum = 0;
    for (int lane = 0; lane < LANES; lane++) sum += total[lane];
    return sum;
}

// Sizes of attention, in numbers; the same fields as in attention.py. A query head reads the keys and values of its
// group's head. The last dimension of every tensor lies side by side.
struct AttentionSizes {
    long batch, kv_heads, group, new_tokens, slots, head_dim;
    long query_batch, query_head, query_token, key_batch, key_head, key_slot, value_batch, value_head, value_slot;
    long mask_batch, mask_token;
};

// Where `count` <= MAX_QUERIES queries of one key/value head are, and what they are for.
template <class Format>
struct Queries {
    const typename Format::Number *query[MAX_QUERIES], *mask[MAX_QUERIES];
    typename Format::Number *out[MAX_QUERIES];
};

// A part of the results: `vectors` vectors of each head, the sums over all slots of shares times values.
template <class Format, int rows, int vectors>
inline void weighted_values(const typename Format::Number *value, long stride, long slots, const float *shares,
                            long padded, const float *totals, const Queries<Format> &queries, long first) {
    floats sums[rows][vectors] = {};
    for (long slot = 0; slot < slots; slot++, value += stride) {
        floats values[vectors];
        for (int v = 0; v < vectors; v++) values[v] = Format::widened_vector(value + v * LANES);
        for (int row = 0; row < rows; row++)
            for (int v = 0; v < vectors; v++) sums[row][v] += values[v] * shares[row * padded + slot];
    }
    for (int row = 0; row < rows; row++)
        for (int v = 0; v < vectors; v++)
            for (int lane = 0; lane < LANES; lane++)
                queries.out[row][first + v * LANES + lane] = Format::rounded(sums[row][v][lane] / totals[row]);
}

// Attention of `rows` queries to the keys and values of one head. scores holds rows * padded floats, where `padded` is
// the number of slots, rounded up to a multiple of LANES.
template <class Format, int rows>
void attend_queries(const AttentionSizes &sizes, const typename Format::Number *key,
                    const typename Format::Number *value, float scale, const Queries<Format> &queries, float *scores,
                    long padded) {
    constexpr int PART = 4;  // vectors of values that are read at once
    const long slots = sizes.slots, width = sizes.head_dim;
    float scaled[rows * MAX_HEAD], keys[LANES * MAX_HEAD], totals[rows];
    for (int row = 0; row < rows; row++)
        for (long i = 0; i < width; i++) scaled[row * MAX_HEAD + i] = Format::widened(queries.query[row][i]) * scale;
    for (long begin = 0; begin < slots; begin += LANES) {
        const long count = slots - begin < LANES ? slots - begin : long(LANES);
        for (long slot = 0; slot < LANES; slot++)
            for (long i = 0; i < width; i += LANES)
                *(floats *)(keys + slot * MAX_HEAD + i) =
                    slot < count ? Format::widened_vector(key + (begin + slot) * sizes.key_slot + i) : floats{};
        for (int row = 0; row < rows; row++) {
            floats sums[LANES] = {};
            for (long i = 0; i < width; i += LANES) {
                const floats query = *(const floats *)(scaled + row * MAX_HEAD + i);
                for (int slot = 0; slot < LANES; slot++)
                    sums[slot] += query * *(const floats *)(keys + slot * MAX_HEAD + i);
            }
            floats score = added_up<LANES>(sums);
            const typename Format::Number *mask = queries.mask[row] ? queries.mask[row] + begin : nullptr;
            if (count == LANES) {
                if (mask) score += Format::widened_vector(mask);
            } else {
                for (long slot = 0; slot < LANES; slot++)
                    score[slot] = slot < count ? score[slot] + (mask ? Format::widened(mask[slot]) : 0) : -INFINITY;
            }
            *(floats *)(scores + row * padded + begin) = score;
        }
    }
    for (int row = 0; row < rows; row++) {
        const float total = exponentials(scores + row * padded, padded);
        totals[row] = total == 0 ? 1 : total;
    }
    long first = 0;
    for (; first + PART * LANES <= width; first += PART * LANES)
        weighted_values<Format, rows, PART>(value + first, sizes.value_slot, slots, scores, padded, totals, queries,
                                            first);
    for (; first < width; first += LANES)
        weighted_values<Format, rows, 1>(value + first, sizes.value_slot, slots, scores, padded, totals, queries,
                                         first);
}

// `attend_queries` for a number of queries that is known only now.
template <class Format, int most, class... Rest>
inline void attend_some(long rows, const Rest &...rest) {
    if constexpr (most > 1)
        if (rows < most) return attend_some<Format, most - 1>(rows, rest...);
    attend_queries<Format, most>(rest...);
}

// Scaled dot-product attention -> out [batch, new, heads * head_dim], shared by the threads of a parallel region, which
// wait at the end. scores holds MAX_QUERIES * padded floats for every thread. Queries of a group are computed together, as
// far as that leaves enough work for every thread.
template <class Format>
void attend(const AttentionSizes &sizes, const void *query, const void *key, const void *value, const void *mask,
            void *out, float *scores, float scale, int threads) {
    using Number = typename Format::Number;
    const long rows = sizes.group * sizes.new_tokens, padded = (sizes.slots + LANES - 1) / LANES * LANES;
    const long heads = sizes.batch * sizes.kv_heads, all_heads = sizes.kv_heads * sizes.group;
    const long at_once = heads * ((rows + MAX_QUERIES - 1) / MAX_QUERIES) < 4 * threads ? 1 : long(MAX_QUERIES);
    const long parts = (rows + at_once - 1) / at_once;
#pragma omp for schedule(static) collapse(2)
    for (long place = 0; place < heads; place++)
        for (long part = 0; part < parts; part++) {
            const long sequence = place / sizes.kv_heads, head = place % sizes.kv_heads, first = part * at_once;
            const long count = rows - first < at_once ? rows - first : at_once;
            Queries<Format> queries;
            for (long i = 0; i < count; i++) {
                const long own = head * sizes.group + (first + i) / sizes.new_tokens;
                const long token = (first + i) % sizes.new_tokens;
                queries.query[i] = (const Number *)query + sequence * sizes.query_batch + own * sizes.query_head +
                                   token * sizes.query_token;
                queries.mask[i] =
                    mask ? (const Number *)mask + sequence * sizes.mask_batch + token * sizes.mask_token : nullptr;
                queries.out[i] = (Number *)out + ((sequence * sizes.new_tokens + token) * all_heads + own) *
                                                     sizes.head_dim;
            }
            attend_some<Format, MAX_QUERIES>(
                count, sizes, (const Number *)key + sequence * sizes.key_batch + head * sizes.key_head,
                (const Number *)value + sequence * sizes.value_batch + head * sizes.value_head, scale, queries,
                scores + omp_get_thread_num() * MAX_QUERIES * padded, padded);
        }
}

}  // namespace
