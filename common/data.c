#include "data.h"
#include "error.h"
#include "idx.h"
#include "random.h"
#include "text.h"
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct data {
    bool text;
    uint64_t seed;
    const char *path; // of the options, or a constant
    char description[128];
    struct images images[2]; // by part; when not text
    struct text bytes; // when text
    size_t window;
    size_t vocab;
    size_t train_bytes; // the first of them are for training
    size_t samples[2]; // by part
    uint32_t *order; // (samples[DATA_TRAIN]) permutation of the epoch
    uint64_t epoch; // of order; UINT64_MAX: none yet
};

static struct data *data_new(uint64_t seed) {
    struct data *d = calloc(1, sizeof *d);
    CHECK(d != NULL);
    d->seed = seed;
    d->epoch = UINT64_MAX;
    return d;
}

static void order_alloc(struct data *d) {
    CHECK(d->samples[DATA_TRAIN] <= UINT32_MAX);
    d->order = malloc(d->samples[DATA_TRAIN] * sizeof *d->order);
    CHECK(d->order != NULL);
}

struct data *data_open_images(const char *path, uint64_t seed) {
    struct data *d = data_new(seed);
    const char *dir = path != NULL ? path : SHARD_DEFAULT_IMAGES;
    d->path = dir;
    images_open(&d->images[DATA_TRAIN], dir, "train");
    images_open(&d->images[DATA_VALIDATION], dir, "t10k");
    d->samples[DATA_TRAIN] = d->images[DATA_TRAIN].count;
    d->samples[DATA_VALIDATION] = d->images[DATA_VALIDATION].count;
    order_alloc(d);
    snprintf(d->description, sizeof d->description, "%zu images to train on, %zu to validate",
             d->samples[DATA_TRAIN], d->samples[DATA_VALIDATION]);
    return d;
}

// Bytes of a part that have a byte after them, which is their target.
static size_t targets(const struct data *d, enum data_part part) {
    size_t bytes = part == DATA_TRAIN ? d->train_bytes : d->bytes.count - d->train_bytes;
    return bytes - 1;
}

struct data *data_open_text(const char *path, size_t window, size_t vocab, uint64_t seed) {
    struct data *d = data_new(seed);
    d->text = true;
    d->window = window;
    d->vocab = vocab;
    const char *file = path != NULL ? path : SHARD_DEFAULT_TEXT;
    d->path = file;
    text_open(&d->bytes, file,
              "run ./run setup, which installs bible-kjv, or name a text file with --data FILE");
    d->train_bytes = d->bytes.count - d->bytes.count / 10;
    char purpose[160];
    snprintf(
        purpose, sizeof purpose,
        "one window of --seq %zu bytes and its target in the first nine tenths, and two bytes in "
        "the last; choose a longer file or a shorter --seq",
        window);
    size_t needed = window * 10 / 9 + 1; // so that nine tenths, rounded up, are window + 1
    text_check_count(&d->bytes, needed > 20 ? needed : 20, purpose);
    text_check_vocab(&d->bytes, vocab);
    d->samples[DATA_TRAIN] = targets(d, DATA_TRAIN) / window;
    d->samples[DATA_VALIDATION] = (targets(d, DATA_VALIDATION) + window - 1) / window;
    order_alloc(d);
    snprintf(d->description, sizeof d->description,
             "%zu bytes: %zu windows of %zu to train on, %zu to validate", d->bytes.count,
             d->samples[DATA_TRAIN], window, d->samples[DATA_VALIDATION]);
    return d;
}

void data_close(struct data *d) {
    if (d->text) {
        text_free(&d->bytes);
    } else {
        images_free(&d->images[DATA_TRAIN]);
        images_free(&d->images[DATA_VALIDATION]);
    }
    free(d->order);
    free(d);
}

const char *data_path(const struct data *d) {
    return d->path;
}

const char *data_description(const struct data *d) {
    return d->description;
}

