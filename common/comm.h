// Collectives between ranks. Three transports implement them: `self` (comm_self.c) for one process,
// `mpi` (mpi/) for many, and NCCL for GPUs; a program is linked with one.
//
// A collective is enqueued on the communication stream of its process and returns a handle; the
// stream runs its calls one after the other, beside the computation. On a CPU the stream is a
// thread.
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

// ---- start and end -----------------------------------------------------------------------------

/** @brief How communication behaves; the flags of the same names. */
struct comm_config {
    bool check; // --check-comm: ranks compare what they call, call by call
    bool messages; // --comm-messages: MPI messages even between ranks that share memory
    double timeout_s; // --comm-timeout: a collective that takes longer ends the job; 0: never
    const char *log; // --log-comm: each rank's calls go to PREFIX.RANK; NULL: nowhere
};

/** @brief The transport that this program is linked with: "self", "mpi", "nccl". Local. */
const char *comm_transport(void);

/**
 * @brief Starts communication and returns the group of all ranks.
 *
 * Collective over all processes of the job; call it before anything that can fail. From then on
 * error_user() and error_fatal() act on all ranks. With the transport `self` there is one rank.
 */
struct comm comm_init(void);

/** @brief The group of this rank alone. Local; legal before comm_init(). */
struct comm comm_self(void);

/** @brief How many ranks of the job run on this machine, this one included. Local. */
int comm_local_size(void);

/**
 * @brief Notes a fact that must be the same on all ranks: a flag, the data, the weights.
 *
 * Local; comm_start() compares the facts. Both strings are copied.
 * @param name  what is compared, as a message would call it: "--seed", "the data"
 * @param value its value on this rank, in words
 */
void comm_must_match(const char *name, const char *value);

/**
 * @brief Ends the start-up: returns when no rank has called error_user() and the facts agree.
 *
 * Collective over all ranks, and the first collective after comm_init(). A rank that called
 * error_user() takes part from there; then one rank prints its message and all exit with code 2.
 * A fact that differs is a user's mistake, too. After comm_start() error_user() ends the job at
 * once.
 * @param config copied, but not its strings
 */
void comm_start(struct comm c, const struct comm_config *config);

/** @brief Waits for all communication and ends it. Collective over all ranks.
 * @return false if this rank's log of calls is not complete; then it has said so */
bool comm_finish(void);

/**
 * @brief Cuts a group into groups: the ranks with the same @p color, in the order of their ranks.
 *
 * Collective over c, after comm_start(). The groups last until comm_finish().
 * @param color at least 0
 * @param name  for messages and traces: "dp", "tp"; copied
 */
struct comm comm_split(struct comm c, int color, const char *name);

// ---- collectives on tensors --------------------------------------------------------------------

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

/** @brief Sends x to rank @p to, which calls comm_recv(). Local; enqueued. Calls in flight between
 * the same two ranks are matched in their order; later calls do not wait for this one. */
struct comm_handle comm_send(struct comm c, struct tensor x, int to);

/** @brief x becomes what rank @p from sends with comm_send(), same count and type. Local; enqueued.
 */
struct comm_handle comm_recv(struct comm c, struct tensor x, int from);

/** @brief Makes the device wait until the collective is done: ops that come later see its result,
 * and its buffers are the caller's again. Local. A zero handle is ignored. */
void comm_wait(struct comm_handle handle);

/** @brief Returns when all ranks of c have called it. Collective over c. */
void comm_barrier(struct comm c);

// ---- collectives on host memory ----------------------------------------------------------------

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

/** @brief all becomes the data of all ranks, in rank order. Collective over c; returns the result.
 * Host memory, for reports.
 * @param all (c.size * bytes)
 */
void comm_gather_host(struct comm c, void *all, const void *data, size_t bytes);

/** @brief Sends host memory to rank @p to, which calls comm_recv_host(). Local; returns when @p
 * data may be used again. For files. */
void comm_send_host(struct comm c, const void *data, size_t bytes, int to);

/** @brief data becomes what rank @p from sends with comm_send_host(). Local; returns the result. */
void comm_recv_host(struct comm c, void *data, size_t bytes, int from);

// ---- accounts ----------------------------------------------------------------------------------

/** @brief The kinds of calls, for accounts, logs and traces. */
enum comm_kind {
    COMM_ALL_REDUCE,
    COMM_REDUCE_SCATTER,
    COMM_ALL_GATHER,
    COMM_BROADCAST,
    COMM_SEND,
    COMM_RECV,
    COMM_HOST, // all calls on host memory
    COMM_KINDS,
};

/** @brief "all-reduce", "reduce-scatter", "all-gather", "broadcast", "send", "recv", "host". */
const char *comm_kind_name(enum comm_kind kind);

/**
 * @brief What this rank called and sent so far in a group.
 *
 * Bytes are what the ring algorithm sends per rank, whatever the transport does: 2(n-1)/n of the
 * buffer for all-reduce, (n-1)/n of the whole for reduce-scatter and all-gather, the buffer for
 * broadcast (all ranks but one pass it on) and send. Source: Patarasuk & Yuan, "Bandwidth optimal
 * all-reduce algorithms for clusters of workstations", 2009.
 */
struct comm_stats {
    uint64_t calls[COMM_KINDS];
    uint64_t bytes[COMM_KINDS];
};

/** @brief The account of one group. Local. */
struct comm_stats comm_group_stats(struct comm c);

/** @brief The accounts of all groups of this rank, added. Local. */
struct comm_stats comm_stats(void);

#ifdef __cplusplus
}
#endif
#endif
