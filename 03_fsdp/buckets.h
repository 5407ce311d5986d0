// Buckets: gradients are summed over the ranks in pieces, while backward still makes the rest.
#ifndef SHARD_BUCKETS_H
#define SHARD_BUCKETS_H

#include "common/comm.h"
#include "common/tensor.h"

struct buckets;

/**
 * @brief Cuts the gradients into buckets.
 *
 * Local. Buckets are views: they take no memory of their own.
 * @param mode  "after", "buckets" or "overlap": see buckets.c
 * @param bytes of a bucket; the last one has what is left
 * @param grads (units) flat gradients of the units, one behind the other in memory
 */
struct buckets *buckets_create(struct comm world, const char *mode, size_t bytes,
                               const struct tensor *grads, int units);

/** @brief Frees them. Local. */
void buckets_free(struct buckets *b);

/** @brief The gradients of unit @p u are complete on this rank. Collective over the ranks: all call
 * it for the same units in the same order, from the last unit to the first. */
void buckets_ready(struct buckets *b, int u);

/** @brief Returns when all gradients are sums over all ranks. Collective over the ranks. */
void buckets_wait(struct buckets *b);

#endif
