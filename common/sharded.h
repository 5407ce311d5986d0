// The files of a checkpoint, whole or in parts: reading needs not know who wrote which part.
//
//     DIR/config.json                        DIR/config.json
//     DIR/model.safetensors                  DIR/rank-00000-of-00002.safetensors
//     DIR/training.safetensors               DIR/rank-00001-of-00002.safetensors
//
// On the left --save: one rank has gathered whole tensors. On the right --save-sharded: every rank
// that holds parts has written them into a file of its own, weights and optimizer state. A tensor
// of such a file is a piece, in one dimension: NAME@FIRST has the elements FIRST, FIRST + 1, … of
// the tensor NAME, counted row by row. The pieces of a tensor make it up without gaps and overlaps,
// in whichever files they are, so any number of ranks can read what it needs. A file of whole
// tensors is read as a set of one file, with one piece for each tensor.
//
// Source: the idea is that of torch.distributed.checkpoint.
#ifndef SHARD_SHARDED_H
#define SHARD_SHARDED_H

#include "model.h"
#include <stdbool.h>
#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

// Functions that can fail take `error`, a buffer of `error_size` bytes (ERROR_TEXT_SIZE is enough):
// when they return NULL it holds one sentence with the path and the reason.

enum { SHARDED_NAME_SIZE = 64 }; // bytes of a file's name, with its end

/** @brief The name of file number @p file of @p files. Local.
 * @param name (SHARDED_NAME_SIZE) */
void sharded_name(char *name, int file, int files);

/**
 * @brief The names that a sharded checkpoint at @p dir may hold, for files_folder_begin(): those of
 * @p files files, and those of other numbers of files that lie there now or that jobs which died
 * have left beside it.
 *
 * Local. Free it with sharded_names_free().
 * @return names with NULL at the end; the first is config.json
 */
const char *const *sharded_names(const char *dir, int files);

/** @brief Frees what sharded_names() returned; NULL is ignored. Local. */
void sharded_names_free(const char *const *names);

/** @brief A set of files that is open for reading. */
struct sharded;

/**
 * @brief Opens the files of the ranks in @p dir, or where it has none the file @p whole.
 *
 * Local. Reads all headers. NULL if a file is missing or broken, or not all are of one save. Close
 * it with sharded_close().
 * @param whole name of a file with whole tensors
 */
struct sharded *sharded_open(const char *dir, const char *whole, char *error, size_t error_size);

/** @brief Closes the files; NULL is ignored. Local. */
void sharded_close(struct sharded *s);

/** @brief Whether the tensors are in pieces, weights and states in the same files. Local. */
bool sharded_in_parts(const struct sharded *s);

/** @brief What messages call the set: the folder, or the path of the file. Local. */
const char *sharded_path(const struct sharded *s);

/** @brief How many files it has. Local. */
int sharded_files(const struct sharded *s);

/** @brief The path of a file; belongs to @p s. Local. */
const char *sharded_file(const struct sharded *s, int file);

/** @brief The value of a key of the metadata, the same in all files, or NULL; belongs to @p s.
 * Local. */
const char *sharded_metadata(const struct sharded *s, const char *key);

/** @brief A hash of all that the open files hold, and of @p hash. Local; reads them, as they were
 * when they were opened. */
uint64_t sharded_hash(const struct sharded *s, uint64_t hash);

/** @brief How many pieces all files have. Local. */
size_t sharded_pieces(const struct sharded *s);

/** @brief Of which tensor piece @p k is one; belongs to @p s. Local. */
const char *sharded_piece_of(const struct sharded *s, size_t k);

struct sharded_piece;

/** @brief A tensor of a set. */
struct sharded_tensor {
    const struct sharded_piece *pieces; // (count) in order
    size_t count;
    bool squares; // averages of squares, which are not negative: for the caller to set
};

/**
 * @brief Finds the whole of a tensor.
 *
 * Local. If it is not there, has another size or shape, or its pieces leave gaps or overlap, that
 * is the user's mistake: error_user().
 * @param p the parameter that has its shape
 */
struct sharded_tensor sharded_find(const struct sharded *s, const char *name,
                                   const struct param *p);

/**
 * @brief Reads the elements first … first + count - 1 of the whole tensor as f32.
 *
 * Local. A file that cannot be read any more, or has numbers that are none, is the user's mistake.
 * @param out (count) host memory
 */
void sharded_read(const struct sharded_tensor *t, size_t first, size_t count, float *out);

#ifdef __cplusplus
}
#endif
#endif
