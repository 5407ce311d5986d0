// A text file as bytes: the tokens of a byte-level language model.
#ifndef SHARD_TEXT_H
#define SHARD_TEXT_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/** @brief A whole file in memory. */
struct text {
    uint8_t *bytes; // (count)
    size_t count; // at least 1
    char *path; // for messages
};

/**
 * @brief Reads the whole file.
 *
 * Local. Free it with text_free(). A file that is missing, unreadable, empty or not a regular file
 * is the user's mistake: error_user().
 * @param hint what to do when there is no such file, for the message: "run ./run setup, or name a
 *             file with --data FILE"; or NULL
 */
void text_open(struct text *out, const char *path, const char *hint);

/**
 * @brief Ends with error_user() unless the text has at least @p count bytes.
 *
 * Local.
 * @param purpose what they are for, and what to change: "one window of --seq 128 tokens and its
 *                target, for training and for validation"
 */
void text_check_count(const struct text *text, size_t count, const char *purpose);

/** @brief Ends with error_user() unless every byte is below @p vocab: position, value and what is
 * allowed. Local. */
void text_check_vocab(const struct text *text, size_t vocab);

/** @brief Frees what text_open() allocated. Local. */
void text_free(struct text *text);

#ifdef __cplusplus
}
#endif
#endif
