// What a model predicts: drawing from it, and writing it down.
#ifndef SHARD_SAMPLE_H
#define SHARD_SAMPLE_H

#include "options.h"
#include "tensor.h"
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/**
 * @brief Draws one of @p count classes with probability softmax(logits / temperature).
 *
 * Local. The draw depends on (seed, position) and the logits alone. Temperature 0 takes the
 * largest, the first of equals.
 */
size_t sample_draw(const float *logits, size_t count, double temperature, uint64_t seed,
                   uint64_t position);

/**
 * @brief Draws a class from one row of logits, with the seed and the temperature of the options.
 *
 * Local.
 * @param logits   (rows, classes) f32
 * @param position number of the draw
 */
int32_t logits_draw(struct tensor logits, size_t row, const struct options *o, uint64_t position);

/**
 * @brief Writes a safetensors file with the tensors "input", as it is, and "logits", f32.
 *
 * Local. The file is whole or not there; a device or a pipe is written itself.
 * @param path   NULL: nothing is written, since another rank does
 * @param input  (1, n) of a batch: tokens or pixels
 * @param logits (rows, classes)
 * @return false, after a warning, if it could not be written
 */
bool logits_write(const char *path, struct tensor input, struct tensor logits);

#ifdef __cplusplus
}
#endif
#endif
