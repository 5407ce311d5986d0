// Checkpoints and dumps: the whole of every parameter in files, whoever holds which part.
//
// A checkpoint is a folder: config.json and model.safetensors, which Hugging Face's transformers
// loads, and training.safetensors with the optimizer's state. It is replaced whole (files.h).
// Its bytes do not depend on how the training was cut: the trainer hands over one whole parameter
// after the other, in the order of units.
//
// A sharded checkpoint is the same in pieces (sharded.h), which every rank writes by itself:
// nothing is gathered, and nobody needs room for more than its parts. Both are read in the same
// way, by any number of ranks, so a run that resumes the one and saves the other without a step
// converts it.
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
    VALUES_UPDATED, // of the parameter, only what this rank updates
    VALUES_STATE, // VALUES_STATE + k: state k of the optimizer
};

/** @brief How checkpoints see a trainer. */
struct checkpoint {
    const struct model *model;
    const struct options *options;
    struct data *data;
    void *trainer;
    struct comm world; // all ranks; unused by programs of one
    bool writer; // this rank writes the files: rank 0 of world does
    bool holds; // this rank writes parts: all ranks that do hold each element of the model once
    bool dump_begun; // there is no part of an older dump any more
    bool dump_failed; // a part of the dump could not be written, so none follows
    char changes[300]; // settings that differ from those of the training resumed, for a note
    /** Brings the whole of parameter i of unit u to the writer's @p whole (param_whole_count floats
     * in host memory; NULL on the other ranks). Collective over all ranks. */
    void (*collect)(void *trainer, enum values what, int u, int i, float *whole);
    /** What this rank holds of parameter i of unit u: elements *first, *first + 1, … of the part of
     * the parameter that struct param describes; maybe none. A view; padding may be in it. Local.
     */
    struct tensor (*held)(void *trainer, enum values what, int u, int i, size_t *first);
};

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

/**
 * @brief Writes a checkpoint to the folder of --save, and one to that of --save-sharded, after
 * @p step steps; nothing without these flags.
 *
 * Collective over all ranks. When one fails, because the disk is full or a parameter is infinite or
 * NaN, the old one stays as it was and a warning is printed. A sharded one is written into a folder
 * that rank 0 makes: ranks that do not see it fail.
 * @param log where to say what was saved; NULL: nowhere
 * @return false on the writer if one failed; true elsewhere
 */
bool checkpoint_save(const struct checkpoint *c, int64_t step, struct log *log);

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
