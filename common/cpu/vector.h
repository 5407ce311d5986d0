// Vectors of floats for the loops that compilers do not vectorise well by themselves: one register
// wide, in the vector extension that gcc and clang share.
//
// The build lets these files contract a * b + c into one fused instruction (-ffp-contract=fast):
// see CMakeLists.txt.
#ifndef SHARD_CPU_VECTOR_H
#define SHARD_CPU_VECTOR_H

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__)
#define VECTOR_BYTES 64
#elif defined(__AVX__)
#define VECTOR_BYTES 32
#else
#define VECTOR_BYTES 16
#endif

enum { LANES = VECTOR_BYTES / 4 };

typedef float lanes __attribute__((vector_size(VECTOR_BYTES)));
typedef int32_t lanes_mask __attribute__((vector_size(VECTOR_BYTES)));

// The same in memory, where only the alignment of a float is certain.
typedef float lanes_in_memory __attribute__((vector_size(VECTOR_BYTES), aligned(4), may_alias));

/** @brief p[0 … LANES-1]; any alignment. */
static inline lanes lanes_load(const float *p) {
    return *(const lanes_in_memory *)p;
}

/** @brief Stores p[0 … LANES-1]; any alignment. */
static inline void lanes_store(float *p, lanes v) {
    *(lanes_in_memory *)p = v;
}

/** @brief x in every lane. */
static inline lanes lanes_all(float x) {
    return x - (lanes){0};
}

/** @brief The sum of all lanes, in halves: fixed order. */
static inline float lanes_sum(lanes v) {
    float a[LANES];
    lanes_store(a, v);
    for (int n = LANES / 2; n > 0; n /= 2) {
        for (int l = 0; l < n; l++) {
            a[l] += a[l + n];
        }
    }
    return a[0];
}

/** @brief a where a > b, else b. */
static inline lanes lanes_larger(lanes a, lanes b) {
    lanes_mask above = a > b;
    return (lanes)(((lanes_mask)a & above) | ((lanes_mask)b & ~above));
}

/** @brief The largest of x (count); -infinity if there is none. A NaN may be passed over. */
static inline float vector_max(const float *x, size_t count) {
    lanes high = lanes_all(-INFINITY);
    size_t i = 0;
    for (; i + LANES <= count; i += LANES) {
        high = lanes_larger(lanes_load(x + i), high);
    }
    float all[LANES], max = -INFINITY;
    lanes_store(all, high);
    for (size_t l = 0; l < LANES; l++) {
        max = all[l] > max ? all[l] : max;
    }
    for (; i < count; i++) {
        max = x[i] > max ? x[i] : max;
    }
    return max;
}

/**
 * @brief The dot product of a and b, both (count), in LANES sums of every LANES-th product. The
 * bits do not depend on alignment.
 */
static inline float vector_dot(const float *a, const float *b, size_t count) {
    lanes sum = {0};
    size_t i = 0;
    for (; i + LANES <= count; i += LANES) {
        sum += lanes_load(a + i) * lanes_load(b + i);
    }
    float total = lanes_sum(sum);
    for (; i < count; i++) {
        total += a[i] * b[i];
    }
    return total;
}

/**
 * @brief exp(x), without branches, so that a loop around it is vectorised.
 *
 * exp(x) = 2^n exp(r) with n = round(x / ln 2), |r| <= ln(2)/2 and a polynomial of degree 6 for
 * exp(r), its coefficients fitted for the smallest relative error (3e-9). At most 1.5 units in the
 * last place from the true value (tests/unit/test_llama_ops.c measures it). Results below 2^-125
 * become 0 (x < -86.6), those above the largest float infinity; exp(-infinity) is 0, exp(NaN) is
 * NaN.
 */
static inline float vector_exp(float x) {
    const float low = -86.6f, high = 89.0f;
    const float shift = 0x1.8p23f; // adding it rounds to an integer, found in the low bits
    float c = x > high ? high : x; // NaN stays
    c = c < low ? low : c;
    float shifted = c * 0x1.715476p+0f + shift;
    float n = shifted - shift;
    float r = c - n * 0x1.62e4p-1f; // ln 2 in two parts, the product with the first is exact
    r = r - n * 0x1.7f7d1cp-20f;
    float p = 0x1.6a241ap-10f;
    p = p * r + 0x1.1239f2p-7f;
    p = p * r + 0x1.5558f2p-5f;
    p = p * r + 0x1.555492p-3f;
    p = p * r + 0x1.fffffcp-2f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    int32_t bits;
    memcpy(&bits, &shifted, 4);
    bits = (int32_t)((uint32_t)bits << 23) + (126 << 23); // 2^(n-1)
    float scale;
    memcpy(&scale, &bits, 4);
    p = p * scale * 2.0f; // in two steps, since 2^128 is no float
    return x < low ? 0.0f : p;
}

#endif
