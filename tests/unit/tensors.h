// What the tests of ops share: tensors with known content, and comparisons that say what differs.
//
// Only device_upload() and device_download() touch a tensor here, so the same tests run on a GPU.
#ifndef SHARD_TESTS_TENSORS_H
#define SHARD_TESTS_TENSORS_H

#include "device.h"
#include "mem.h"
#include "tensor.h"
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#undef test_free // cmocka's, for memory of its test_malloc(), which no test here uses

// ---- tensors -----------------------------------------------------------------------------------

// Each test tensor lies in a frame of this many elements before and after it, all bits one: NaN for
// an op that reads beyond its edge, and checked by test_free() for one that writes there.
enum { TEST_FRAME = 64 };

/** @brief A tensor of undefined content (all bits one) in a frame. Free it with test_free(). */
static inline struct tensor test_tensor(size_t rows, size_t cols, enum dtype dtype) {
    struct tensor whole = tensor_alloc(1, rows * cols + 2 * TEST_FRAME, dtype, MEM_ACTIVATIONS);
    device_poison(whole.data, tensor_count(whole) * dtype_size(dtype));
    return tensor_view(whole, TEST_FRAME, rows, cols);
}

/** @brief Frees what test_tensor() returned, and fails if its frame was written to. */
static inline void test_free(struct tensor *t) {
    size_t size = dtype_size(t->dtype), count = tensor_count(*t) * size, frame = TEST_FRAME * size;
    struct tensor whole = *t;
    whole.data = (struct device_data *)((char *)t->data - frame);
    whole.rows = 1;
    whole.cols = tensor_count(*t) + 2 * TEST_FRAME;
    unsigned char *host = malloc(count + 2 * frame);
    device_download(host, whole);
    for (size_t i = 0; i < count + 2 * frame; i++) {
        if ((i < frame || i >= frame + count) && host[i] != 0xff) {
            fail_msg("byte %td of a (%zu, %zu) tensor of %s was written, beyond its %zu bytes",
                     (ptrdiff_t)i - (ptrdiff_t)frame, t->rows, t->cols, dtype_name(t->dtype),
                     count);
        }
    }
    free(host);
    tensor_free(&whole);
    *t = (struct tensor){0};
}

/** @brief A tensor of type F32 that holds @p values (rows, cols). */
static inline struct tensor test_floats(size_t rows, size_t cols, const float *values) {
    struct tensor t = test_tensor(rows, cols, DTYPE_F32);
    device_upload(t, values);
    return t;
}

/** @brief A tensor of type I32 that holds @p values (rows, cols). */
static inline struct tensor test_ints(size_t rows, size_t cols, const int32_t *values) {
    struct tensor t = test_tensor(rows, cols, DTYPE_I32);
    device_upload(t, values);
    return t;
}

/** @brief The next number of a small generator (xorshift64*), uniform in [-1, 1) with 24 bits, so
 * exact as a float. @p state is any number but 0. */
static inline double test_random(uint64_t *state) {
    *state ^= *state >> 12;
    *state ^= *state << 25;
    *state ^= *state >> 27;
    return (double)((*state * 0x2545F4914F6CDD1DULL) >> 40) * 0x1p-23 - 1.0;
}

/** @brief A whole number in [0, limit), of the same generator. */
static inline int32_t test_random_int(uint64_t *state, int32_t limit) {
    return (int32_t)((test_random(state) + 1.0) * 0.5 * limit);
}

/** @brief An F32 tensor of random numbers, uniform in [-scale, scale). */
static inline struct tensor test_uniform(size_t rows, size_t cols, double scale, uint64_t *state) {
    float *values = malloc((rows * cols + 1) * sizeof *values);
    for (size_t i = 0; i < rows * cols; i++) {
        values[i] = (float)(scale * test_random(state));
    }
    struct tensor t = test_floats(rows, cols, values);
    free(values);
    return t;
}

/** @brief A copy of @p t in host memory, in its own type; the caller frees it. */
static inline void *test_host(struct tensor t) {
    void *host = malloc(tensor_count(t) * dtype_size(t.dtype) + 1);
    device_download(host, t);
    return host;
}

/** @brief A copy of an F32, F64 or I32 tensor as doubles; the caller frees it. */
static inline double *test_doubles(struct tensor t) {
    void *host = test_host(t);
    double *out = calloc(tensor_count(t) + 1, sizeof *out);
    for (size_t i = 0; i < tensor_count(t); i++) {
        out[i] = t.dtype == DTYPE_F32   ? (double)((float *)host)[i]
                 : t.dtype == DTYPE_I32 ? (double)((int32_t *)host)[i]
                                        : ((double *)host)[i];
    }
    free(host);
    return out;
}

