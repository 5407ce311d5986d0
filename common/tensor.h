// A tensor is a matrix in device memory: a handle, passed by value.
#ifndef SHARD_TENSOR_H
#define SHARD_TENSOR_H

#include "mem.h"
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum dtype {
    DTYPE_F32,
    DTYPE_BF16,
    DTYPE_F16,
    DTYPE_F64,
    DTYPE_I32,
    DTYPE_U8,
};

// Elements of a tensor may lie on a GPU, so nobody but a backend may look at them: outside of
// common/cpu and common/cuda this type stays incomplete, and `t.data[i]` does not compile.
struct device_data;

/**
 * @brief A matrix, row-major and dense. A batch of anything longer has its other dimensions in the
 * columns: images are (samples, height*width*channels), a vector of C elements is (C, 1).
 *
 * The zero value, `(struct tensor){0}`, is "no tensor".
 */
struct tensor {
    struct device_data *data; // (rows, cols), aligned to 64 bytes unless it is a view; or NULL
    size_t rows;
    size_t cols;
    enum dtype dtype;
    enum mem_category category; // what the memory is charged to
};

/** @brief Bytes of one element. */
size_t dtype_size(enum dtype dtype);

/** @brief The name in safetensors files: "F32", "BF16", "F16", "F64", "I32", "U8". */
const char *dtype_name(enum dtype dtype);

/** @brief Allocates; the content is undefined. Local. Free it with tensor_free(). A tensor without
 * rows or columns is legal. */
struct tensor tensor_alloc(size_t rows, size_t cols, enum dtype dtype, enum mem_category category);

/** @brief Frees what tensor_alloc() returned and sets it to "no tensor". Local. Never call it on a
 * view; "no tensor" is ignored. */
void tensor_free(struct tensor *t);

/** @brief The @p rows x @p cols elements of @p t that begin at element @p offset, as a tensor that
 * shares its memory. Local. Ends the program if they are not inside @p t. */
struct tensor tensor_view(struct tensor t, size_t offset, size_t rows, size_t cols);

/** @brief Allocates a tensor of the same shape, type and category as @p t. Local. */
struct tensor tensor_like(struct tensor t);

/** @brief rows x cols. */
static inline size_t tensor_count(struct tensor t) {
    return t.rows * t.cols;
}

/** @brief Whether there is one: false for the zero value. A tensor of 0 rows exists. */
static inline bool tensor_exists(struct tensor t) {
    return t.data != NULL;
}

#ifdef __cplusplus
}
#endif
#endif
