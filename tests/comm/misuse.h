// Ranks that do what they should not: the job must end within seconds, with one message.
#ifndef SHARD_TESTS_MISUSE_H
#define SHARD_TESTS_MISUSE_H

#include "comm.h"
#include <stdbool.h>

/**
 * @brief One rank calls something else than the rest. Collective over c.
 *
 * Some combinations are not possible, such as another root of an all-reduce: error_user().
 * @param differs whether this rank is the one
 * @param what    count, dtype, op, root, kind, order
 * @param in      the kind of call, see --help of test_comm
 */
void misuse_mismatch(struct comm c, bool differs, const char *what, const char *in);

/**
 * @brief One rank fails where it should make a call. Collective over c.
 * @param fails whether this rank is the one
 * @param fault hang, die, stop, fatal, user, exit
 * @param in    the kind of call
 */
void misuse_fault(struct comm c, bool fails, const char *fault, const char *in);

#endif
