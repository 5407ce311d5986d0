#include "sample.h"
#include "device.h"
#include "error.h"
#include "files.h"
#include "random.h"
#include "safetensors.h"
#include <math.h>
#include <stdlib.h>

static size_t largest(const float *logits, size_t count) {
    size_t best = 0;
    for (size_t i = 1; i < count; i++) {
        if (logits[i] > logits[best]) {
            best = i;
        }
    }
    return best;
}

size_t sample_draw(const float *logits, size_t count, double temperature, uint64_t seed,
                   uint64_t position) {
    size_t best = largest(logits, count);
    if (temperature == 0) {
        return best;
    }
    double total = 0;
    for (size_t i = 0; i < count; i++) {
        total += exp(((double)logits[i] - logits[best]) / temperature);
    }
    struct random_key key = {
        .seed = seed,
        .purpose = RANDOM_SAMPLE,
    };
    double left = random_uniform(key, position) * total;
    for (size_t i = 0; i < count; i++) {
        left -= exp(((double)logits[i] - logits[best]) / temperature);
        if (left < 0) {
            return i;
        }
    }
    return best;
}

int32_t logits_draw(struct tensor logits, size_t row, const struct options *o, uint64_t position) {
    float *host = malloc(logits.cols * sizeof *host);
    CHECK(host != NULL);
    device_download(host, tensor_view(logits, row * logits.cols, 1, logits.cols));
    size_t drawn = sample_draw(host, logits.cols, o->temperature, (uint64_t)o->seed, position);
    free(host);
    return (int32_t)drawn;
}

static struct safetensors_entry entry_of(const char *name, struct tensor t) {
    return (struct safetensors_entry){
        .name = name,
        .dtype = t.dtype,
        .dims = 2,
        .shape = {t.rows, t.cols},
    };
}

static bool tensor_write(struct safetensors_writer *w, struct tensor t, char *error,
                         size_t error_size) {
    size_t bytes = tensor_count(t) * dtype_size(t.dtype);
    void *host = malloc(bytes + 1);
    CHECK(host != NULL);
    device_download(host, t);
    bool good = safetensors_write(w, host, bytes, error, error_size);
    free(host);
    return good;
}

static bool tensors_write(const char *path, struct tensor input, struct tensor logits, char *error,
                          size_t error_size) {
    char later[ERROR_TEXT_SIZE];
    const struct safetensors_entry entries[] = {
        entry_of("input", input),
        entry_of("logits", logits),
    };
    struct safetensors_writer *w = safetensors_create(path, entries, 2, NULL, 0, error, error_size);
    if (w == NULL) {
        return false;
    }
    bool good =
        tensor_write(w, input, error, error_size) && tensor_write(w, logits, error, error_size);
    return safetensors_finish(w, good ? error : later, good ? error_size : sizeof later) && good;
}

bool logits_write(const char *path, struct tensor input, struct tensor logits) {
    char error[ERROR_TEXT_SIZE];
    if (path == NULL) {
        return true;
    }
    struct files_write *w = files_write_begin(path, error, sizeof error);
    bool good = w != NULL;
    if (good && tensors_write(files_write_path(w), input, logits, error, sizeof error)) {
        good = files_write_commit(w, error, sizeof error);
    } else {
        files_write_abandon(w);
        good = false;
    }
    if (!good) {
        error_warning("--logits %s was not written: %s", path, error);
    }
    return good;
}
