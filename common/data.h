// Training data: images or text, read once into host memory, visited in a random order by epoch.
#ifndef SHARD_DATA_H
#define SHARD_DATA_H

#include "tensor.h"
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

struct data;

/** @brief Which samples. */
enum data_part {
    DATA_TRAIN, // visited by epoch, each in another order
    DATA_VALIDATION, // visited in the order of the file
};

/**
 * @brief Fashion-MNIST, or the digits, from a folder of IDX files.
 *
 * Local. A sample is an image of 28x28 pixels, as f32 (x/255 - 0.1307)/0.3081, and one target, its
 * class 0 … 9. Validation is the part called t10k. Broken files are the user's mistake.
 * @param path folder; NULL: where Debian's dataset-fashion-mnist puts it
 */
struct data *data_open_images(const char *path, uint64_t seed);

/**
 * @brief A text file, byte by byte.
 *
 * Local. Sample k is the bytes k*window … k*window + window - 1, and its targets are the bytes one
 * further. The last tenth of the file is for validation; a short rest counts there only, with
 * target -1 where there is no byte.
 * @param path   file; NULL: the King James Bible made when the programs were built
 * @param window positions of a sample
 * @param vocab  bytes from there on are the user's mistake
 */
struct data *data_open_text(const char *path, size_t window, size_t vocab, uint64_t seed);

/** @brief Frees the data. Local. */
void data_close(struct data *d);

/** @brief The file or folder it came from. Lives as long as d. */
const char *data_path(const struct data *d);

/** @brief What the header says of it: how many samples of what. Lives as long as d. */
const char *data_description(const struct data *d);

/** @brief A hash of all samples, so that a checkpoint or another rank can tell whether it has the
 * same. */
uint64_t data_hash(const struct data *d);

/** @brief Samples in a part. */
size_t data_samples(const struct data *d, enum data_part part);

/** @brief How many of the targets of the samples first … first + count - 1 count for the loss. */
size_t data_targets(const struct data *d, enum data_part part, uint64_t first, size_t count);

/** @brief Elements of a sample's input: 784 pixels, or `window` tokens. */
size_t data_input_cols(const struct data *d);

/** @brief Type of the inputs: DTYPE_F32 for pixels, DTYPE_I32 for tokens. */
enum dtype data_input_dtype(const struct data *d);

/** @brief Targets of a sample, I32. */
size_t data_target_cols(const struct data *d);

/** @brief The token that a text by the model goes on from: a newline; 0 where --vocab has none. */
int32_t data_prompt(const struct data *d);

/**
 * @brief Which sample of the file stands at a position.
 *
 * Positions of DATA_TRAIN count from the start of training through all epochs: position p is
 * element p % samples of the permutation drawn from (seed, p / samples). Positions of
 * DATA_VALIDATION are the samples.
 */
size_t data_sample_at(struct data *d, enum data_part part, uint64_t position);

/**
 * @brief Copies the samples at the positions first … first + count - 1.
 *
 * Local.
 * @param input   (count, data_input_cols) f32 or int32_t
 * @param targets (count, data_target_cols)
 */
void data_load(struct data *d, enum data_part part, uint64_t first, size_t count, void *input,
               int32_t *targets);

#ifdef __cplusplus
}
#endif
#endif
