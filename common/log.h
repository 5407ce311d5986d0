// What a program prints while it trains: header, lines, a progress bar, summary; and its JSON log.
#ifndef SHARD_LOG_H
#define SHARD_LOG_H

#include "comm.h"
#include "mem.h"
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

struct log;

/** @brief What a log needs to know of the program. */
struct log_config {
    bool quiet; // print nothing: every rank but one
    const char *json; // file for one JSON object a step; NULL: none
    const char *memory; // file for the timeline of the memory account; NULL: none
    const char *item; // "tokens" or "images"
    size_t parameters; // of the model
    int64_t begin; // steps done before this run
    int64_t end; // steps done after it
    int64_t print_every; // steps between lines on the terminal; 0: about 20 lines
};

/** @brief One training step, and the evaluation after it if there was one. */
struct log_step {
    int64_t step; // steps done so far, with this one
    double loss; // mean over the targets of the global batch
    double grad_norm; // before clipping
    double lr;
    double ms; // wall time of the step: log_step_begin() to log_step_end()
    struct comm_stats sent; // what this rank called and sent in it
    size_t items; // targets of the global batch
    size_t samples; // samples of the global batch
    bool evaluated;
    double val_loss; // mean over all validation targets
    double accuracy; // share of them that the model guesses right
};

/** @brief The step begins: remembers the time and what was sent so far. Local. */
void log_step_begin(struct log_step *s);

/** @brief The step is over: sets its ms and sent. Local. */
void log_step_end(struct log_step *s);

/** @brief Opens the log; ends with error_user() if a file cannot be written. Local; the
 * writing rank prints, the others are quiet. Free it with log_close(). */
struct log *log_open(struct log_config config);

/** @brief Closes the files; false, after a warning, if a write to one or to stdout failed. Local.
 */
bool log_close(struct log *log);

/** @brief A line "key  text" of the header or the summary. Local. */
void log_line(struct log *log, const char *key, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/** @brief Reports a step: JSON always, the terminal every print_every steps, the progress bar in
 * between if stdout is a terminal. Local.
 * @return false, after a warning, if a loss or the norm is infinite or NaN: going on is useless */
bool log_report(struct log *log, const struct log_step *s);

/** @brief Shows on the progress bar how far a long piece of work between steps is. Local.
 * @param what  "evaluating"
 * @param done  pieces of it
 * @param count all its pieces */
void log_progress(struct log *log, const char *what, size_t done, size_t count);

/** @brief Reports an evaluation that belongs to no step of this run. Local. As log_report(). */
bool log_evaluation(struct log *log, const struct log_step *s);

/** @brief Prints text that a model wrote, (count) bytes; what is not printable ASCII appears as
 * '?'. Local. */
void log_text(struct log *log, const int32_t *text, size_t count);

/** @brief The end: time, speed, and peak memory by category. Local. */
void log_summary(struct log *log, const struct mem_stats *mem);

#ifdef __cplusplus
}
#endif
#endif
