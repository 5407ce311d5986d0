// Collectives between ranks. Chapter 01 has one rank and needs nothing but the types.
#ifndef SHARD_COMM_H
#define SHARD_COMM_H

#include "tensor.h"
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

struct comm_group; // what a transport knows of a group

/**
 * @brief A group of ranks, passed by value.
 *
 * The functions below that say "Collective over c" must be called by all its ranks, in the same
 * order. In a group of one rank every collective is a copy, or nothing.
 */
struct comm {
    int rank; // this process in the group
    int size; // ranks in the group
    struct comm_group *group;
};

/** @brief What an all-reduce or a reduce-scatter does with the values of the ranks. */
enum comm_op {
    COMM_SUM, // added in rank order
    COMM_MAX,
};

/** @brief A collective that was enqueued on the communication stream. */
struct comm_handle {
    uint64_t ticket; // 0: nothing to wait for
};

/**
 * @brief Starts communication and returns the group of all ranks.
 *
 * Collective over all processes of the job; call it before anything that can fail. From then on
 * error_user() and error_fatal() act on all ranks. With the transport `self` there is one rank.
 */
struct comm comm_init(void);

/** @brief The group of this rank alone. Local; legal before comm_init(). */
struct comm comm_self(void);

/**
 * @brief Ends the start-up: returns when no rank has called error_user().
 *
 * Collective over all ranks. A rank that called error_user() takes part from there; then one rank
 * prints its message and all exit with code 2.
 */
void comm_agree(struct comm c);

/** @brief Waits for all communication and ends it. Collective over all ranks. */
void comm_finish(void);

/**
 * @brief Every rank's x becomes the reduction of all ranks' x.
 *
 * Collective over c; enqueued. x belongs to the communication stream until comm_wait().
 * @param x same count and type on every rank, any number of elements
 */
struct comm_handle comm_all_reduce(struct comm c, struct tensor x, enum comm_op op);

/**
 * @brief part becomes the sum of all ranks' whole, cut into c.size equal parts: part number c.rank.
 *
 * Collective over c; enqueued.
 * @param part  n elements; may be the part number c.rank of whole itself (in place)
 * @param whole c.size * n elements
 */
struct comm_handle comm_reduce_scatter(struct comm c, struct tensor part, struct tensor whole);

/**
 * @brief whole becomes the parts of all ranks, in rank order.
 *
 * Collective over c; enqueued.
 * @param whole c.size * n elements
 * @param part  n elements; may be the part number c.rank of whole itself (in place)
 */
struct comm_handle comm_all_gather(struct comm c, struct tensor whole, struct tensor part);

/** @brief x of all ranks becomes x of rank @p root. Collective over c; enqueued. */
struct comm_handle comm_broadcast(struct comm c, struct tensor x, int root);

/** @brief Makes the device wait until the collective is done: ops that come later see its result,
 * and its buffers are the caller's again. Local. A zero handle is ignored. */
void comm_wait(struct comm_handle handle);

/** @brief Each x[i] becomes the sum over the ranks, added in rank order. Collective over c; returns
 * the result. Host memory, for losses. */
void comm_sum_f64(struct comm c, double *x, size_t count);

/** @brief x becomes the largest of the ranks'. Collective over c; returns the result. Host memory.
 */
void comm_max_u32(struct comm c, uint32_t *x);

/** @brief x becomes the sum over the ranks, exact. Collective over c; returns the result. Host
 * memory. */
void comm_sum_u128(struct comm c, unsigned __int128 *x);

/** @brief The bytes of rank @p root for all. Collective over c; returns the result. Host memory,
 * for decisions. */
void comm_broadcast_host(struct comm c, void *data, size_t bytes, int root);

#ifdef __cplusplus
}
#endif
#endif
