// What the files of the CPU backend share. Only they may look at the elements of a tensor.
#ifndef SHARD_CPU_H
#define SHARD_CPU_H

#include "error.h"
#include "tensor.h"

/** @brief The f32 elements of a tensor. */
static inline float *f32(struct tensor t) {
    CHECK(t.dtype == DTYPE_F32);
    return (float *)t.data;
}

/** @brief The I32 elements of a tensor. */
static inline int32_t *i32(struct tensor t) {
    CHECK(t.dtype == DTYPE_I32);
    return (int32_t *)t.data;
}

/** @brief The F64 elements of a tensor. */
static inline double *f64(struct tensor t) {
    CHECK(t.dtype == DTYPE_F64);
    return (double *)t.data;
}

enum { PREFETCH_FLOATS = 512 };

/**
 * @brief Asks for the floats that a loop over x will read PREFETCH_FLOATS later, a cache line
 * of 16.
 *
 * A loop with much arithmetic for each number has few loads under way at a time, and waits for
 * memory where the processor does not prefetch by itself, as in some virtual machines. The address
 * may lie behind the end.
 */
static inline void prefetch(const float *x) {
    __builtin_prefetch((const void *)((uintptr_t)x + PREFETCH_FLOATS * sizeof *x));
}

/** @brief The U8 elements of a tensor. */
static inline uint8_t *u8(struct tensor t) {
    CHECK(t.dtype == DTYPE_U8);
    return (uint8_t *)t.data;
}

// Work is cut into pieces of this size whatever the number of threads, so that the same sums are
// made in the same order on 1, 2 or 3 threads.
enum {
    PIECE_ROWS = 128, // rows of a matrix
    PIECE_COUNT = 1 << 14, // elements of a vector
};

/** @brief How many pieces of @p size cover @p count. */
static inline size_t pieces(size_t count, size_t size) {
    return (count + size - 1) / size;
}

/** @brief The elements of piece @p i: @p size, or what is left in the last one. */
static inline size_t piece_length(size_t count, size_t size, size_t i) {
    size_t left = count - i * size;
    return left < size ? left : size;
}

/**
 * @brief c = a b or c += a b on one thread, row-major, with leading dimensions.
 *
 * The one place that calls a GEMM library: oneDNN's where it was found, else CBLAS. Same bits for
 * same shapes and alignment.
 * @param a (m, k), or (k, m) if transpose_a
 * @param b (k, n), or (n, k) if transpose_b
 * @param c (m, n)
 */
void cpu_gemm(bool transpose_a, bool transpose_b, size_t m, size_t n, size_t k, const float *a,
              size_t lda, const float *b, size_t ldb, float *c, size_t ldc, bool add);

#endif
