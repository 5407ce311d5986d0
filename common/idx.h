// IDX files (MNIST's format), gzip or plain, and a labelled image set made of two of them.
#ifndef SHARD_IDX_H
#define SHARD_IDX_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#ifdef __cplusplus
extern "C" {
#endif

/** @brief The items of one IDX file of unsigned bytes. */
struct idx {
    uint8_t *data; // (count, item_bytes)
    size_t count; // items
    size_t item_bytes; // product of the dims of an item
};

/**
 * @brief Reads an IDX file of unsigned bytes from a stream; nothing in the file is trusted.
 *
 * Local. Recognizes gzip by its first bytes, whatever the name. Memory grows with the bytes that
 * arrive, never with what the header claims.
 * @param out   free it with idx_free(); empty when false is returned
 * @param dims  (dim_count) the expected dims of one item: {28, 28} for images; NULL for labels
 * @param error (error_size) on failure what was found and what was expected, without the path
 * @return false if the file is not what was expected
 * Source: yann.lecun.com/exdb/mnist, "The IDX file format"; RFC 1952 (gzip).
 */
bool idx_parse(struct idx *out, FILE *file, const size_t *dims, size_t dim_count, char *error,
               size_t error_size);

/** @brief As idx_parse(), from a file. Local. Every fault of the file is the user's mistake:
 * error_user() with the path. */
void idx_read(struct idx *out, const char *path, const size_t *dims, size_t dim_count);

/** @brief Frees the items. Local. */
void idx_free(struct idx *idx);

enum {
    IMAGES_HEIGHT = 28,
    IMAGES_WIDTH = 28,
    IMAGES_PIXELS = IMAGES_HEIGHT * IMAGES_WIDTH,
    IMAGES_CLASSES = 10,
};

/** @brief One part of MNIST or of a set in its format. */
struct images {
    uint8_t *pixels; // (count, IMAGES_PIXELS), 0 black … 255 white
    uint8_t *labels; // (count), each below IMAGES_CLASSES
    size_t count; // at least 1
};

/**
 * @brief Reads images and labels of one part of a data set, and checks both.
 *
 * Local. Looks in @p dir for PART-images-idx3-ubyte and PART-labels-idx1-ubyte, also with .gz and
 * with a dot for the dash before "idx". Free it with images_free(). Missing and broken files,
 * counts that differ and labels outside the classes are the user's mistake: error_user().
 * @param part "train" or "t10k"
 */
void images_open(struct images *out, const char *dir, const char *part);

/** @brief Frees pixels and labels. Local. */
void images_free(struct images *images);

#ifdef __cplusplus
}
#endif
#endif
