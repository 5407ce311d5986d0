// Files of named tensors in the safetensors format: a reader that trusts nothing, a streaming
// writer.
//
//     8 bytes      N, little-endian
//     N bytes      JSON: {"__metadata__": {"key": "value"}, "name": {"dtype": "F32",
//                  "shape": [2, 3], "data_offsets": [0, 24]}, …}, padded with spaces
//     the rest     the tensors, little-endian, row-major, without holes or overlaps
//
// Source: github.com/huggingface/safetensors, "Format" in its README.
#ifndef SHARD_SAFETENSORS_H
#define SHARD_SAFETENSORS_H

#include "tensor.h"
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// Functions that can fail take `error`, a buffer of `error_size` bytes (ERROR_TEXT_SIZE is enough):
// when they return false or NULL it holds one sentence with the path and the reason.

enum { SAFETENSORS_MAX_DIMS = 8 };

/** @brief One tensor of a file. A writer fills in name, dtype, dims and shape. */
struct safetensors_entry {
    const char *name;
    enum dtype dtype; // if `known`
    size_t dims; // 0: a scalar, one element
    size_t shape[SAFETENSORS_MAX_DIMS]; // (dims)
    // What follows is for readers; a writer leaves it zero.
    bool known; // whether dtype is one of ours; others can be listed but not read
    const char *type_name; // dtype as the file spells it
    size_t count; // elements
    size_t bytes; // size in the file
    uint64_t offset; // bytes from the beginning of the file
};

/** @brief One line of the file's metadata. */
struct safetensors_pair {
    const char *key;
    const char *value;
};

/** @brief A file opened for reading. */
struct safetensors;

/**
 * @brief Opens a file and checks all of its header against its size.
 *
 * Local. Reads the header only. NULL if it is not a whole, well-formed safetensors file: header
 * longer than the file or than 100 MB, JSON that breaks the rules, a name twice, offsets that are
 * outside, overlap, leave holes or do not fit the shape. Close it with safetensors_close().
 */
struct safetensors *safetensors_open(const char *path, char *error, size_t error_size);

/** @brief Closes the file and frees its entries; NULL is ignored. Local. */
void safetensors_close(struct safetensors *file);

/** @brief Number of tensors. Local. */
size_t safetensors_count(const struct safetensors *file);

/** @brief Tensor @p k in the header's order; belongs to @p file. Local. */
const struct safetensors_entry *safetensors_at(const struct safetensors *file, size_t k);

/** @brief The tensor of that name, or NULL; belongs to @p file. Local. */
const struct safetensors_entry *safetensors_find(const struct safetensors *file, const char *name);

/** @brief The value of a key of the metadata, or NULL; belongs to @p file. Local. */
const char *safetensors_metadata(const struct safetensors *file, const char *key);

/** @brief All (count) pairs of the metadata in the header's order; they belong to @p file. Local.
 */
const struct safetensors_pair *safetensors_metadata_all(const struct safetensors *file,
                                                        size_t *count);

/** @brief A hash of the bytes of the file and of @p hash. Local; reads all of it, up to the first
 * error. */
uint64_t safetensors_hash(const struct safetensors *file, uint64_t hash);

/**
 * @brief Reads the elements first … first + count - 1 of a tensor.
 *
 * Local. May be called from several threads. False if the type is not one of ours, the range is not
 * inside the tensor, or the file has become shorter since it was opened.
 * @param out (count) host memory, count * dtype_size(entry->dtype) bytes
 */
bool safetensors_read(const struct safetensors *file, const struct safetensors_entry *entry,
                      size_t first, size_t count, void *out, char *error, size_t error_size);

/** @brief A file that is being written. */
struct safetensors_writer;

/**
 * @brief Creates (or empties) a file and writes its header; the tensors' data follow in order.
 *
 * Local. The bytes depend on the arguments only. Data begin at a multiple of 8 bytes. End it with
 * safetensors_finish(). NULL if a name is empty, "__metadata__", there twice or not UTF-8, or the
 * file cannot be written. For a file that transformers shall load, give {"format", "pt"} as
 * metadata.
 * @param entries  (count) in the order in which the data will come; copied
 * @param metadata (metadata_count) pairs of strings; copied
 */
struct safetensors_writer *safetensors_create(const char *path,
                                              const struct safetensors_entry *entries, size_t count,
                                              const struct safetensors_pair *metadata,
                                              size_t metadata_count, char *error,
                                              size_t error_size);

/**
 * @brief Appends the next @p bytes of the tensors' data, which may begin and end anywhere.
 *
 * Local. After a failure the file is broken and all further calls fail.
 * @param data (bytes) host memory
 */
bool safetensors_write(struct safetensors_writer *writer, const void *data, size_t bytes,
                       char *error, size_t error_size);

/**
 * @brief Syncs and closes the file, and frees @p writer.
 *
 * Local. False if anything failed, a full disk for example, or if not exactly the promised bytes
 * came. The file is not removed then: it lies in a temporary folder that the caller abandons.
 */
bool safetensors_finish(struct safetensors_writer *writer, char *error, size_t error_size);

#ifdef __cplusplus
}
#endif
#endif
