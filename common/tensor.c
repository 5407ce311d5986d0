#include "tensor.h"
#include "error.h"

static const struct {
    size_t bytes;
    const char *name;
} DTYPES[] = {
    [DTYPE_F32] = {4, "F32"}, [DTYPE_BF16] = {2, "BF16"}, [DTYPE_F16] = {2, "F16"},
    [DTYPE_F64] = {8, "F64"}, [DTYPE_I32] = {4, "I32"},   [DTYPE_U8] = {1, "U8"},
};

size_t dtype_size(enum dtype dtype) {
    return DTYPES[dtype].bytes;
}

const char *dtype_name(enum dtype dtype) {
    return DTYPES[dtype].name;
}

static size_t tensor_bytes(struct tensor t) {
    return tensor_count(t) * dtype_size(t.dtype);
}

struct tensor tensor_alloc(size_t rows, size_t cols, enum dtype dtype, enum mem_category category) {
    struct tensor t = {
        .rows = rows,
        .cols = cols,
        .dtype = dtype,
        .category = category,
    };
    t.data = mem_alloc(tensor_bytes(t), category);
    return t;
}

void tensor_free(struct tensor *t) {
    mem_free(t->data, tensor_bytes(*t), t->category);
    *t = (struct tensor){0};
}

struct tensor tensor_view(struct tensor t, size_t offset, size_t rows, size_t cols) {
    CHECK(offset <= tensor_count(t) && rows * cols <= tensor_count(t) - offset);
    t.data = (struct device_data *)((char *)t.data + offset * dtype_size(t.dtype));
    t.rows = rows;
    t.cols = cols;
    return t;
}

struct tensor tensor_like(struct tensor t) {
    return tensor_alloc(t.rows, t.cols, t.dtype, t.category);
}
