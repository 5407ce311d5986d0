// Ctrl-C: the step under way is finished, the checkpoint saved if asked for, then the program ends.
// Ctrl-Z: when the program was continued.
#ifndef SHARD_STOP_H
#define SHARD_STOP_H

#include <stdbool.h>

#ifdef __cplusplus
extern "C" {
#endif

/** @brief From now on SIGINT, SIGTERM and SIGHUP (the terminal is gone) are remembered, unless they
 * were set to be ignored; with one process it says at once that it has understood Ctrl-C. A second
 * one ends the program. A file that grows beyond the limit of the shell is no longer a reason to
 * die (SIGXFSZ), but a write that fails. When SIGCONT comes is noted. Local; call it before
 * anything that makes threads. */
void stop_init(void);

/** @brief Whether this process got such a signal. Local. */
bool stop_requested(void);

/** @brief The exit code to end with: 0, or 128 + the signal's number (130 for Ctrl-C). Local. */
int stop_exit_code(void);

/** @brief Seconds since this process was continued (SIGCONT) after it had been stopped; infinite if
 * it never was. Local. */
double stop_continued_s_ago(void);

#ifdef __cplusplus
}
#endif
#endif
