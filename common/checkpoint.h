// Checkpoints and dumps: the whole of every parameter in files, whoever holds which part.
//
// A checkpoint is a folder: config.json and model.safetensors, which Hugging Face's transformers
// loads, and training.safetensors with the optimizer's state. It is replaced whole (files.h).
// Its bytes do not depend on how the training was cut: the trainer hands over one whole parameter
// after the other, in the order of units.
#ifndef SHARD_CHECKPOINT_H
#define SHARD_CHECKPOINT_H

#include "data.h"
#include "log.h"
#include "model.h"
#include "options.h"
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/** @brief Which values of a parameter. */
enum values {
    VALUES_PARAM,
    VALUES_GRAD,
    VALUES_STATE, // VALUES_STATE + k: state k of the optimizer
};

/** @brief The whole of one parameter's values in an open file. */
struct values_file;

/** @brief How checkpoints see a trainer. */
struct checkpoint {
    const struct model *model;
    const struct options *options;
    struct data *data;
    void *trainer;
    bool writer; // this rank writes the files: exactly one rank does
    bool dump_begun; // there is no part of an older dump any more
    bool dump_failed; // a part of the dump could not be written, so none follows
    char changes[300]; // settings that differ from those of the training resumed, for a note
    /** Brings the whole of parameter i of unit u to the writer's @p whole (param_whole_count floats
     * in host memory; NULL on the other ranks). Collective over all ranks. */
    void (*collect)(void *trainer, enum values what, int u, int i, float *whole);
    /** Takes this rank's part of parameter i of unit u from a file with values_read(). Local. */
    void (*place)(void *trainer, enum values what, int u, int i, const struct values_file *file);
};

/**
 * @brief Reads a range of the whole parameter as f32. Local.
 *
 * A file that cannot be read any more, or has numbers that are none, is the user's mistake.
 * @param first first element of the whole; anything if count is 0
 * @param out   (count) host memory
 */
void values_read(const struct values_file *file, size_t first, size_t count, float *out);

/** @brief Ends with error_user() if a file or folder that the run shall write cannot be written, or
 * lies where it reads or writes another. Local. */
void checkpoint_check(const struct checkpoint *c);

/**
 * @brief Does what --load or --resume ask for; nothing without them.
 *
 * Local: every rank reads the same files. A folder that is not such a checkpoint, one with infinite
 * numbers or NaN, or one of another model, and for --resume one made with another seed, batch, data
 * or optimizer, is the user's mistake.
 * @return the step to start from, 0 unless resumed
 */
int64_t checkpoint_load(struct checkpoint *c);

/**
 * @brief Says in the log from where a resumed run goes on, and which settings of the training it
 * changes. Local.
 * @param step  done so far
 * @param steps of the whole training
 */
void checkpoint_report(const struct checkpoint *c, struct log *log, int64_t step, int64_t steps);

/** @brief A hash of the file of weights that checkpoint_load() reads; 0 without --load and
 * --resume. Local; reads all of it. */
uint64_t checkpoint_hash(const struct checkpoint *c);

/**
 * @brief Writes a checkpoint to the folder of --save, after @p step steps.
 *
 * Collective over all ranks. When it fails, because the disk is full or a parameter is infinite or
 * NaN, the old one stays as it was and a warning is printed.
 * @return false on the writer if it failed; true elsewhere
 */
bool checkpoint_save(const struct checkpoint *c, int64_t step);

/** @brief Appends a line to steps.txt in the folder of --dump: step, loss, grad norm, the last two
 * as C hexadecimal floats. Local; on the writer only, and nothing without --dump. What fails is
 * warned of once; dump_values() tells it. The first call to this or to dump_values() makes the
 * folder, or removes what an older run has left there. */
void dump_step(struct checkpoint *c, int64_t step, double loss, double norm);

/**
 * @brief Writes the values of all parameters to NAME.safetensors in the folder of --dump.
 *
 * Collective over all ranks; nothing without --dump.
 * @return false on the writer if any part of the dump could not be written so far
 */
bool dump_values(struct checkpoint *c, const char *name, enum values what);

#ifdef __cplusplus
}
#endif
#endif
