// Drawing from what a model predicts.
#ifndef SHARD_SAMPLE_H
#define SHARD_SAMPLE_H

#include "options.h"
#include "tensor.h"
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

#ifdef __cplusplus
}
#endif
#endif
