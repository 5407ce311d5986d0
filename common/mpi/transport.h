// Inside of the MPI transport; what its files share.
//
//     comm.c      start, groups, the functions of comm.h
//     stream.c    the communication stream: a queue of calls and a thread that runs them
//     shared.c    ranks of one machine: the memory that they share, and a barrier
//     slots.c     collectives through slots in that memory
//     direct.c    collectives that read the other ranks' memory
//     messages.c  collectives through MPI's messages; send and receive
//     reduce.c    sums in rank order
//     check.c     signatures, time limits, logs
//
// All MPI calls but those of start and end are made by whoever holds the stream (MPI's thread level
// "serialized").
#ifndef SHARD_MPI_TRANSPORT_H
#define SHARD_MPI_TRANSPORT_H

#include "comm.h"
#include <mpi.h>
#include <stdio.h>

enum {
    GROUP_NAME_BYTES = 32,
    MESSAGE_BYTES = 1 << 22, // longest MPI message of a collective, and piece of a send
};

struct shared; // the memory that ranks of a group share

struct comm_group {
    char name[GROUP_NAME_BYTES];
    int rank;
    int size;
    MPI_Comm mpi;
    int *job_ranks; // (size) the ranks' numbers in the whole job, for messages
    struct shared *shared; // NULL: MPI messages
    uint64_t calls; // collectives enqueued so far: the number of the last one
    uint64_t points; // the same for sends and receives
    struct comm_stats stats;
    struct comm_group *next; // all groups of this process
};

// One call of the stream. Buffers are host memory.
struct call {
    enum comm_kind kind; // what it is
    enum comm_kind account; // COMM_HOST for calls on host memory, else kind
    struct comm_group *group;
    uint64_t number; // of the call in its group, counted by itself for sends and receives
    char *whole; // all-reduce, broadcast, send, recv: the buffer
    char *part; // reduce-scatter, all-gather: this rank's part
    size_t count; // elements of whole; of part for reduce-scatter and all-gather
    enum dtype dtype;
    enum comm_op op;
    int peer; // root, or the other rank
    double enqueued_us;
    double begin_us;
};

// What the program was told.
extern struct comm_config comm_mpi_config;

// ---- stream ------------------------------------------------------------------------------------

// Whether this is the communication thread: then another thread may compute on this core.
extern _Thread_local bool stream_is_thread;

/** @brief Starts the communication thread. */
void stream_start(void);

/** @brief Runs all calls, then ends the thread. */
void stream_stop(void);

/** @brief Enqueues a call and returns its ticket. @p wake: let the thread begin with it; else it
 * begins when it wakes for another reason or when somebody waits. */
uint64_t stream_push(const struct call *call, bool wake);

/** @brief Returns when the call is done. The caller runs calls himself rather than sleep while the
 * thread wakes up. */
void stream_wait(uint64_t ticket);

/** @brief Returns when all calls are done, and keeps the stream for the caller's own MPI calls
 * until stream_release(). */
void stream_acquire(void);
void stream_release(void);

// ---- algorithms --------------------------------------------------------------------------------

/** @brief Maps memory that all ranks of the group share; NULL, on all ranks, where that does not
 * work. Collective over the group. */
struct shared *shared_open(const struct comm_group *g);
void shared_close(struct shared *s);

/** @brief Runs a collective through shared memory. */
void shared_run(struct shared *s, const struct call *call);

/** @brief Runs a collective through MPI messages. */
void messages_run(const struct call *call);

/** @brief Starts a send or receive. @p done is called by messages_progress() when it is over. */
void messages_begin(const struct call *call, uint64_t ticket);

/** @brief How many sends and receives are not over. */
size_t messages_pending(void);

/** @brief Looks whether sends and receives are over, and calls @p done for each that is. */
void messages_progress(void (*done)(uint64_t ticket, const struct call *call));

/**
 * @brief dst[i] = sources[0][i] + … + sources[n-1][i], in this order, or the largest of them.
 *
 * 16-bit types are added in f32 and rounded once.
 * @param dst (count) may be one of the sources
 */
void reduce_in_order(void *dst, const void *const *sources, int n, size_t count, enum dtype dtype,
                     enum comm_op op);

// ---- checks ------------------------------------------------------------------------------------

/** @brief What a rank called, for comparison with the other ranks. */
struct signature {
    uint64_t number;
    uint64_t count;
    uint32_t kind;
    uint32_t dtype;
    uint32_t op;
    int32_t root;
};

/** @brief The signature of a collective. */
struct signature signature_of(const struct call *call);

/** @brief Ends the job if the signatures (group size) of the ranks differ. */
void signatures_compare(const struct comm_group *g, const struct signature *signatures);

/** @brief Ends the job if a receive does not fit the sender's signature. */
void point_compare(const struct call *recv, const struct signature *send);

/** @brief Seconds that a call begun at @p begin_s may still take before --comm-timeout ends it;
 * infinite without a limit. Time before this process was continued (SIGCONT) does not count. Looks
 * twice, half a second apart, before it says that none is left. */
double time_left_s(double begin_s);

/** @brief Ends the job because ranks did not come: entered[r] says whether rank r of the group has
 * entered the call; NULL for a send or receive. */
void report_late(const struct call *call, const bool *entered) __attribute__((noreturn));

/** @brief Gives another rank, or mpirun, time to print the message and end the job. If it does not,
 * the caller must. */
void leave_it_to_others(void);

/** @brief Writes a line about a call to the log of --log-comm. */
void log_call(const struct call *call);
void log_calls_open(const char *prefix, int rank);
bool log_calls_close(void);

#endif
