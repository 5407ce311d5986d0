// What is the same for every model: the layout of parameters in a flat buffer, batches.
#include "model.h"
#include "device.h"
#include "error.h"
#include <stdlib.h>
#include <string.h>

enum { PARAM_ALIGN = 16 }; // elements: 64 bytes, so that BLAS sees the same alignment everywhere

static size_t align(size_t count) {
    return (count + PARAM_ALIGN - 1) / PARAM_ALIGN * PARAM_ALIGN;
}

void params_layout(struct param *params, int count) {
    size_t offset = 0;
    for (int i = 0; i < count; i++) {
        struct param *p = &params[i];
        p->offset = offset;
        offset = align(offset + p->rows * p->cols);
        if (p->place.whole_rows == 0) {
            p->place.whole_rows = p->rows;
            p->place.whole_cols = p->cols;
        }
        if (p->dims == 0) {
            p->dims = p->cols > 1 ? 2 : 1;
            p->shape[0] = p->place.whole_rows;
            p->shape[1] = p->place.whole_cols;
        }
    }
}

size_t unit_size(const struct model *m, int u) {
    struct param params[UNIT_PARAMS_MAX];
    int count = unit_params(m, u, params);
    const struct param *last = &params[count - 1];
    return align(last->offset + last->rows * last->cols);
}

struct tensor param_view(struct tensor flat, const struct param *p) {
    return tensor_view(flat, p->offset, p->rows, p->cols);
}

void padding_zero(const struct model *m, int u, struct tensor flat) {
    struct param params[UNIT_PARAMS_MAX];
    int count = unit_params(m, u, params);
    for (int i = 0; i < count; i++) {
        size_t from = params[i].offset + params[i].rows * params[i].cols;
        size_t to = i + 1 < count ? params[i + 1].offset : tensor_count(flat);
        if (to > from) {
            ops_zero(tensor_view(flat, from, to - from, 1));
        }
    }
}

size_t param_whole_count(const struct param *p) {
    return p->place.whole_rows * p->place.whole_cols;
}

size_t model_parameters(const struct model *m) {
    size_t total = 0;
    for (int u = 0; u < model_units(m); u++) {
        struct param params[UNIT_PARAMS_MAX];
        int count = unit_params(m, u, params);
        for (int i = 0; i < count; i++) {
            total += param_whole_count(&params[i]);
        }
    }
    return total;
}

void saved_free(struct saved *s) {
    tensor_free(&s->x);
    for (int i = 0; i < SAVED_MAX; i++) {
        tensor_free(&s->t[i]);
    }
}

// FNV-1a (Fowler, Noll & Vo), but eight bytes at a time.
uint64_t tensor_hash(struct tensor t, uint64_t hash) {
    size_t bytes = tensor_count(t) * dtype_size(t.dtype);
    size_t words = bytes / sizeof(uint64_t) + 1;
    uint64_t *host = calloc(words, sizeof *host);
    CHECK(host != NULL);
    device_download(host, t);
    hash ^= 0xcbf29ce484222325;
    for (size_t i = 0; i < words; i++) {
        hash = (hash ^ host[i]) * 0x100000001b3;
        hash ^= hash >> 32;
    }
    free(host);
    return hash;
}

struct batch batch_load(struct data *d, enum data_part part, uint64_t first_sample,
                        size_t samples) {
    struct batch b = {
        .samples = samples,
        .first_sample = first_sample,
        .train = part == DATA_TRAIN,
    };
    size_t cols = data_input_cols(d);
    size_t target_cols = data_target_cols(d);
    enum dtype dtype = data_input_dtype(d);
    b.input = tensor_alloc(samples, cols, dtype, MEM_ACTIVATIONS);
    b.targets = tensor_alloc(samples, target_cols, DTYPE_I32, MEM_ACTIVATIONS);
    void *input = malloc(samples * cols * dtype_size(dtype) + 1);
    int32_t *targets = malloc(samples * target_cols * sizeof *targets + 1);
    CHECK(input != NULL && targets != NULL);
    data_load(d, part, first_sample, samples, input, targets);
    device_upload(b.input, input);
    device_upload(b.targets, targets);
    free(targets);
    free(input);
    return b;
}

struct batch batch_prompt(const int32_t *tokens, size_t count) {
    struct batch b = {
        .samples = 1,
        .scale = 0,
    };
    b.input = tensor_alloc(1, count, DTYPE_I32, MEM_ACTIVATIONS);
    b.targets = tensor_alloc(1, count, DTYPE_I32, MEM_ACTIVATIONS);
    int32_t *none = malloc(count * sizeof *none);
    CHECK(none != NULL);
    memset(none, 0xff, count * sizeof *none); // -1
    device_upload(b.input, tokens);
    device_upload(b.targets, none);
    free(none);
    return b;
}

void batch_free(struct batch *b) {
    tensor_free(&b->input);
    tensor_free(&b->targets);
}
