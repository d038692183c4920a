// Linear layers, attention, and the parts of a decoder layer before and after it, for few rows, as fast as memory
// delivers the weights.
//
// A weight is packed into blocks of `BLOCK` outputs, and each thread reads its blocks from beginning to end: one
// stream, which is what a CPU's memory is fastest at. A block's sums stay in registers for up to `MAX_ROWS` rows, so
// these rows cost one reading of the weight. Every sum adds up in the same order, whatever the number of rows, blocks
// and threads: a row of the results has the same bits alone and among others.
//
// The compiler of the machine that runs this file compiles it for that machine's CPU (see build.py). It uses no C++
// library, so that it can be loaded next to any.
#include <math.h>
#include <stdint.h>

#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

namespace {

#if defined(__AVX512F__)  // 32 registers of 64 bytes
constexpr int VECTOR_BYTES = 64, WIDTH = 2, MAX_ROWS = 12, MAX_QUERIES = 4;
#elif defined(__AVX__)  // 16 of 32
constexpr int VECTOR_BYTES = 32, WIDTH = 2, MAX_ROWS = 6, MAX_QUERIES = 2;
#else  // NEON: 32 of 16; x86 without AVX has 16, and is slower
constexpr int VECTOR_BYTES = 16, WIDTH = 4, MAX_ROWS = 6, MAX_QUERIES = 4;
#endif
constexpr int LANES = VECTOR_BYTES / 4, BLOCK = WIDTH * LANES;
constexpr long MAX_HEAD = 256;  // numbers of a head, in attention

typedef float number __attribute__((may_alias));
typedef uint32_t pair __attribute__((may_alias, aligned(2)));
typedef float floats __attribute__((vector_size(VECTOR_BYTES), aligned(4), may_alias));
typedef uint32_t words __attribute__((vector_size(VECTOR_BYTES), aligned(4), may_alias));
typedef int32_t integers __attribute__((vector_size(VECTOR_BYTES), aligned(4), may_alias));
typedef uint16_t halves __attribute__((vector_size(VECTOR_BYTES / 2), aligned(2), may_alias));

// A number format: `Word` is what is multiplied at once, one float32 or two bfloat16.
struct Float32 {
    using Number = float;
    using Word = number;
    using Vector = floats;
    static constexpr long PER_WORD = 1;
    static float widened(Number number) { return number; }
    static floats widened_vector(const Number *numbers) { return *(const floats *)numbers; }
    static Number rounded(float value) { return value; }
    // sums += one vector of weights times one input of a row.
    static floats multiplied(floats sums, Vector weights, Word input) { return sums + weights * input; }
};

struct BFloat16 {
    using Number = uint16_t;
    using Word = pair;
    using Vector = words;
    static constexpr long PER_WORD = 2;
    static float widened(Number number) {
        union { uint32_t bits; float value; } wide = {uint32_t(number) << 16};
        return wide.value;
    }
    static floats widened_vector(const Number *numbers) {
        return (floats)(__builtin_convertvector(*(const halves *)numbers, words) << 16);
    }
    static Number rounded(float value) {  // to the nearest, ties to even
        union { float value; uint32_t bits; } exact = {value};
        if ((exact.bits & 0x7fffffff) > 0x7f800000) return 0x7fc0;  // NaN
        return Number((exact.bits + 0x7fff + ((exact.bits >> 16) & 1)) >> 16);
    }
    // The same for two inputs: a word of weights holds those of inputs 2j (low half) and 2j + 1.
    static floats multiplied(floats sums, Vector weights, Word input) {
#if defined(__AVX512BF16__)
        return (floats)_mm512_dpbf16_ps((__m512)sums, (__m512bh)weights, (__m512bh)_mm512_set1_epi32(int(input)));
#else
        words inputs = words{} + input;
        sums += (floats)(weights << 16) * (floats)(inputs << 16);
        return sums + (floats)(weights & 0xffff0000u) * (floats)(inputs & 0xffff0000u);
#endif
    }
};

void put(float value, float *to) { *to = value; }
void put(float value, uint16_t *to) { *to = BFloat16::rounded(value); }

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

// e^x, within two units in the last place: 2^whole times a polynomial of the rest.
inline floats exponential(floats x) {
    const floats lowest = floats{} - 87.0f, highest = floats{} + 88.0f;
    x = x < lowest ? lowest : x;
    x = x > highest ? highest : x;
    const float to_whole = 12582912.0f;  // 1.5 * 2^23: what is added to it is rounded to whole numbers
    const floats whole = x * 1.44269504f + to_whole - to_whole;
    const floats rest = x - whole * 0.693359375f + whole * 2.12194440e-4f;
    floats power = floats{} + 1.9875691500e-4f;
    power = power * rest + 1.3981999507e-3f;
    power = power * rest + 8.3334519073e-3f;
    power = power * rest + 4.1665795894e-2f;
    power = power * rest + 1.6666665459e-1f;
    power = power * rest + 5.0000001201e-1f;
    power = power * rest * rest + rest + 1.0f;
    return power * (floats)((__builtin_convertvector(whole, integers) + 127) << 23);
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
    for (int row = 0; row < rows; row++) totals[row] = exponentials(scores + row * padded, padded);
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

// Scaled dot-product attention -> out [batch, new, heads * head_dim]. scores holds padded floats for every query.
// Queries of a group are computed together, as far as that leaves enough work for every thread.
template <class Format>
void attention(const AttentionSizes &sizes, const void *query, const void *key, const void *value, const void *mask,
               void *out, float *scores, float scale, int threads) {
    using Number = typename Format::Number;
    const long rows = sizes.group * sizes.new_tokens, padded = (sizes.slots + LANES - 1) / LANES * LANES;
    const long heads = sizes.batch * sizes.kv_heads, all_heads = sizes.kv_heads * sizes.group;
    const long at_once = heads * ((rows + MAX_QUERIES - 1) / MAX_QUERIES) < 4 * threads ? 1 : long(MAX_QUERIES);
    const long parts = (rows + at_once - 1) / at_once;
#pragma omp parallel for num_threads(threads) schedule(static) collapse(2)
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
                scores + (place * rows + first) * padded, padded);
        }
}

}  // namespace

