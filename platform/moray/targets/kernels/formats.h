// Vectors of the CPU that this is compiled for, and the number formats of weights and activations.
#pragma once
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

}  // namespace
