// Sums of the ranks' values, always in the order of the ranks: rank 0's value, plus rank 1's, plus
// rank 2's, … whoever adds them. So a sum does not depend on the algorithm, and is the same bits in
// every run.
#include "cast.h"
#include "error.h"
#include "transport.h"
#include <math.h>
#include <string.h>

enum { BLOCK = 1024 }; // elements at a time, so that partial sums stay in the first-level cache

#define DEFINE_REDUCE(type, name)                                                                  \
    static void sum_##name(type *restrict y, const type *x, size_t count) {                        \
        for (size_t i = 0; i < count; i++) {                                                       \
            y[i] += x[i];                                                                          \
        }                                                                                          \
    }                                                                                              \
    static void add_##name(type *y, const type *a, const type *b, size_t count) {                  \
        for (size_t i = 0; i < count; i++) {                                                       \
            y[i] = a[i] + b[i];                                                                    \
        }                                                                                          \
    }                                                                                              \
    static void max_##name(type *restrict y, const type *x, size_t count) {                        \
        for (size_t i = 0; i < count; i++) {                                                       \
            y[i] = x[i] > y[i] || x[i] != x[i] ? x[i] : y[i]; /* NaN wins */                       \
        }                                                                                          \
    }                                                                                              \
    static void reduce_##name(type *y, const void *const *sources, int n, size_t begin,            \
                              size_t count, enum comm_op op) {                                     \
        type block[BLOCK];                                                                         \
        if (n == 2 && op == COMM_SUM) {                                                            \
            add_##name(y, (const type *)sources[0] + begin, (const type *)sources[1] + begin,      \
                       count);                                                                     \
            return;                                                                                \
        }                                                                                          \
        memcpy(block, (const type *)sources[0] + begin, count * sizeof *block);                    \
        for (int r = 1; r < n; r++) {                                                              \
            const type *x = (const type *)sources[r] + begin;                                      \
            if (op == COMM_SUM) {                                                                  \
                sum_##name(block, x, count);                                                       \
            } else {                                                                               \
                max_##name(block, x, count);                                                       \
            }                                                                                      \
        }                                                                                          \
        memcpy(y, block, count * sizeof *block);                                                   \
    }

DEFINE_REDUCE(float, f32)
DEFINE_REDUCE(double, f64)
DEFINE_REDUCE(int32_t, i32)

// In f32, rounded once at the end.
static void reduce_half(uint16_t *y, const void *const *sources, int n, size_t begin, size_t count,
                        enum dtype dtype, enum comm_op op) {
    float total[BLOCK], x[BLOCK];
    cast_to_f32(total, (const uint16_t *)sources[0] + begin, dtype, count);
    for (int r = 1; r < n; r++) {
        cast_to_f32(x, (const uint16_t *)sources[r] + begin, dtype, count);
        if (op == COMM_SUM) {
            sum_f32(total, x, count);
        } else {
            max_f32(total, x, count);
        }
    }
    cast_from_f32(y, dtype, total, count);
}

void reduce_in_order(void *dst, const void *const *sources, int n, size_t count, enum dtype dtype,
                     enum comm_op op) {
    for (size_t i = 0; i < count; i += BLOCK) {
        size_t length = count - i < BLOCK ? count - i : BLOCK;
        switch (dtype) {
        case DTYPE_F32:
            reduce_f32((float *)dst + i, sources, n, i, length, op);
            break;
        case DTYPE_F64:
            reduce_f64((double *)dst + i, sources, n, i, length, op);
            break;
        case DTYPE_I32:
            reduce_i32((int32_t *)dst + i, sources, n, i, length, op);
            break;
        case DTYPE_BF16:
        case DTYPE_F16:
            reduce_half((uint16_t *)dst + i, sources, n, i, length, dtype, op);
            break;
        case DTYPE_U8:
            error_fatal(__FILE__, __LINE__, "no reduction of %s", dtype_name(dtype));
        }
    }
}
