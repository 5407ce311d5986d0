// Any bytes as a safetensors file: opened, listed, and every tensor read.
#include "error.h"
#include "fuzz.h"
#include "safetensors.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

// Reads a tensor in two parts. The file was whole, so what its header says must be there.
static void read_entry(const struct safetensors *file, const struct safetensors_entry *entry) {
    char error[ERROR_TEXT_SIZE];
    size_t half = entry->count / 2;
    CHECK(entry->name != NULL && entry->type_name != NULL);
    CHECK(safetensors_find(file, entry->name) == entry);
    if (!entry->known) {
        CHECK(!safetensors_read(file, entry, 0, 0, NULL, error, sizeof error));
        return;
    }
    CHECK(entry->count * dtype_size(entry->dtype) == entry->bytes);
    char *out = malloc(entry->bytes + 1);
    CHECK(out != NULL);
    CHECK(safetensors_read(file, entry, 0, half, out, error, sizeof error));
    CHECK(safetensors_read(file, entry, half, entry->count - half,
                           out + half * dtype_size(entry->dtype), error, sizeof error));
    CHECK(!safetensors_read(file, entry, 0, entry->count + 1, out, error, sizeof error));
    free(out);
}

// Whether a writer takes all this: it knows its own types only, and no empty names.
static bool is_writable(const struct safetensors *file) {
    size_t pair_count;
    const struct safetensors_pair *pairs = safetensors_metadata_all(file, &pair_count);
    for (size_t k = 0; k < safetensors_count(file); k++) {
        const struct safetensors_entry *entry = safetensors_at(file, k);
        if (!entry->known || entry->name[0] == '\0') {
            return false;
        }
    }
    for (size_t k = 0; k < pair_count; k++) {
        if (pairs[k].key[0] == '\0') {
            return false;
        }
    }
    return true;
}

static void write_entries(struct safetensors_writer *writer, const struct safetensors *file) {
    char error[ERROR_TEXT_SIZE];
    for (size_t k = 0; k < safetensors_count(file); k++) {
        const struct safetensors_entry *entry = safetensors_at(file, k);
        char *data = malloc(entry->bytes + 1);
        CHECK(data != NULL);
        CHECK(safetensors_read(file, entry, 0, entry->count, data, error, sizeof error));
        CHECK(safetensors_write(writer, data, entry->bytes, error, sizeof error));
        free(data);
    }
}

static void compare_files(const struct safetensors *a, const struct safetensors *b) {
    size_t a_pairs, b_pairs;
    const struct safetensors_pair *pairs = safetensors_metadata_all(a, &a_pairs);
    safetensors_metadata_all(b, &b_pairs);
    CHECK(a_pairs == b_pairs && safetensors_count(a) == safetensors_count(b));
    for (size_t k = 0; k < a_pairs; k++) {
        CHECK(strcmp(safetensors_metadata(b, pairs[k].key), pairs[k].value) == 0);
    }
    for (size_t k = 0; k < safetensors_count(a); k++) {
        const struct safetensors_entry *x = safetensors_at(a, k), *y = safetensors_at(b, k);
        CHECK(strcmp(x->name, y->name) == 0 && x->dtype == y->dtype && x->dims == y->dims);
        CHECK(memcmp(x->shape, y->shape, sizeof x->shape) == 0 && x->bytes == y->bytes);
    }
}

// What was read can be written, and is then the same to a reader.
static void write_again(const struct safetensors *file, const char *path) {
    char error[ERROR_TEXT_SIZE];
    size_t count = safetensors_count(file), pair_count;
    const struct safetensors_pair *pairs = safetensors_metadata_all(file, &pair_count);
    struct safetensors_entry *entries = calloc(count + 1, sizeof *entries);
    CHECK(entries != NULL);
    for (size_t k = 0; k < count; k++) {
        entries[k] = *safetensors_at(file, k);
    }
    struct safetensors_writer *writer =
        safetensors_create(path, entries, count, pairs, pair_count, error, sizeof error);
    CHECK(writer != NULL);
    write_entries(writer, file);
    CHECK(safetensors_finish(writer, error, sizeof error));
    struct safetensors *again = safetensors_open(path, error, sizeof error);
    CHECK(again != NULL);
    compare_files(file, again);
    safetensors_close(again);
    free(entries);
}

static void check(const struct safetensors *file, const char *path) {
    size_t pair_count;
    const struct safetensors_pair *pairs = safetensors_metadata_all(file, &pair_count);
    for (size_t k = 0; k < safetensors_count(file); k++) {
        read_entry(file, safetensors_at(file, k));
    }
    for (size_t k = 0; k < pair_count; k++) {
        CHECK(safetensors_metadata(file, pairs[k].key) == pairs[k].value);
    }
    if (is_writable(file)) {
        write_again(file, path);
    }
}

// A file in memory that has a path. It stays open for the next input.
static int memory_file(char *path, size_t size) {
    int fd = memfd_create("fuzz", MFD_CLOEXEC);
    CHECK(fd >= 0);
    snprintf(path, size, "/proc/self/fd/%d", fd);
    return fd;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static int in = -1;
    static char in_path[64], out_path[64];
    char error[ERROR_TEXT_SIZE] = "";
    if (in < 0) {
        in = memory_file(in_path, sizeof in_path);
        memory_file(out_path, sizeof out_path);
    }
    CHECK(ftruncate(in, 0) == 0 && pwrite(in, data, size, 0) == (ssize_t)size);
    struct safetensors *file = safetensors_open(in_path, error, sizeof error);
    if (file != NULL) {
        check(file, out_path);
    } else {
        CHECK(error[0] != '\0');
    }
    safetensors_close(file);
    return 0;
}

size_t fuzz_seed(size_t k, uint8_t *out, size_t capacity) {
    static const char *const headers[] = {
        "{}",
        "{\"__metadata__\":{\"format\":\"pt\",\"a\\\"\\\\\\n\":\"\\u00e4\\ud83d\\ude00\xc3\xa4\"},"
        "\"w\":{\"dtype\":\"F32\",\"shape\":[2,1],\"data_offsets\":[0,8]},"
        "\"b\":{\"dtype\":\"U8\",\"shape\":[8],\"data_offsets\":[8,16]}}   ",
        "{\"a\":{\"data_offsets\":[0,16],\"shape\":[],\"dtype\":\"C128\"}}",
        "{\"s\":{\"dtype\":\"F64\",\"shape\":[],\"data_offsets\":[0,8]},"
        "\"z\":{\"dtype\":\"BF16\",\"shape\":[0,3],\"data_offsets\":[8,8]},"
        "\"i\":{\"dtype\":\"I32\",\"shape\":[1,2],\"data_offsets\":[8,16]}}",
    };
    if (k >= sizeof headers / sizeof headers[0]) {
        return 0;
    }
    uint64_t length = strlen(headers[k]);
    size_t data_bytes = k == 0 ? 0 : 16;
    CHECK(8 + length + data_bytes <= capacity);
    memcpy(out, &length, 8);
    memcpy(out + 8, headers[k], length);
    memset(out + 8 + length, 42, data_bytes);
    return 8 + length + data_bytes;
}