// FNV-1a over 8-byte words, then the rest.
static uint64_t hash_bytes(uint64_t hash, const uint8_t *bytes, size_t count) {
    size_t i = 0;
    for (; i + 8 <= count; i += 8) {
        uint64_t word;
        memcpy(&word, bytes + i, 8);
        hash = (hash ^ word) * 0x100000001b3u;
        hash ^= hash >> 32;
    }
    for (; i < count; i++) {
        hash = (hash ^ bytes[i]) * 0x100000001b3u;
    }
    return hash ^ count;
}

uint64_t data_hash(const struct data *d) {
    uint64_t hash = 0xcbf29ce484222325u;
    if (d->text) {
        return hash_bytes(hash ^ d->window, d->bytes.bytes, d->bytes.count);
    }
    for (int part = 0; part < 2; part++) {
        const struct images *images = &d->images[part];
        hash = hash_bytes(hash, images->pixels, images->count * IMAGES_PIXELS);
        hash = hash_bytes(hash, images->labels, images->count);
    }
    return hash;
}

size_t data_samples(const struct data *d, enum data_part part) {
    return d->samples[part];
}

size_t data_targets(const struct data *d, enum data_part part, uint64_t first, size_t count) {
    if (!d->text) {
        return count;
    }
    if (part == DATA_TRAIN || count == 0) {
        return count * d->window;
    }
    size_t end = (first + count) * d->window;
    size_t all = targets(d, part);
    return (end < all ? end : all) - first * d->window;
}

size_t data_input_cols(const struct data *d) {
    return d->text ? d->window : IMAGES_PIXELS;
}

enum dtype data_input_dtype(const struct data *d) {
    return d->text ? DTYPE_I32 : DTYPE_F32;
}

size_t data_target_cols(const struct data *d) {
    return d->text ? d->window : 1;
}

int32_t data_prompt(const struct data *d) {
    return d->text && d->vocab > '\n' ? '\n' : 0;
}

size_t data_sample_at(struct data *d, enum data_part part, uint64_t position) {
    if (part == DATA_VALIDATION) {
        return position;
    }
    uint64_t epoch = position / d->samples[DATA_TRAIN];
    if (epoch != d->epoch) {
        struct random_key key = {
            .seed = d->seed,
            .purpose = RANDOM_ORDER,
            .id = (uint32_t)epoch,
        };
        random_permutation(key, d->order, (uint32_t)d->samples[DATA_TRAIN]);
        d->epoch = epoch;
    }
    return d->order[position % d->samples[DATA_TRAIN]];
}

static void load_image(const struct data *d, enum data_part part, size_t sample, float *input,
                       int32_t *target) {
    const uint8_t *pixels = d->images[part].pixels + sample * IMAGES_PIXELS;
    for (size_t i = 0; i < IMAGES_PIXELS; i++) {
        input[i] = ((float)pixels[i] / 255 - 0.1307f) / 0.3081f;
    }
    *target = d->images[part].labels[sample];
}

static void load_window(const struct data *d, enum data_part part, size_t sample, int32_t *input,
                        int32_t *target) {
    const uint8_t *bytes = d->bytes.bytes + (part == DATA_TRAIN ? 0 : d->train_bytes);
    size_t all = targets(d, part);
    for (size_t i = 0; i < d->window; i++) {
        size_t at = sample * d->window + i;
        input[i] = at < all ? bytes[at] : 0;
        target[i] = at < all ? bytes[at + 1] : -1;
    }
}

void data_load(struct data *d, enum data_part part, uint64_t first, size_t count, void *input,
               int32_t *target) {
    for (size_t i = 0; i < count; i++) {
        size_t sample = data_sample_at(d, part, first + i);
        if (d->text) {
            load_window(d, part, sample, (int32_t *)input + i * d->window, target + i * d->window);
        } else {
            load_image(d, part, sample, (float *)input + i * IMAGES_PIXELS, target + i);
        }
    }
}
