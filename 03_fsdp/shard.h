// Sharding: what data parallelism keeps n times is kept once, a part on each rank.
#ifndef SHARD_SHARD_H
#define SHARD_SHARD_H

#include "common/comm.h"
#include "common/model.h"
#include <stdbool.h>

struct shard;

/** @brief What is cut, and how; the flags of the same names. */
struct shard_config {
    const char *level; // --shard: "none", "optimizer", "gradients", "parameters"
    int64_t replicas; // groups of ranks that each hold a whole model
    bool keep_gathered; // parameters stay gathered from forward to backward
    bool no_sync; // gradients are reduced with the last micro-batch only
    int64_t prefetch; // wraps that are gathered ahead
    int64_t wrap_params; // units are wrapped together until they have so many; 0: each by itself
};

/** @brief Elements begin … end - 1 of a unit's flat buffer. */
struct range {
    size_t begin;
    size_t end;
};

/**
 * @brief Decides which rank holds what.
 *
 * Local. A number of replicas that does not divide the ranks is the user's mistake.
 * @param config kept
 * @param world  ranks / replicas consecutive ones form a shard group
 */
struct shard *shard_create(const struct shard_config *config, struct comm world,
                           const struct model *model);

/** @brief Makes the groups. Collective over @p world, after comm_start(). */
void shard_connect(struct shard *s, struct comm world);

/** @brief Frees it. Local. */
void shard_free(struct shard *s);

/** @brief What is cut over how many ranks, in one line for people. Local. */
void shard_describe(const struct shard *s, char *text, size_t size);

/** @brief The ranks that together hold one model; this rank alone if nothing is cut. Local. */
struct comm shard_group(const struct shard *s);

/** @brief The ranks that hold the same parts as this one. Local. */
struct comm shard_replicas(const struct shard *s);

// ---- buffers -----------------------------------------------------------------------------------

/** @brief Whether the buffers of a category (parameters, gradients, optimizer) are cut. Local. */
bool shard_cuts(const struct shard *s, enum mem_category what);

/** @brief Elements of a buffer for what this rank holds of all units, with padding. Local.
 * @param what MEM_PARAMS, MEM_GRADS or MEM_OPTIMIZER */
size_t shard_elements(const struct shard *s, enum mem_category what);

/** @brief The view of what this rank holds of unit @p u in such a buffer, maybe nothing. Local. */
struct tensor shard_unit(const struct shard *s, struct tensor all, enum mem_category what, int u);

/** @brief What this rank holds of unit @p u in buffers of a category. Local. */
struct range shard_range(const struct shard *s, int u, enum mem_category what);

/** @brief What two ranges have in common; nothing, at the begin of @p a, if they do not meet.
 * Local. */
struct range range_meet(struct range a, struct range b);

/** @brief A view of elements of unit @p u, which this rank must hold. Local.
 * @param buffer (units) views, of shard_unit() */
struct tensor shard_view(const struct shard *s, const struct tensor *buffer, enum mem_category what,
                         int u, struct range elements);

/**
 * @brief Brings elements of unit @p u to host memory of rank 0 of the first shard group.
 *
 * Collective over shard_group(), in the first one; in the others nothing happens.
 * @param whole (elements) on that rank; NULL on the others
 */
void shard_collect(struct shard *s, const struct tensor *buffer, enum mem_category what, int u,
                   struct range elements, float *whole);

// ---- a training step ---------------------------------------------------------------------------

/**
 * @brief The whole flat buffer of unit @p u, for use until shard_release().
 *
 * Collective over shard_group(): all ranks call it for the same units in the same order.
 * @param towards +1 if unit u + 1 is next, -1 if u - 1 is
 */
struct tensor shard_gather(struct shard *s, const struct tensor *params, int u, int towards);

/** @brief Unit @p u is done in this direction. Local. */
void shard_release(struct shard *s, int u, int towards);

/** @brief Whether every micro-batch's gradients are reduced. Then backward writes them to
 * shard_fresh(), and shard_reduce() takes them. Local. */
bool shard_reduces_fresh(const struct shard *s);

/** @brief Where backward of unit @p u writes its gradients. Local. */
struct tensor shard_fresh(struct shard *s, int u);

/**
 * @brief The fresh gradients of unit @p u are complete on this rank.
 *
 * Collective over shard_group(). When its wrap is complete, the reduction starts.
 * @param first store the sums in @p grads rather than add them
 * @param last  of the step: sum over the replicas, too
 */
void shard_reduce(struct shard *s, struct tensor *grads, int u, bool first, bool last);

/** @brief The whole gradients of unit @p u are complete on this rank, for this step. Collective
 * over shard_group(). When its wrap is complete, the reduction starts; never, if nothing is
 * cut. */
void shard_reduce_whole(struct shard *s, struct tensor *grads, int u);

/** @brief Returns when the reductions are done. Collective over shard_group(). */
void shard_reduce_wait(struct shard *s, struct tensor *grads);

/** @brief This rank's part of the parameters has changed: brings it to those who keep copies.
 * Collective over shard_group(); enqueued, shard_gather() waits. */
void shard_params_changed(struct shard *s, struct tensor *params);

#endif