// ---- comparisons -------------------------------------------------------------------------------

/** @brief Whether both are NaN, or equal infinities. */
static inline bool test_same_special(double a, double b) {
    return (isnan(a) && isnan(b)) || (isinf(a) && a == b);
}

/**
 * @brief Fails unless @p got is @p want within a tolerance, by norm and by element; prints a PASS
 * line with the largest error and where it is.
 *
 * The error by norm is |got - want| / |want|. That of an element is |got - want| divided by the
 * larger of |want| and the root mean square of all, since an element that is a small difference of
 * large terms has their rounding errors. A NaN or an infinity must be where it is expected.
 * @param want (rows, cols) of got
 */
static inline void test_close(const char *name, struct tensor got, const double *want,
                              double norm_tolerance, double element_tolerance) {
    double *g = test_doubles(got);
    size_t count = tensor_count(got), worst = 0;
    double difference = 0, square = 0, worst_error = 0;
    for (size_t i = 0; i < count; i++) {
        square += isfinite(want[i]) ? want[i] * want[i] : 0;
    }
    double rms = sqrt(square / (double)(count > 0 ? count : 1));
    for (size_t i = 0; i < count; i++) {
        double d = test_same_special(g[i], want[i]) ? 0 : fabs(g[i] - want[i]);
        double error = d == 0 ? 0 : d / fmax(fabs(want[i]), rms);
        difference += d * d;
        if (!(error <= worst_error)) { // also for NaN
            worst_error = error;
            worst = i;
            if (isnan(error)) {
                break;
            }
        }
    }
    double norm_error = difference == 0 ? 0 : sqrt(difference) / sqrt(square);
    bool passed = norm_error <= norm_tolerance && worst_error <= element_tolerance;
    if (count > 0) {
        size_t row = worst / got.cols, col = worst % got.cols;
        print_message("%s %s: error %.2g by norm (at most %.2g), %.2g by element (at most %.2g) at "
                      "(%zu, %zu): %.9g, expected %.9g\n",
                      passed ? "PASS" : "FAIL", name, norm_error, norm_tolerance, worst_error,
                      element_tolerance, row, col, g[worst], want[worst]);
    }
    free(g);
    assert_true(passed);
}

/** @brief Fails unless every element is exactly @p value. */
static inline void test_all_equal(const char *name, struct tensor got, double value) {
    double *g = test_doubles(got);
    for (size_t i = 0; i < tensor_count(got); i++) {
        if (g[i] != value) {
            fail_msg("%s: element %zu is %.9g, expected %.9g", name, i, g[i], value);
        }
    }
    free(g);
}

/**
 * @brief Fails unless @p t holds the same bits as in the first call with the same @p kept.
 *
 * The first call keeps a copy in *kept, which must be NULL; the caller frees it.
 */
static inline void test_same_bits(const char *name, struct tensor t, void **kept) {
    void *now = test_host(t);
    if (*kept == NULL) {
        *kept = now;
        return;
    }
    size_t size = dtype_size(t.dtype);
    for (size_t i = 0; i < tensor_count(t); i++) {
        if (memcmp((char *)now + i * size, (char *)*kept + i * size, size) != 0) {
            fail_msg("%s: element (%zu, %zu) has other bits with %d threads than with 1", name,
                     i / t.cols, i % t.cols, device_threads());
        }
    }
    free(now);
}

/**
 * @brief The gradient of f by central differences: out[i] = df / dx[i]; the caller frees it.
 *
 * The step is 1e-4, for values of about 1: its error, h^2 / 6 times the third derivative, is about
 * 1e-8, below what f32 can show.
 * @param x (count), read by f, and as before afterwards
 * @param f what is differentiated, in double
 */
static inline double *test_gradient(double *x, size_t count, double (*f)(void *context),
                                    void *context) {
    const double step = 1e-4;
    double *out = calloc(count + 1, sizeof *out);
    for (size_t i = 0; i < count; i++) {
        double before = x[i];
        x[i] = before + step;
        double high = f(context);
        x[i] = before - step;
        double low = f(context);
        x[i] = before;
        out[i] = (high - low) / (2 * step);
    }
    return out;
}

#endif