extern "C" {

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

// Outputs of a block, by which weights are packed.
int moray_block() { return BLOCK; }

// Numbers of a vector, of which a head must be a multiple for attention.
int moray_lanes() { return LANES; }

// The largest head for attention.
int moray_max_head() { return int(MAX_HEAD); }
}

namespace {

template <class Format>
void linear(const Weight &weight, const void *x, void *y, long rows, int threads) {
#pragma omp parallel num_threads(threads)
    product<Format>(weight, (const typename Format::Word *)x, (typename Format::Number *)y, rows);
}

// hidden [batch, new, hidden] -> queries, keys and values [batch, heads, new, head_dim], the first two rotated.
// scratch holds rows * (hidden + outputs) floats.
template <class Format>
void before_attention(const Before &layer, const void *hidden, const void *cosines, const void *sines, void *heads,
                      float *scratch, long batch, long new_tokens, int threads) {
    using Number = typename Format::Number;
    const long rows = batch * new_tokens, outputs = layer.qkv.outputs, half = layer.head_dim / 2;
    float *const sums = scratch;
    Number *const normed = (Number *)(scratch + rows * outputs);
#pragma omp parallel num_threads(threads)
    {
#pragma omp for schedule(static)
        for (long row = 0; row < rows; row++)
            normalise<Format>((const Number *)hidden + row * layer.hidden, layer.norm, layer.epsilon, layer.hidden,
                              normed + row * layer.hidden);
        product<Format>(layer.qkv, (const typename Format::Word *)normed, sums, rows);
#pragma omp for schedule(static) collapse(2)
        for (long row = 0; row < rows; row++)
            for (long head = 0; head < layer.num_heads; head++) {
                const long sequence = row / new_tokens, token = row % new_tokens;
                const float *from = sums + row * outputs + head * layer.head_dim;
                const long place = (sequence * layer.num_heads + head) * new_tokens + token;
                Number *to = (Number *)heads + place * layer.head_dim;
                if (head >= layer.num_rotated) {
                    for (long i = 0; i < layer.head_dim; i++) to[i] = Format::rounded(from[i]);
                    continue;
                }
                const Number *cosine = (const Number *)cosines + row * layer.head_dim;
                const Number *sine = (const Number *)sines + row * layer.head_dim;
                for (long i = 0; i < half; i++) {
                    const float first = from[i], second = from[i + half];
                    to[i] = Format::rounded(first * Format::widened(cosine[i]) - second * Format::widened(sine[i]));
                    to[i + half] = Format::rounded(second * Format::widened(cosine[i + half]) +
                                                   first * Format::widened(sine[i + half]));
                }
            }
    }
}

// attended [rows, heads * head_dim] and hidden [rows, hidden] -> y [rows, hidden]: the output projection, the norm and
// the MLP with SiLU, each added to what came in. scratch holds rows * (3 * hidden + 3 * intermediate) floats.
template <class Format>
void after_attention(const After &layer, const void *attended, const void *hidden, void *y, float *scratch, long rows,
                     int threads) {
    using Number = typename Format::Number;
    using Word = typename Format::Word;
    const long width = layer.hidden, inner = layer.intermediate;
    float *const sums = scratch, *const wide = sums + rows * width;
    Number *const middle = (Number *)(wide + rows * 2 * inner), *const normed = middle + rows * width;
    Number *const active = normed + rows * width;
#pragma omp parallel num_threads(threads)
    {
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
}

}  // namespace

extern "C" {

void moray_linear_float32(const Weight *weight, const void *x, void *y, long rows, int threads) {
    linear<Float32>(*weight, x, y, rows, threads);
}

void moray_linear_bfloat16(const Weight *weight, const void *x, void *y, long rows, int threads) {
    linear<BFloat16>(*weight, x, y, rows, threads);
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
    after_attention<Float32>(*layer, attended, hidden, y, scratch, rows, threads);
}

void moray_after_attention_bfloat16(const After *layer, const void *attended, const void *hidden, void *y,
                                     float *scratch, long rows, int threads) {
    after_attention<BFloat16>(*layer, attended, hidden, y, scratch, rows, threads);
}

void moray_attention_float32(const AttentionSizes *sizes, const void *query, const void *key, const void *value,
                             const void *mask, void *out, float *scores, float scale, int threads) {
    attention<Float32>(*sizes, query, key, value, mask, out, scores, scale, threads);
}

void moray_attention_bfloat16(const AttentionSizes *sizes, const void *query, const void *key, const void *value,
                              const void *mask, void *out, float *scores, float scale, int threads) {
    attention<BFloat16>(*sizes, query, key, value, mask, out, scores, scale, threads);
}
}
