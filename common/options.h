// The settings that every program of every chapter has. A chapter adds its own to the table.
#ifndef SHARD_OPTIONS_H
#define SHARD_OPTIONS_H

#include "args.h"
#include "comm.h"
#include <stdbool.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

struct options {
    const char *data; // file or folder; NULL: the default of the model
    int64_t seed;
    int64_t threads; // compute threads of this process; 0: all cores

    int64_t steps; // of the whole training and its schedule; 0 with epochs > 0: by epochs
    int64_t epochs; // 0: by steps
    int64_t stop_after; // end this run after so many more steps; -1: no
    int64_t batch; // samples in a step, over all ranks
    int64_t micro_batches; // parts of a step that go through the model one after the other
    int64_t eval_every; // steps; 0: only at the end
    int64_t eval_batch; // samples in an evaluation batch

    const char *optimizer; // sgd, adamw, adadelta
    double lr;
    double min_lr; // cosine: where the learning rate ends
    int64_t warmup;
    const char *schedule; // constant, cosine, step
    double gamma; // schedule step: factor per epoch
    double beta1;
    double beta2;
    double rho;
    double eps;
    double weight_decay; // on matrices only
    double clip; // 0: no clipping

    const char *save;
    const char *save_sharded; // only where there are several ranks
    const char *load;
    const char *resume;
    int64_t save_every; // steps; 0: only at the end
    const char *dump;
    const char *log;
    int64_t print_every; // steps
    int64_t sample; // bytes of text to write at the end; llama only
    double temperature;
    const char *logits; // file for the logits of the first validation sample
    const char *memory; // file for the timeline of the memory account
    const char *trace; // file for the timeline of computation and communication
    struct comm_config comm; // only where there are several ranks
};

/** @brief The defaults that do not depend on the model; model_create() changes them. Local. */
struct options options_defaults(void);

/**
 * @brief Reads the command line: the flags of every program, those of the model, those of the
 * chapter.
 *
 * Local. Combinations that cannot be are the user's mistake. With --help, prints and exits.
 * @param o       holds the model's defaults when called
 * @param program one line for --help
 * @param model   flags of the model, ended by ARG_NONE
 * @param chapter flags of the chapter, ended by ARG_NONE
 */
void options_parse(struct options *o, int argc, char **argv, const char *program,
                   const struct arg *model, const struct arg *chapter);

#ifdef __cplusplus
}
#endif
#endif
