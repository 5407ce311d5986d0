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

// Before a loop of known length (16 at most) over an array of vectors, which only in straight code
// are kept in registers.
#ifdef __clang__
#define UNROLL _Pragma("clang loop unroll(full)")
#else
#define UNROLL _Pragma("GCC unroll 16")
#endif

typedef float lanes __attribute__((vector_size(VECTOR_BYTES)));
typedef uint32_t lanes_bits __attribute__((vector_size(VECTOR_BYTES)));
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

/** @brief The lanes below @p count. */
static inline lanes_mask lanes_below(size_t count) {
    static const int32_t numbers[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    lanes_mask lane;
    memcpy(&lane, numbers, sizeof lane);
    return lane < (int32_t)count;
}

/** @brief The first @p count floats at p, all lanes at most; zeros follow. */
static inline lanes lanes_load_part(const float *p, size_t count) {
    if (count >= LANES) {
        return lanes_load(p);
    }
    float part[LANES] = {0};
    memcpy(part, p, count * sizeof *p);
    return lanes_load(part);
}

/** @brief Stores the first @p count lanes, all of them at most. */
static inline void lanes_store_part(float *p, size_t count, lanes v) {
    if (count >= LANES) {
        lanes_store(p, v);
    } else {
        float part[LANES];
        lanes_store(part, v);
        memcpy(p, part, count * sizeof *p);
    }
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

/** @brief a in the lanes of the mask, else b. */
static inline lanes lanes_select(lanes_mask mask, lanes a, lanes b) {
    return (lanes)(((lanes_mask)a & mask) | ((lanes_mask)b & ~mask));
}

/** @brief The larger of a and b in each lane; b where one is NaN. */
static inline lanes lanes_larger(lanes a, lanes b) {
    return lanes_select(a > b, a, b);
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

// Which lanes of a and b (numbered after a's) form the low and the high half of their exchange.
#define EXCHANGE_LOW(j, step) (((j) & (step)) != 0 ? LANES + (j) - (step) : (j))
#define EXCHANGE_HIGH(j, step) (((j) & (step)) != 0 ? LANES + (j) : (j) + (step))
#define FOUR_LANES(f, j, step) f(j, step), f((j) + 1, step), f((j) + 2, step), f((j) + 3, step)
#if VECTOR_BYTES == 64
#define ALL_LANES(f, step)                                                                         \
    FOUR_LANES(f, 0, step), FOUR_LANES(f, 4, step), FOUR_LANES(f, 8, step), FOUR_LANES(f, 12, step)
#elif VECTOR_BYTES == 32
#define ALL_LANES(f, step) FOUR_LANES(f, 0, step), FOUR_LANES(f, 4, step)
#else
#define ALL_LANES(f, step) FOUR_LANES(f, 0, step)
#endif
#define EXCHANGE(a, b, step)                                                                       \
    do {                                                                                           \
        lanes low = __builtin_shufflevector(a, b, ALL_LANES(EXCHANGE_LOW, (step) % LANES));        \
        b = __builtin_shufflevector(a, b, ALL_LANES(EXCHANGE_HIGH, (step) % LANES));               \
        a = low;                                                                                   \
    } while (0)

/**
 * @brief Transposes a square, in registers.
 *
 * Rows `step` apart exchange a's lanes that have the bit `step` in their number with b's that have
 * not; once for each bit.
 */
static inline __attribute__((always_inline)) void lanes_transpose(lanes square[LANES]) {
    UNROLL
    for (int step = 1; step < LANES; step *= 2) {
        UNROLL
        for (int i = 0; i < LANES; i++) {
            lanes *a = &square[i], *b = &square[(i + step) % LANES];
            if ((i & step) != 0) {
                continue;
            } else if (step == 1) {
                EXCHANGE(*a, *b, 1);
            } else if (step == 2) {
                EXCHANGE(*a, *b, 2);
            } else if (step == 4) {
                EXCHANGE(*a, *b, 4);
            } else {
                EXCHANGE(*a, *b, 8);
            }
        }
    }
}

/** @brief Lane i of the result is the sum of v[i]'s lanes, in halves. Uses up v. */
static inline lanes lanes_sum_each(lanes v[LANES]) {
    lanes_transpose(v);
    for (int n = LANES / 2; n > 0; n /= 2) {
        for (int i = 0; i < n; i++) {
            v[i] += v[i + n];
        }
    }
    return v[0];
}

/** @brief Lane i of the result is the largest of v[i]'s lanes. Uses up v. */
static inline lanes lanes_max_each(lanes v[LANES]) {
    lanes_transpose(v);
    for (int n = LANES / 2; n > 0; n /= 2) {
        for (int i = 0; i < n; i++) {
            v[i] = lanes_larger(v[i], v[i + n]);
        }
    }
    return v[0];
}

/**
 * @brief exp of each lane.
 *
 * exp(x) = 2^n exp(r) with n = round(x / ln 2), |r| <= ln(2)/2 and a polynomial of degree 6 for
 * exp(r), its coefficients fitted for the smallest relative error (3e-9). At most 0.9 units in the
 * last place from the true value (1.2 without fused multiply-add; tests/unit/test_loss.c measures
 * it). Results below 2^-126 become 0 (x < -87.33), those from 2^127.5 on infinity (x > 88.37);
 * exp(-infinity) is 0, exp(NaN) is NaN.
 */
static inline lanes lanes_exp(lanes x) {
    const float low = -87.33f, high = 88.37f;
    const lanes shift = lanes_all(0x1.8p23f); // adding it rounds to an integer, in the low bits
    lanes shifted = x * 0x1.715476p+0f + shift;
    lanes n = shifted - shift;
    lanes r = x - n * 0x1.62e4p-1f; // ln 2 in two parts; the product with the first is exact
    r = r - n * 0x1.7f7d1cp-20f;
    lanes p = 0x1.6a241ap-10f * r + 0x1.1239f2p-7f;
    p = p * r + 0x1.5558f2p-5f;
    p = p * r + 0x1.555492p-3f;
    p = p * r + 0x1.fffffcp-2f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    lanes power = (lanes)(((lanes_bits)shifted << 23) + (127u << 23)); // 2^n
    lanes_mask normal = ~(x < low), large = x > high;
    lanes result = (lanes)((lanes_mask)(p * power) & normal);
    return lanes_select(large, lanes_all(INFINITY), result);
}

/** @brief exp(x), as lanes_exp() has it. */
static inline float vector_exp(float x) {
    return lanes_exp(lanes_all(x))[0];
}

#endif
