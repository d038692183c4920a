// Linear layers, attention, and decoder layers, for few rows, as fast as memory delivers the weights: the functions
// that Python calls (see compiled.py). Every sum adds up in the same order, whatever the number of rows, blocks and
// threads: a row of the results has the same bits alone and among others.
//
// The compiler of the machine that runs these files compiles them for that machine's CPU (see build.py). They use no C++
// library, so that the result can be loaded next to any.
#include "layer.h"

extern "C" {

// Outputs of a block, by which weights are packed.
int moray_block() { return BLOCK; }

// Numbers of a vector, of which a head must be a multiple for attention.
int moray_lanes() { return LANES; }

// The largest head for attention.
int moray_max_head() { return int(MAX_HEAD); }

// Queries that a thread computes together, for which attention needs scratch.
int moray_max_queries() { return MAX_QUERIES; }

void moray_linear_float32(const Weight *weight, const void *x, void *y, long rows, int threads) {
#pragma omp parallel num_threads(threads)
    product<Float32>(*weight, (const Float32::Word *)x, (Float32::Number *)y, rows);
}

void moray_linear_bfloat16(const Weight *weight, const void *x, void *y, long rows, int threads) {
#pragma omp parallel num_threads(threads)
    product<BFloat16>(*weight, (const BFloat16::Word *)x, (BFloat16::Number *)y, rows);
}

void moray_before_attention_float32(const Before *layer, const void *hidden, const void *cosines, const void *sines,
                                    void *heads, float *scratch, long batch, long new_tokens, int threads) {
    before_attention<Float32>(*layer, hidden, cosines, sines, heads, scratch, batch, new_tokens, threads);
}

void moray_before_attention_bfloat16(const Before *layer, const void *hidden, const void *cosines, const void *sines,
                                     void *heads, float *scratch, long batch, long new_tokens, int threads) {
    before_attention<BFloat16>(*layer, hidden, cosines, sines, heads, scratch, batch, new_tokens, threads);
}

void moray_after_attention_float32(const After *layer, const void *attended, const void *hidden, void *y,
                                    float *scratch, long rows, int threads) {
#pragma omp parallel num_threads(threads)
    finish<Float32>(*layer, attended, hidden, y, scratch, rows);
}

void moray_after_attention_bfloat16(const After *layer, const void *attended, const void *hidden, void *y,
                                     float *scratch, long rows, int threads) {
#pragma omp parallel num_threads(threads)
    finish<BFloat16>(*layer, attended, hidden, y, scratch, rows);
}

void moray_attention_float32(const AttentionSizes *sizes, const void *query, const void *key, const void *value,
                             const void *mask, void *out, float *scores, float scale, int threads) {
#pragma omp parallel num_threads(threads)
    attend<Float32>(*sizes, query, key, value, mask, out, scores, scale, threads);
}

void moray_attention_bfloat16(const AttentionSizes *sizes, const void *query, const void *key, const void *value,
                              const void *mask, void *out, float *scores, float scale, int threads) {
#pragma omp parallel num_threads(threads)
    attend<BFloat16>(*sizes, query, key, value, mask, out, scores, scale, threads);
}

void moray_layer_float32(const Before *before, const After *after, const AttentionSizes *sizes, const void *hidden,
                         const void *cosines, const void *sines, void *key, void *value, const int64_t *slots,
                         long begin, const void *mask, void *y, float *scratch, float scale, int threads) {
    layer<Float32>(*before, *after, *sizes, hidden, cosines, sines, key, value, slots, begin, mask, y, scratch, scale,
                   threads);
}

void moray_layer_bfloat16(const Before *before, const After *after, const AttentionSizes *sizes, const void *hidden,
                          const void *cosines, const void *sines, void *key, void *value, const int64_t *slots,
                          long begin, const void *mask, void *y, float *scratch, float scale, int threads) {
    layer<BFloat16>(*before, *after, *sizes, hidden, cosines, sines, key, value, slots, begin, mask, y, scratch, scale,
                    threads);
}
}
